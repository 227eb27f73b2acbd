"""The task `code`: sums that are too large to guess and take one line of Python."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from agentic_rollout.demo.task import WORDS, Example, Language, Question, Recipe, Task, render_answer

_QUESTIONS = 480
_VALIDATION_SHARE = 0.25

# Every digit is a token of its own, so that a number of any size can be copied.
_PIECES = rf"{WORDS}|\d"

_PROGRAM = re.compile(r"print\((\d{1,9}) \* (\d{1,9}) ([+-]) (\d{1,9})\)")


@dataclass(frozen=True, slots=True)
class Sum:
    """A product, more or less a third number. The value always has six digits."""

    first: int  # 320 to 999, the second factor too
    second: int
    sign: str  # + or -
    third: int  # 100 to 999

    def __str__(self) -> str:
        return f"{self.first} * {self.second} {self.sign} {self.third}"

    @property
    def value(self) -> int:
        """What it comes to."""
        return self.first * self.second + (self.third if self.sign == "+" else -self.third)


def invent_sum(rng: random.Random) -> Sum:
    """Makes up a sum, one of some 830 million."""
    return Sum(rng.randint(320, 999), rng.randint(320, 999), rng.choice("+-"), rng.randint(100, 999))


class CodeTask(Task):
    """Sums to be computed with a program, for the format `code_r1`."""

    name = "code"
    title = "Sums too large to guess"
    tool_tag = "code"
    observation_tag = "observation"
    calls = "executions"
    max_turn_tokens = 24
    config = "demo_code"
    recipe = Recipe(peak_learning_rate=1e-3, weight_decay=0.1, slip_rate=0.1)

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        asked: dict[Sum, Question] = {}
        while len(asked) < _QUESTIONS:
            made_up = invent_sum(rng)
            asked[made_up] = _question(made_up)
        self._seed = seed
        self._asked = asked.keys()
        held_out = round(_QUESTIONS * _VALIDATION_SHARE)
        questions = tuple(asked.values())
        self.train = questions[held_out:]
        self.validation = questions[:held_out]

    def language(self) -> Language:
        rng = random.Random(self._seed)
        examples = [self.example(rng) for _ in range(1000)]
        texts = [f"Question: {e.question.text}\n{e.question.call}" for e in examples]
        return Language(texts, self.tags(), _PIECES)

    def example(self, rng: random.Random) -> Example:
        made_up = invent_sum(rng)
        while made_up in self._asked:
            made_up = invent_sum(rng)
        question = _question(made_up)
        return Example(question, question.answer)

    def guess(self, rng: random.Random) -> str:
        return str(rng.randint(100_000, 999_999))

    def copying(self, rng: random.Random) -> tuple[str, str]:
        number = self.guess(rng)
        return "".join(self.render_observation(number)), render_answer(number)

    def observe(self, call: str) -> str:
        program = _PROGRAM.fullmatch(call)
        if program is None:
            return "SyntaxError: invalid syntax"
        first, second, sign, third = program.groups()
        return str(Sum(int(first), int(second), sign, int(third)).value)


def _question(asked: Sum) -> Question:
    return Question(f"What is {asked}?", f"print({asked})", str(asked.value))
