from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_rollout.config import LoopSettings
from agentic_rollout.engines.verl_server import VerlServerEngine
from agentic_rollout.errors import EngineError
from agentic_rollout.formats import SearchR1Format
from agentic_rollout.loop import AgentLoop, Prompt
from agentic_rollout.tools.base import BaseTool, Toolbox, ToolContext
from agentic_rollout.types import Completion, FinishReason, StopReason, Trajectory
from rollouts import CODEC, EOS, run
from story import Reply, StoryServer

QUESTION = "Which river?\n"
SEARCH = "<think>é</think><search>river</search>"
FOUND = "\n\n<information>Doc 1: the Rhône 😀</information>\n\n"
ANSWER = "<answer>Rhône</answer>"
STORY = [*CODEC.encode(QUESTION + SEARCH + FOUND + ANSWER), EOS]


def story_server(aborts: Sequence[int | None] = (), cls: type[StoryServer] = StoryServer) -> StoryServer:
    return cls(aborts, STORY, CODEC)


class River(BaseTool):
    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        return FOUND.removeprefix("\n\n<information>").removesuffix("</information>\n\n")


def engine(server: StoryServer, **kwargs: Any) -> VerlServerEngine:
    return VerlServerEngine(server, {"temperature": 1.0}, "t-1", codec=CODEC, eos_token_ids=[EOS], **kwargs)


def roll_out(server: StoryServer) -> tuple[Trajectory, VerlServerEngine]:
    served = engine(server)
    loop = AgentLoop(
        served,
        Toolbox({"search": River()}),
        SearchR1Format(),
        CODEC,
        LoopSettings(),
        prompt_length=64,
        response_length=512,
    )
    return run(loop.run(Prompt(tuple(CODEC.encode(QUESTION)), "t-1", seed=7))), served


def generate(server: StoryServer, *, max_tokens: int = 500, stop: Sequence[str] = ("</search>",)) -> Completion:
    prompt = CODEC.encode(QUESTION)
    return run(engine(server).generate(prompt, max_tokens=max_tokens, stop=stop, seed=None))


@given(aborts=st.lists(st.one_of(st.none(), st.integers(0, 60)), max_size=6))
def test_aborts_change_neither_tokens_nor_masks_nor_logprobs(aborts: list[int | None]) -> None:
    whole, _ = roll_out(story_server())
    server = story_server(aborts)
    trajectory, served = roll_out(server)
    assert trajectory.segments == whole.segments
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert CODEC.decode(trajectory.response_ids) == SEARCH + FOUND + ANSWER
    start = len(CODEC.encode(QUESTION))
    assert trajectory.response_logprobs == tuple(
        -float(start + index) if sampled else 0.0 for index, sampled in enumerate(trajectory.response_mask)
    )
    assert (served.oldest_weights, served.newest_weights) == (3, 2 + len(server.requests))
    assert served.preempted == len(server.requests)
    assert set(server.request_ids) == {"t-1"}


@pytest.mark.parametrize("after", range(1, len("</search>")))
def test_a_stop_string_cut_by_an_abort_still_ends_the_turn(after: int) -> None:
    before_tag = len(CODEC.encode(SEARCH)) - len("</search>")
    completion = generate(story_server([before_tag + after]))
    assert CODEC.decode(completion.token_ids) == SEARCH
    assert completion.finish_reason is FinishReason.STOP
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)


def test_an_abort_after_the_last_token_asks_no_more() -> None:
    class Late(StoryServer):
        def _reply(self, start: int, token_ids: list[int], reason: str, step: int) -> Reply:
            return super()._reply(start, token_ids, "aborted", step)

    server = story_server(cls=Late)
    assert CODEC.decode(generate(server).token_ids) == SEARCH
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("max_tokens", "stop", "reason"),
    [
        (500, ("</search>",), FinishReason.STOP),
        (len(CODEC.encode(SEARCH)), ("</search>",), FinishReason.STOP),
        (5, ("</search>",), FinishReason.LENGTH),
        (500, (), FinishReason.EOS),
        (len(STORY) - len(CODEC.encode(QUESTION)), (), FinishReason.EOS),
    ],
)
def test_how_a_turn_ended_is_read_from_its_tokens(max_tokens: int, stop: tuple[str, ...], reason: FinishReason) -> None:
    assert generate(story_server(), max_tokens=max_tokens, stop=stop).finish_reason is reason


def test_the_budget_counts_what_was_sampled_before_an_abort() -> None:
    server = story_server([4, 2])
    completion = generate(server, max_tokens=10)
    assert len(completion.token_ids) == 10
    assert [request["max_tokens"] for request in server.requests] == [10, 6, 4]


def test_requests_carry_verls_sampling_and_the_loops_rules() -> None:
    server = story_server()
    roll_out(server)
    first = server.requests[0]
    assert first["temperature"] == 1.0
    assert first["include_stop_str_in_output"]
    assert first["detokenize"]
    assert not first["skip_special_tokens"]
    assert "</search>" in first["stop"]
    assert len({request["seed"] for request in server.requests}) == 2


def test_a_server_without_logprobs_gives_none() -> None:
    class Silent(StoryServer):
        def _reply(self, start: int, token_ids: list[int], reason: str, step: int) -> Reply:
            return Reply(token_ids, None, reason)

    assert generate(story_server([3], Silent)).logprobs is None


def test_a_server_that_stays_aborted_is_an_error_in_the_end() -> None:
    server = story_server([0] * 1000)
    with pytest.raises(EngineError, match="took none on"):
        run(engine(server, patience_s=0.2).generate([*STORY[:3]], max_tokens=5, stop=(), seed=None))


def test_a_server_that_fails_is_a_typed_error() -> None:
    class Broken(StoryServer):
        async def generate(self, *args: Any, **kwargs: Any) -> Reply:
            raise RuntimeError("CUDA out of memory")

    with pytest.raises(EngineError, match="RuntimeError: CUDA out of memory"):
        generate(story_server(cls=Broken))
