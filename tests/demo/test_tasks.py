from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agentic_rollout.demo.code_task import CodeTask, invent_sum
from agentic_rollout.demo.model import build_tokenizer
from agentic_rollout.demo.task import Recipe, Task, render_answer
from agentic_rollout.demo.tasks import TASKS
from agentic_rollout.formats.base import ActionFormat
from agentic_rollout.formats.build import build_format
from agentic_rollout.types import Answer, Call, ToolCall, ToolStatus

AGENT_CONFIGS = Path(__file__).parents[2] / "configs" / "agent"
TOOL_ARGUMENTS = {"search": ("search", "query"), "code": ("python", "code")}

every_task = pytest.mark.parametrize("name", TASKS)


def task_format(name: str) -> ActionFormat:
    """The format of the configuration that the task trains with."""
    return build_format(yaml.safe_load((AGENT_CONFIGS / f"{name}.yaml").read_text())["format"], key="format")


def turn_result(task: Task, text: str) -> str:
    name, argument = TOOL_ARGUMENTS[task.name]
    call = ToolCall(name, {argument: "asked"}, ToolStatus.OK, text, 0.0)
    observation = task_format(task.name).render([call])
    return f"{observation.prefix}{observation.body}{observation.suffix}"


@every_task
def test_same_seed_same_questions(name: str) -> None:
    assert TASKS[name](3).validation == TASKS[name](3).validation
    assert TASKS[name](3).validation != TASKS[name](4).validation


@every_task
def test_validation_questions_are_neither_trained_nor_practised_on(name: str) -> None:
    task, rng = TASKS[name](0), random.Random(0)
    asked = {question.text for question in (*task.train, *task.validation)}
    assert len(asked) == len(task.train) + len(task.validation) == 480
    assert not asked & {task.example(rng).question.text for _ in range(1000)}


@every_task
def test_a_practised_trajectory_is_what_the_format_reads_and_writes(name: str) -> None:
    task = TASKS[name](0)
    example = task.example(random.Random(0))
    action = task_format(name).parse(task.render_call(example.question.call))
    tool, argument = TOOL_ARGUMENTS[name]
    assert isinstance(action, Call)
    assert [(r.name, dict(r.arguments)) for r in action.requests] == [(tool, {argument: example.question.call})]
    assert turn_result(task, example.observation) == "".join(task.render_observation(example.observation))
    assert task_format(name).parse(render_answer(example.question.answer)) == Answer(example.question.answer)


@every_task
def test_the_right_call_shows_the_answer(name: str) -> None:
    task = TASKS[name](0)
    for question in task.validation:
        assert question.answer in task.observe(question.call)
        assert question.answer not in question.text


@every_task
def test_tags_are_tokens_and_names_and_numbers_are_spelled_alike_everywhere(name: str, tmp_path: Path) -> None:
    task = TASKS[name](0)
    tokenizer = build_tokenizer(task.language(), tmp_path)
    for tag in task.tags():
        assert len(tokenizer(tag)["input_ids"]) == 1
    for question in task.validation:
        alone = tokenizer(question.answer)["input_ids"]
        answered = tokenizer(render_answer(question.answer))["input_ids"]
        observed = tokenizer(task.observe(question.call))["input_ids"]
        assert answered[1:-1] == alone
        assert any(observed[i : i + len(alone)] == alone for i in range(len(observed)))


def test_a_program_prints_the_answer_in_six_digits() -> None:
    questions = CodeTask(0).validation
    program = "\n".join(question.call for question in questions)
    printed = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.split() == [question.answer for question in questions]
    assert {len(question.answer) for question in questions} == {6}


def test_sums_of_any_size_have_six_digits() -> None:
    rng = random.Random(0)
    assert {len(str(invent_sum(rng).value)) for _ in range(10_000)} == {6}


def test_a_wrong_program_shows_no_answer() -> None:
    assert CodeTask(0).observe("print(1 2)") == "SyntaxError: invalid syntax"


def test_a_slip_is_practised_after_and_never_learnt(tmp_path: Path) -> None:
    from agentic_rollout.demo.warmstart import Exercise, Practice

    class Steady(CodeTask):
        recipe = Recipe()

    tokenizer = build_tokenizer(CodeTask(0).language(), tmp_path)
    ids, labels = Practice(tokenizer, CodeTask(0), seed=0).batch({Exercise.SOLVE: 1.0}, 256)
    steady_ids, steady_labels = Practice(tokenizer, Steady(0), seed=0).batch({Exercise.SOLVE: 1.0}, 256)
    assert ids.shape == steady_ids.shape
    slipped = (labels == -100) & (steady_labels != -100)
    sampled = steady_labels != -100
    assert 0.02 < slipped.sum() / sampled.sum() < 0.04  # a tenth of the tokens, in three sequences of ten
    assert ((ids != steady_ids) <= slipped).all()
    assert (labels[~slipped] == steady_labels[~slipped]).all()
    assert (~slipped).all(dim=1).sum() > 256 * 0.6
