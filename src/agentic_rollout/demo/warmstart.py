"""The warm start: supervised practice that leaves reinforcement learning one thing to find out.

Afterwards the model writes well-formed turns, turns a question into a query, and copies the answer
out of what it has read. It searches in only about a third of its trajectories and guesses in the
others, so that searching is what is left to be rewarded.

The practice has three phases. Restating a list of names and asking for what was asked come first: a
model that copies before it can ask may end up asking for one and the same attribute for ever. Then
come whole trajectories most of which search, and last those that search as seldom as the policy
is meant to. Every sequence is about a place invented for it alone: nothing but copying helps.
"""

from __future__ import annotations

import logging
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
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
from agentic_rollout.errors import AgenticRolloutError

logger = logging.getLogger(__name__)

DOCUMENTS_PER_SEARCH = 3
SAMPLES_PER_QUESTION = 4
QUERY_EXACT_NEEDED = 0.95
ANSWER_EXACT_NEEDED = 0.95
EXACT_MATCH_NEEDED = (0.2, 0.5)  # there is something to reward, and something left to learn
MAX_EXTRA_CHUNKS = 3

_BATCH_SIZE = 32
_PEAK_LEARNING_RATE = 1.5e-3
_DECAY_FROM = 0.6  # the share of the steps after which the learning rate falls, as a cosine
_LAST_LEARNING_RATE_FACTOR = 0.03
_WARMUP_STEPS = 30
_MAX_GRADIENT_NORM = 1.0
_MAX_RESTATED_NAMES = 6
_NOT_SAMPLED = -100  # the label of a token that is not the model's, which `cross_entropy` skips
_MAX_TURN_TOKENS = 16
_MAX_SEARCHES = 2


class WarmStartError(AgenticRolloutError):
    """The warm start has not reached what the training after it needs."""


class Exercise(StrEnum):
    """What a sequence practises."""

    RESTATE = "restate"  # a list of names, and the same list again
    ASK = "ask"  # a question and its search turn
    SEARCH = "search"  # a whole trajectory: question, search turn, information, answer turn
    GUESS = "guess"  # a whole trajectory: question, answer turn with an invented name


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the practice: its share of the steps, and how often each exercise comes up."""

    share: float
    weights: Mapping[Exercise, float]


PHASES = (
    Phase(0.25, {Exercise.RESTATE: 0.5, Exercise.ASK: 0.5}),
    Phase(0.35, {Exercise.ASK: 0.15, Exercise.SEARCH: 0.70, Exercise.GUESS: 0.15}),
    Phase(0.40, {Exercise.SEARCH: 0.37, Exercise.GUESS: 0.63}),
)


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    """What the model does on the validation questions at temperature 1; shares in 0..1."""

    query_exact: float  # of the search turns, those that ask for just what the question does
    answer_exact: float  # of the turns after the right passage, those that answer with its value
    search_rate: float  # of the trajectories sampled from the start, those that search
    exact_match: float  # of the same trajectories, those that end in the right answer
    steps: int = 0  # taken by the optimiser
    seconds: float = 0.0  # of training and evaluation together

    def shortfalls(self) -> list[str]:
        """Name every figure out of its bounds, with the bounds; empty when the gate is passed."""
        gate = {
            "query_exact": (self.query_exact, QUERY_EXACT_NEEDED, 1.0),
            "answer_exact": (self.answer_exact, ANSWER_EXACT_NEEDED, 1.0),
            "exact_match": (self.exact_match, *EXACT_MATCH_NEEDED),
        }
        return [
            f"{name} is {value:.3f}, needed {low:g} to {high:g}"
            for name, (value, low, high) in gate.items()
            if not low <= value <= high
        ]


def warm_start(
    world: World,
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    steps: int = 900,
    progress: bool = True,
) -> WarmStartReport:
    """Train `model` in place until it passes the gate, and return what was measured.

    After the planned `steps`, a model that does not pass practises on, in at most
    `MAX_EXTRA_CHUNKS` chunks of a third as many.

    Raises:
        WarmStartError: the gate is not passed after the last chunk.
    """
    started = time.monotonic()
    practice = Practice(tokenizer, world, seed)
    trainer = Trainer(model, practice, progress=progress)
    trainer.train(PHASES, steps)
    for chunk in range(MAX_EXTRA_CHUNKS + 1):
        report = evaluate(model, tokenizer, world, seed=seed)
        report = replace(report, steps=trainer.steps, seconds=time.monotonic() - started)
        shortfalls = report.shortfalls()
        logger.info("warm start after %d steps: %s", trainer.steps, report)
        if not shortfalls:
            return report
        if chunk < MAX_EXTRA_CHUNKS:
            trainer.train(PHASES[1:], max(1, steps // 3))
    raise WarmStartError(
        f"After {trainer.steps} steps (seed={seed}): {'; '.join(shortfalls)}. "
        f"Give it more than steps={steps}, or another seed."
    )


@dataclass(frozen=True, slots=True)
class Segment:
    """A text tokenised on its own; `sampled` if it is the model that would write it."""

    text: str
    sampled: bool


class Practice:
    """Makes up exercises, each about a place of its own that is not in the world."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, world: World, seed: int) -> None:
        self._tokenizer = tokenizer
        self._taken = world.names
        self._rng = random.Random(seed)

    def batch(self, weights: Mapping[Exercise, float], size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and labels of `size` exercises: (size, longest), padded on the right."""
        kinds = self._rng.choices(list(weights), weights=list(weights.values()), k=size)
        sequences = [self._exercise(kind) for kind in kinds]
        texts = [segment.text for sequence in sequences for segment in sequence]
        encoded = iter(encode(self._tokenizer, texts))
        ids: list[list[int]] = []
        labels: list[list[int]] = []
        for sequence in sequences:
            ids.append([])
            labels.append([])
            for segment in sequence:
                tokens = next(encoded)
                ids[-1] += tokens
                labels[-1] += tokens if segment.sampled else [_NOT_SAMPLED] * len(tokens)
        longest = max(map(len, ids))
        pad_id = _token_id(self._tokenizer, str(self._tokenizer.pad_token))
        return _pad_right(ids, pad_id, longest), _pad_right(labels, _NOT_SAMPLED, longest)

    def _exercise(self, kind: Exercise) -> list[Segment]:
        if kind is Exercise.RESTATE:
            count = self._rng.randint(2, _MAX_RESTATED_NAMES)
            names = " ".join(self._invent(count)) + "\n"
            return [Segment(names, sampled=False), Segment(names, sampled=True)]
        place = invent_place(self._rng, self._taken)
        fact, *others = self._rng.sample(place, DOCUMENTS_PER_SEARCH)
        prompt = Segment(render_prompt(self._tokenizer, fact), sampled=False)
        if kind is Exercise.GUESS:
            return [prompt, Segment(render_answer(self._invent(1)[0]), sampled=True)]
        search = Segment(render_search(fact), sampled=True)
        if kind is Exercise.ASK:
            return [prompt, search]
        read = [Segment(text, sampled=False) for text in render_observation([fact, *others])]
        return [prompt, search, *read, Segment(render_answer(fact.value), sampled=True)]

    def _invent(self, count: int) -> list[str]:
        return invent_names(self._rng, count, self._taken)


class Trainer:
    """Steps of AdamW on the exercises; the state of the optimiser lasts from chunk to chunk."""

    def __init__(self, model: Qwen2ForCausalLM, practice: Practice, *, progress: bool) -> None:
        self._model = model
        self._practice = practice
        self._progress = progress
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=_PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0
        )
        self.steps = 0

    def train(self, phases: Sequence[Phase], steps: int) -> None:
        """Take `steps` steps, shared out among the phases in their order."""
        total = sum(phase.share for phase in phases)
        plan = [phase for phase in phases for _ in range(round(steps * phase.share / total))]
        self._model.train()
        seconds_between_updates = 0.2 if sys.stderr.isatty() else 20.0
        bar = tqdm(
            plan, desc="warm start", unit="step", mininterval=seconds_between_updates, disable=not self._progress
        )
        for index, phase in enumerate(bar):
            loss = self._step(phase.weights, _learning_rate(index, len(plan)))
            self.steps += 1
            if index % 25 == 0:
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)

    def _step(self, weights: Mapping[Exercise, float], learning_rate: float) -> float:
        ids, labels = self._practice.batch(weights, _BATCH_SIZE)
        hidden = self._model.model(input_ids=ids).last_hidden_state[:, :-1]  # (B, T-1, H)
        targets = labels[:, 1:]  # (B, T-1)
        sampled = targets != _NOT_SAMPLED
        loss = cross_entropy(self._model.lm_head(hidden[sampled]), targets[sampled])
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), _MAX_GRADIENT_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        return float(loss.detach())


def evaluate(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    world: World,
    *,
    seed: int = 0,
    samples_per_question: int = SAMPLES_PER_QUESTION,
) -> WarmStartReport:
    """Measure the policy on the validation questions, with a BM25 search over the world's corpus.

    Everything is sampled at temperature 1: greedy decoding makes a policy that searches in a third
    of its trajectories look as if it never did. The caller's random state is left as it was.
    """
    sampler = Sampler(model, tokenizer)
    index = SearchIndex(world)
    facts = world.validation
    asked = facts * samples_per_question
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        query_exact = _measure_queries(sampler, facts)
        answer_exact = _measure_answers(sampler, index, facts)
        rollouts = _roll_out(sampler, index, [sampler.encode_prompt(fact) for fact in asked])
    right = [rollout.answer == fact.value for rollout, fact in zip(rollouts, asked, strict=True)]
    return WarmStartReport(
        query_exact=query_exact,
        answer_exact=answer_exact,
        search_rate=_share([rollout.searches > 0 for rollout in rollouts]),
        exact_match=_share(right),
    )


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Write the model and its tokenizer to one folder, as `from_pretrained` reads them."""
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


class SearchIndex:
    """BM25 over the world's documents."""

    def __init__(self, world: World) -> None:
        self._facts = world.facts
        self._retriever = bm25s.BM25(backend="numpy")
        documents = [document(fact) for fact in world.facts]
        self._retriever.index(bm25s.tokenize(documents, show_progress=False), show_progress=False)

    def search(self, text: str) -> list[Fact]:
        """Return the facts of the best `DOCUMENTS_PER_SEARCH` passages, best first."""
        tokens = bm25s.tokenize([text], return_ids=False, show_progress=False)
        found, _ = self._retriever.retrieve(
            tokens, k=DOCUMENTS_PER_SEARCH, show_progress=False, backend_selection="numpy"
        )
        return [self._facts[int(position)] for position in found[0]]


class Sampler:
    """Samples turns at temperature 1, a batch at a time."""

    def __init__(self, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._pad_id = _token_id(tokenizer, str(tokenizer.pad_token))
        self._stop_ids = [_token_id(tokenizer, token) for token in ("</search>", "</answer>", str(tokenizer.eos_token))]

    def encode(self, *texts: str) -> list[int]:
        """Return the token ids of texts that are tokenised one by one."""
        return [token for ids in encode(self._tokenizer, texts) for token in ids]

    def encode_prompt(self, fact: Fact) -> list[int]:
        """Return the token ids of the prompt that asks for the fact."""
        return self.encode(render_prompt(self._tokenizer, fact))

    @torch.inference_mode()
    def sample(self, contexts: Sequence[list[int]]) -> list[str]:
        """Return one turn for each context, its end tag included."""
        if not contexts:
            return []
        longest = max(map(len, contexts))
        padding = [longest - len(ids) for ids in contexts]
        ids = torch.tensor([[self._pad_id] * p + c for p, c in zip(padding, contexts, strict=True)])
        mask = torch.tensor([[0] * p + [1] * (longest - p) for p in padding])
        self._model.eval()
        output = self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=_MAX_TURN_TOKENS,
            eos_token_id=self._stop_ids,
            pad_token_id=self._pad_id,
        )
        texts = self._tokenizer.batch_decode(output[:, longest:], skip_special_tokens=True)
        return [str(text) for text in texts]


def _measure_queries(sampler: Sampler, facts: Sequence[Fact]) -> float:
    """Return how many of the search turns, once begun, ask for just the fact."""
    turns = sampler.sample([sampler.encode_prompt(f) + sampler.encode("<search>") for f in facts])
    return _share(["<search>" + turn == render_search(fact) for turn, fact in zip(turns, facts, strict=True)])


def _measure_answers(sampler: Sampler, index: SearchIndex, facts: Sequence[Fact]) -> float:
    """Return how many of the turns after the right search answer with the fact's value."""
    contexts = []
    for fact in facts:
        found = render_observation(index.search(query(fact)))
        contexts.append(sampler.encode_prompt(fact) + sampler.encode(render_search(fact), *found))
    turns = sampler.sample(contexts)
    return _share([turn == render_answer(fact.value) for turn, fact in zip(turns, facts, strict=True)])


@dataclass(slots=True)
class _Rollout:
    context: list[int]
    searches: int = 0
    answer: str | None = None


def _roll_out(sampler: Sampler, index: SearchIndex, prompts: Sequence[list[int]]) -> list[_Rollout]:
    """Sample trajectories side by side, until they answer or cannot go on."""
    rollouts = [_Rollout(list(prompt)) for prompt in prompts]
    active = rollouts
    for _ in range(_MAX_SEARCHES + 1):
        turns = sampler.sample([rollout.context for rollout in active])
        going_on = []
        for rollout, turn in zip(active, turns, strict=True):
            rollout.answer = _between(turn, "<answer>", "</answer>")
            asked = _between(turn, "<search>", "</search>")
            if asked is not None:
                rollout.searches += 1
                found = render_observation(index.search(asked))
                rollout.context += sampler.encode(turn, *found)
                going_on.append(rollout)
        active = going_on
    return rollouts


def render_prompt(tokenizer: PreTrainedTokenizerFast, fact: Fact) -> str:
    """Return the chat template's text for the fact's question, up to where the response begins."""
    messages = [{"role": "user", "content": question(fact)}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def render_search(fact: Fact) -> str:
    """Return the turn that searches for the fact."""
    return f"<search>{query(fact)}</search>"


def render_answer(value: str) -> str:
    """Return the turn that answers with `value`."""
    return f"<answer>{value}</answer>"


def render_observation(found: Sequence[Fact]) -> tuple[str, str, str]:
    """Return the texts that follow a search turn: each is tokenised on its own."""
    return "\n\n<information>", information(found), "</information>\n\n"


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text."""
    encoded: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return encoded


def _learning_rate(step: int, steps: int) -> float:
    """Return the rate for one of `steps` steps: up in a line, level, down in half a cosine."""
    warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
    decayed = max(0.0, (step / steps - _DECAY_FROM) / (1 - _DECAY_FROM))
    cosine = (1 + math.cos(math.pi * decayed)) / 2
    decay = _LAST_LEARNING_RATE_FACTOR + (1 - _LAST_LEARNING_RATE_FACTOR) * cosine
    return _PEAK_LEARNING_RATE * warmup * decay


def _pad_right(rows: Sequence[list[int]], fill: int, length: int) -> torch.Tensor:
    return torch.tensor([row + [fill] * (length - len(row)) for row in rows])  # (B, length)


def _token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    return int(tokenizer.get_vocab()[token])


def _between(text: str, opening: str, closing: str) -> str | None:
    """Return what a turn holds between its tags; None if it is not that sort of turn."""
    if text.startswith(opening) and text.endswith(closing):
        return text[len(opening) : -len(closing)]
    return None


def _share(outcomes: Sequence[bool]) -> float:
    return sum(outcomes) / len(outcomes)
