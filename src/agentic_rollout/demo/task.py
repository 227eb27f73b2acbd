"""What a task of the demo consists of: questions that only a tool answers, and the practice that leads up to them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "agentic_rollout/demo"
ANSWER_TAGS = ("<answer>", "</answer>")

# A lower-case word takes its leading space along; a capitalised one leaves it behind, so that a
# name has one spelling. What lies between words is a piece of its own.
WORDS = r" ?[a-z]+|[A-Z][a-z]*"


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the call that finds its answer, and the answer."""

    text: str
    call: str  # what stands between the tool's tags
    answer: str


@dataclass(frozen=True, slots=True)
class Example:
    """A question made up for practice, and what the tool shows when its call is made."""

    question: Question
    observation: str


@dataclass(frozen=True, slots=True)
class Language:
    """What a tokenizer is made for."""

    texts: Sequence[str]  # to train it on
    tags: tuple[str, ...]  # one token each
    pieces: str  # a regular expression: no token reaches beyond one of these, nor over several


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a task's warm start is run."""

    steps: int = 900
    peak_learning_rate: float = 1.5e-3
    weight_decay: float = 0.0
    slip_rate: float = 0.0
    """How often a token of the model's own is replaced at random, in some of the sequences.

    What follows is practised as before. A model this small, and never led astray in practice, amplifies float32
    rounding up to a hundredfold once a sampled slip leads it there.
    """


class Task(ABC):
    """A task: the same seed gives the same questions and the same practice.

    Args:
        seed: of the questions.
    """

    name: ClassVar[str]
    title: ClassVar[str]  # what the questions are about
    tool_tag: ClassVar[str]  # the model calls the tool between <tag> and </tag>
    observation_tag: ClassVar[str]
    calls: ClassVar[str]  # what calls of the tool are called, in the plural
    max_turn_tokens: ClassVar[int]
    config: ClassVar[str]  # the trainer's primary configuration
    recipe: ClassVar[Recipe] = Recipe()

    train: Sequence[Question]
    validation: Sequence[Question]  # about nothing that is trained or practised on

    @abstractmethod
    def __init__(self, seed: int) -> None: ...

    @abstractmethod
    def language(self) -> Language:
        """What the tokenizer is made for: texts that read like the task's, about other things."""

    @abstractmethod
    def example(self, rng: random.Random) -> Example:
        """Makes up a question for practice."""

    @abstractmethod
    def guess(self, rng: random.Random) -> str:
        """What a model that has not called the tool might answer."""

    @abstractmethod
    def copying(self, rng: random.Random) -> tuple[str, str]:
        """A text to read, and one to write by copying from it."""

    @abstractmethod
    def observe(self, call: str) -> str:
        """What the tool shows, without its tags, when the model makes this call."""

    def write_files(self, folder: Path) -> None:
        """Writes what the tool needs for training, if anything."""
        return

    @classmethod
    def render_call(cls, call: str) -> str:
        """The turn that calls the tool."""
        return f"<{cls.tool_tag}>{call}</{cls.tool_tag}>"

    @classmethod
    def render_observation(cls, body: str) -> tuple[str, str, str]:
        """The texts that follow a call: each is tokenised on its own."""
        return f"\n\n<{cls.observation_tag}>", body, f"</{cls.observation_tag}>\n\n"

    @classmethod
    def render_answer(cls, answer: str) -> str:
        """The turn that answers."""
        return render_answer(answer)

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        """The tags of the task's format."""
        names = ("think", cls.tool_tag, cls.observation_tag)
        return (*(tag for name in names for tag in (f"<{name}>", f"</{name}>")), *ANSWER_TAGS)


def render_answer(answer: str) -> str:
    """The turn that answers."""
    return answer.join(ANSWER_TAGS)


def write_questions(task: Task, train_path: Path, validation_path: Path) -> None:
    """Writes the questions of both parts as verl's parquet rows; an index occurs in one of them."""
    rows = [_question_row(task, question, i, "train") for i, question in enumerate(task.train)]
    _write_parquet(rows, train_path)
    first = len(rows)
    rows = [_question_row(task, question, first + i, "validation") for i, question in enumerate(task.validation)]
    _write_parquet(rows, validation_path)


def _question_row(task: Task, question: Question, index: int, split: str) -> dict[str, object]:
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question.text}],
        "ability": task.name,
        "reward_model": {"style": "rule", "ground_truth": {"target": [question.answer]}},
        "extra_info": {"index": index, "split": split, "question": question.text},
    }


def _write_parquet(rows: list[dict[str, object]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
