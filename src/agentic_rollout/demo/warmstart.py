"""The warm start: supervised practice that leaves reinforcement learning one thing to find out.

Afterwards the model writes well-formed turns, turns a question into a call of its tool, and copies the
answer out of what it has read. It calls the tool in only about a third of its trajectories and guesses
in the others, so that calling it is what is left to be rewarded.

The practice has three phases. Copying and making the call come first: a model that copies
before it can ask may end up asking for one and the same thing for ever. Then come whole trajectories
most of which call the tool, and last those that call it as seldom as the policy is meant to. Every
sequence is about a question made up for it alone: nothing but copying helps.
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

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from agentic_rollout.demo.task import ANSWER_TAGS, Question, Recipe, Task
from agentic_rollout.errors import AgenticRolloutError

logger = logging.getLogger(__name__)

SAMPLES_PER_QUESTION = 4
CALL_EXACT_NEEDED = 0.95
ANSWER_EXACT_NEEDED = 0.95
EXACT_MATCH_NEEDED = (0.2, 0.5)  # there is something to reward, and something left to learn
MAX_EXTRA_CHUNKS = 3

_BATCH_SIZE = 32
_DECAY_FROM = 0.6  # the share of the steps after which the learning rate falls, as a cosine
_LAST_LEARNING_RATE_FACTOR = 0.03
_WARMUP_STEPS = 30
_MAX_GRADIENT_NORM = 1.0
_NOT_SAMPLED = -100  # the label of a token that is not the model's, which `cross_entropy` skips
_MAX_CALLS = 2
_SLIPPING = 0.3  # the share of sequences in which tokens slip, if the recipe lets them


class WarmStartError(AgenticRolloutError):
    """The warm start has not reached what the training after it needs."""


class Exercise(StrEnum):
    """What a sequence practises."""

    COPY = "copy"  # a text, and one copied from it
    CALL = "call"  # a question and its call
    SOLVE = "solve"  # a whole trajectory: question, call, observation, answer turn
    GUESS = "guess"  # a whole trajectory: question, answer turn with an invented answer


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the practice: its share of the steps, and how often each exercise comes up."""

    share: float
    weights: Mapping[Exercise, float]


PHASES = (
    Phase(0.25, {Exercise.COPY: 0.5, Exercise.CALL: 0.5}),
    Phase(0.35, {Exercise.CALL: 0.15, Exercise.SOLVE: 0.70, Exercise.GUESS: 0.15}),
    Phase(0.40, {Exercise.SOLVE: 0.37, Exercise.GUESS: 0.63}),
)


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    """What the model does on the validation questions at temperature 1; shares in 0..1."""

    call_exact: float  # of the turns that begin a call, those that make just the right one
    answer_exact: float  # of the turns after the right call, those that answer with what it found
    call_rate: float  # of the trajectories sampled from the start, those that call the tool
    exact_match: float  # of the same trajectories, those that end in the right answer
    steps: int = 0  # taken by the optimiser
    seconds: float = 0.0  # of training and evaluation together

    def shortfalls(self) -> list[str]:
        """Name every figure out of its bounds, with the bounds; empty when the gate is passed."""
        gate = {
            "call_exact": (self.call_exact, CALL_EXACT_NEEDED, 1.0),
            "answer_exact": (self.answer_exact, ANSWER_EXACT_NEEDED, 1.0),
            "exact_match": (self.exact_match, *EXACT_MATCH_NEEDED),
        }
        return [
            f"{name} is {value:.3f}, needed {low:g} to {high:g}"
            for name, (value, low, high) in gate.items()
            if not low <= value <= high
        ]


def warm_start(
    task: Task,
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    steps: int | None = None,
    progress: bool = True,
) -> WarmStartReport:
    """Train `model` in place until it passes the gate, and return what was measured.

    After the planned `steps` (None: the task's recipe says how many), a model that does not pass
    practises on, in at most `MAX_EXTRA_CHUNKS` chunks of a third as many.

    Raises:
        WarmStartError: the gate is not passed after the last chunk.
    """
    started = time.monotonic()
    steps = task.recipe.steps if steps is None else steps
    practice = Practice(tokenizer, task, seed)
    trainer = Trainer(model, practice, task.recipe, progress=progress)
    trainer.train(PHASES, steps)
    for chunk in range(MAX_EXTRA_CHUNKS + 1):
        report = evaluate(model, tokenizer, task, seed=seed)
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
    """Makes up exercises, each about a question of its own that the task does not ask."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, task: Task, seed: int) -> None:
        self._tokenizer = tokenizer
        self._task = task
        self._rng = random.Random(seed)
        self._slips = random.Random(f"slips {seed}")
        self._own_tokens: set[int] = set()  # what slips are drawn from

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
            slips = self._slips.random() < _SLIPPING
            for segment in sequence:
                tokens = next(encoded)
                own = tokens if segment.sampled else [_NOT_SAMPLED] * len(tokens)
                if segment.sampled and slips:
                    tokens, own = self._slip(tokens)
                ids[-1] += tokens
                labels[-1] += own
        longest = max(map(len, ids))
        pad_id = _token_id(self._tokenizer, str(self._tokenizer.pad_token))
        return _pad_right(ids, pad_id, longest), _pad_right(labels, _NOT_SAMPLED, longest)

    def _slip(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        """Replaces some tokens at random; returns the tokens, and labels that leave the replaced ones out."""
        self._own_tokens.update(tokens)
        choices = sorted(self._own_tokens)
        rate = self._task.recipe.slip_rate
        slipped = [self._slips.choice(choices) if self._slips.random() < rate else None for _ in tokens]
        written = [token if slip is None else slip for token, slip in zip(tokens, slipped, strict=True)]
        labels = [token if slip is None else _NOT_SAMPLED for token, slip in zip(tokens, slipped, strict=True)]
        return written, labels

    def _exercise(self, kind: Exercise) -> list[Segment]:
        if kind is Exercise.COPY:
            given, copied = self._task.copying(self._rng)
            return [Segment(given, sampled=False), Segment(copied, sampled=True)]
        example = self._task.example(self._rng)
        asked = example.question
        prompt = Segment(render_prompt(self._tokenizer, asked), sampled=False)
        if kind is Exercise.GUESS:
            return [prompt, Segment(self._task.render_answer(self._task.guess(self._rng)), sampled=True)]
        call = Segment(self._task.render_call(asked.call), sampled=True)
        if kind is Exercise.CALL:
            return [prompt, call]
        read = [Segment(text, sampled=False) for text in self._task.render_observation(example.observation)]
        return [prompt, call, *read, Segment(self._task.render_answer(asked.answer), sampled=True)]


class Trainer:
    """Steps of AdamW on the exercises; the state of the optimiser lasts from chunk to chunk."""

    def __init__(self, model: Qwen2ForCausalLM, practice: Practice, recipe: Recipe, *, progress: bool) -> None:
        self._model = model
        self._practice = practice
        self._recipe = recipe
        self._progress = progress
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=recipe.peak_learning_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay
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
            rate = self._recipe.peak_learning_rate * _learning_rate_share(index, len(plan))
            loss = self._step(phase.weights, rate)
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
    task: Task,
    *,
    seed: int = 0,
    samples_per_question: int = SAMPLES_PER_QUESTION,
) -> WarmStartReport:
    """Measure the policy on the task's validation questions.

    Everything is sampled at temperature 1: greedy decoding makes a policy that calls its tool in a third
    of its trajectories look as if it never did. The caller's random state is left as it was.
    """
    sampler = Sampler(model, tokenizer, task)
    questions = task.validation
    asked = [*questions] * samples_per_question
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        call_exact = _measure_calls(sampler, questions)
        answer_exact = _measure_answers(sampler, questions)
        rollouts = _roll_out(sampler, asked)
    right = [rollout.answer == question.answer for rollout, question in zip(rollouts, asked, strict=True)]
    return WarmStartReport(
        call_exact=call_exact,
        answer_exact=answer_exact,
        call_rate=_share([rollout.calls > 0 for rollout in rollouts]),
        exact_match=_share(right),
    )


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Write the model and its tokenizer to one folder, as `from_pretrained` reads them."""
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


class Sampler:
    """Samples turns at temperature 1, a batch at a time."""

    def __init__(self, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Task) -> None:
        self.task = task
        self._model = model
        self._tokenizer = tokenizer
        self._pad_id = _token_id(tokenizer, str(tokenizer.pad_token))
        stops = (f"</{task.tool_tag}>", ANSWER_TAGS[1], str(tokenizer.eos_token))
        self._stop_ids = [_token_id(tokenizer, token) for token in stops]

    def encode(self, *texts: str) -> list[int]:
        """Return the token ids of texts that are tokenised one by one."""
        return [token for ids in encode(self._tokenizer, texts) for token in ids]

    def encode_prompt(self, question: Question) -> list[int]:
        """Return the token ids of the prompt that asks the question."""
        return self.encode(render_prompt(self._tokenizer, question))

    def encode_observed(self, turn: str, call: str) -> list[int]:
        """Return the token ids of a turn that makes the call, and of what the tool shows."""
        return self.encode(turn, *self.task.render_observation(self.task.observe(call)))

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
            max_new_tokens=self.task.max_turn_tokens,
            eos_token_id=self._stop_ids,
            pad_token_id=self._pad_id,
        )
        texts = self._tokenizer.batch_decode(output[:, longest:], skip_special_tokens=True)
        return [str(text) for text in texts]


def _measure_calls(sampler: Sampler, questions: Sequence[Question]) -> float:
    """Return how many of the calls, once begun, are the right one."""
    opening = f"<{sampler.task.tool_tag}>"
    turns = sampler.sample([sampler.encode_prompt(question) + sampler.encode(opening) for question in questions])
    right = [sampler.task.render_call(question.call) for question in questions]
    return _share([opening + turn == call for turn, call in zip(turns, right, strict=True)])


def _measure_answers(sampler: Sampler, questions: Sequence[Question]) -> float:
    """Return how many of the turns after the right call answer with what it found."""
    contexts = []
    for question in questions:
        turn = sampler.task.render_call(question.call)
        contexts.append(sampler.encode_prompt(question) + sampler.encode_observed(turn, question.call))
    turns = sampler.sample(contexts)
    return _share(
        [turn == sampler.task.render_answer(question.answer) for turn, question in zip(turns, questions, strict=True)]
    )


@dataclass(slots=True)
class _Rollout:
    context: list[int]
    calls: int = 0
    answer: str | None = None


def _roll_out(sampler: Sampler, questions: Sequence[Question]) -> list[_Rollout]:
    """Sample trajectories side by side, until they answer or cannot go on."""
    rollouts = [_Rollout(sampler.encode_prompt(question)) for question in questions]
    active = rollouts
    tool_tags = (f"<{sampler.task.tool_tag}>", f"</{sampler.task.tool_tag}>")
    for _ in range(_MAX_CALLS + 1):
        turns = sampler.sample([rollout.context for rollout in active])
        going_on = []
        for rollout, turn in zip(active, turns, strict=True):
            rollout.answer = _between(turn, *ANSWER_TAGS)
            call = _between(turn, *tool_tags)
            if call is not None:
                rollout.calls += 1
                rollout.context += sampler.encode_observed(turn, call)
                going_on.append(rollout)
        active = going_on
    return rollouts


def render_prompt(tokenizer: PreTrainedTokenizerFast, question: Question) -> str:
    """Return the chat template's text for the question, up to where the response begins."""
    messages = [{"role": "user", "content": question.text}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text."""
    encoded: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return encoded


def _learning_rate_share(step: int, steps: int) -> float:
    """Return the share of the peak rate for one of `steps` steps: up in a line, level, down in half a cosine."""
    warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
    decayed = max(0.0, (step / steps - _DECAY_FROM) / (1 - _DECAY_FROM))
    cosine = (1 + math.cos(math.pi * decayed)) / 2
    decay = _LAST_LEARNING_RATE_FACTOR + (1 - _LAST_LEARNING_RATE_FACTOR) * cosine
    return warmup * decay


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
