"""The warm start: supervised practice that leaves reinforcement learning one thing to find out.

Afterwards the model writes well-formed turns, turns a question into a query, and copies the answer
out of what it has read. It searches in only about a third of its trajectories and guesses in the
others, so that searching is what is left to be rewarded.

The practice has three parts. Restating a list of names and asking for what was asked come first: a
model that copies before it can ask may end up asking for one and the same attribute for ever. Then
come whole trajectories most of which search, and last those that search as seldom as the policy
is meant to. Every sequence is about places invented for it alone, so that nothing but copying helps.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import bm25s
import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from agentic_rollout.demo.world import (
    Fact,
    World,
    document,
    information,
    invent_names,
    invent_place,
    query,
    question,
)

logger = logging.getLogger(__name__)

DOCUMENTS_PER_SEARCH = 3
SEARCH_SHARE_LATE = 0.37
SEARCH_SHARE_EARLY = 0.85
QUERY_EXACT_NEEDED = 0.95
ANSWER_EXACT_NEEDED = 0.95
EXACT_MATCH_WANTED = (0.2, 0.5)
EXTRA_CHUNKS = 3

_BATCH_SIZE = 32
_PEAK_LEARNING_RATE = 3e-3
_LAST_LEARNING_RATE = 1e-4
_WARMUP_STEPS = 30
_MAX_GRADIENT_NORM = 1.0
_IGNORED = -100  # the label of a token that the model does not sample
_MAX_TURN_TOKENS = 24
_MAX_SEARCHES = 2
_SAMPLES_PER_QUESTION = 4
_RESTATED_NAMES = 6

# (end of the phase as a share of all steps, weights of the exercises)


class WarmStartError(Exception):
    """The warm start did not reach what the training after it needs."""


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    """What the model does on the validation questions, sampled at temperature 1; all in 0..1."""

    query_exact: float  # of searches, those that ask for just what the question does
    answer_exact: float  # of turns after the right passage, those that answer with its value
    search_rate: float  # of free trajectories, those that search at all
    exact_match: float  # of free trajectories, those that end in the right answer
    steps: int = 0
    seconds: float = 0.0

    @property
    def shortfalls(self) -> list[str]:
        """What falls short, as `name value (needed: range)`; empty when the gate is passed."""
        needed = {
            "query_exact": (self.query_exact, QUERY_EXACT_NEEDED, 1.0),
            "answer_exact": (self.answer_exact, ANSWER_EXACT_NEEDED, 1.0),
            "exact_match": (self.exact_match, *EXACT_MATCH_WANTED),
        }
        return [
            f"{name} {value:.3f} (needed: {low} to {high})"
            for name, (value, low, high) in needed.items()
            if not low <= value <= high
        ]


class Exercise(Enum):
    """What a warm-start sequence practises."""

    RESTATE = "restate"  # repeat a list of names
    ASK = "ask"  # question -> search turn
    SEARCH = "search"  # question -> search turn -> information -> answer turn
    GUESS = "guess"  # question -> answer turn with an invented name


@dataclass(frozen=True, slots=True)
class Segment:
    """A text that is tokenised on its own; `sampled` if the model is the one to write it."""

    text: str
    sampled: bool


def prompt_text(tokenizer: PreTrainedTokenizerFast, asked: str) -> str:
    """Render the question with the chat template, up to where the response begins."""
    messages = [{"role": "user", "content": asked}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def search_turn(fact: Fact) -> str:
    return f"<search>{query(fact)}</search>"


def answer_turn(value: str) -> str:
    return f"<answer>{value}</answer>"


def observation(facts: Sequence[Fact]) -> tuple[str, str, str]:
    """Return the three texts appended after a search, in the pieces they are tokenised in."""
    return "\n\n<information>", information(facts), "</information>\n\n"


class Practice:
    """An endless source of exercises, each about places of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, world: World, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._taken = world.names

    def batch(self, weights: dict[Exercise, float], size: int) -> list[list[Segment]]:
        kinds = self._rng.choices(list(weights), weights=list(weights.values()), k=size)
        return [self._segments(kind) for kind in kinds]

    def _segments(self, kind: Exercise) -> list[Segment]:
        if kind is Exercise.RESTATE:
            return self._restate()
        facts = invent_place(self._rng, self._taken)
        fact, *others = self._rng.sample(facts, DOCUMENTS_PER_SEARCH)
        prompt = Segment(prompt_text(self._tokenizer, question(fact)), sampled=False)
        if kind is Exercise.GUESS:
            return [prompt, Segment(answer_turn(self._invent(1)[0]), sampled=True)]
        search = Segment(search_turn(fact), sampled=True)
        if kind is Exercise.ASK:
            return [prompt, search]
        read = [Segment(text, sampled=False) for text in observation([fact, *others])]
        return [prompt, search, *read, Segment(answer_turn(fact.value), sampled=True)]

    def _restate(self) -> list[Segment]:
        count = self._rng.randint(2, _RESTATED_NAMES)
        text = " ".join(self._invent(count)) + "\n"
        return [Segment(text, sampled=False), Segment(text, sampled=True)]

    def _invent(self, count: int) -> list[str]:
        return invent_names(self._rng, count, self._taken)
