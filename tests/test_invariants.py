"""What holds for every trajectory and every batch, whatever the model writes, the tools do and the limits are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentic_rollout.codec import ByteCodec
from agentic_rollout.collate import collate
from agentic_rollout.config import LoopSettings
from agentic_rollout.errors import ToolError
from agentic_rollout.formats import SearchR1Format
from agentic_rollout.types import Invalid, StopReason, Trajectory
from rollouts import CODEC, EOS, MergingCodec, Rollout, ScriptedTool, roll_out, sampled

T = TypeVar("T")

FORMAT = SearchR1Format()
MERGING = MergingCodec()
TIMEOUT_S = 5.0

LETTERS = st.sampled_from("abe think<>/\n\x00é中😀")
TEXTS = st.text(LETTERS, max_size=12) | st.text(max_size=12)
QUERIES = st.text(st.sampled_from("ab é中😀"), min_size=1, max_size=12) | st.sampled_from(["", " \n"])
SEARCHES = st.builds("{}<search>{}</search>".format, st.sampled_from(["", "<think>é ab</think>", "\n"]), QUERIES)
ODD_TEXTS = st.one_of(
    st.builds("{}<search>{}</search>{}".format, TEXTS, QUERIES, TEXTS),
    st.builds("<think>{}</think><answer>{}</answer>\n".format, TEXTS, TEXTS),
    st.builds("<information>{}</information><search>{}</search>".format, TEXTS, TEXTS),
    st.builds("<search>{}<answer>{}</answer>".format, TEXTS, TEXTS),
    st.sampled_from(["</search>", "</answer><search>", "<answer></answer>", "<search><search>a</search>"]),
    TEXTS,
)
# Most turns search, or rows would be short.
TURN_TEXTS = st.one_of(SEARCHES, SEARCHES, SEARCHES, ODD_TEXTS)
MAX_RESPONSE_LENGTH = 900
RUNS_ON = tuple(CODEC.encode("x" * MAX_RESPONSE_LENGTH))
NEVER = "never answers"
RESULTS = st.builds(lambda text, times: text * times, st.text(LETTERS, min_size=1), st.integers(1, 40))
FAILURES = st.sampled_from([RuntimeError("broken"), ToolError("refused", status="bad_arguments"), NEVER])
REPLIES = st.one_of(RESULTS, RESULTS, TEXTS, FAILURES)


@dataclass(frozen=True)
class Case:
    """One batch: prompts that begin with their row's number, the turns of each row, limits, and a tool's replies."""

    codec: ByteCodec | MergingCodec
    prompts: tuple[tuple[int, ...], ...]
    turns: tuple[tuple[tuple[int, ...], ...], ...]
    settings: LoopSettings
    replies: tuple[str | Exception, ...]
    prompt_length: int
    response_length: int

    def roll_out(self, rows: slice = slice(None)) -> Rollout:
        return roll_out(
            dict(enumerate(self.turns)),
            tool=ScriptedTool(self._reply, self._latency, timeout_s=TIMEOUT_S),
            codec=self.codec,
            prompts=self.prompts[rows],
            prompt_length=self.prompt_length,
            response_length=self.response_length,
            settings=self.settings,
        )

    def collate(self, trajectories: list[Trajectory], pad_token_id: int) -> dict[str, torch.Tensor]:
        return collate(
            trajectories,
            prompt_length=self.prompt_length,
            response_length=self.response_length,
            pad_token_id=pad_token_id,
        )

    def _reply(self, query: str) -> str:
        reply = self.replies[len(query) % len(self.replies)]
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _latency(self, query: str) -> float:
        hangs = self.replies[len(query) % len(self.replies)] == NEVER
        return 2 * TIMEOUT_S if hangs else len(query) / 10


@st.composite
def cases(draw: st.DrawFn) -> Case:
    codec = draw(st.sampled_from([CODEC, MERGING]))
    rows = range(draw(st.integers(1, 4)))
    extra = draw(st.lists(st.lists(st.integers(0, EOS), max_size=6), min_size=len(rows), max_size=len(rows)))
    prompts = tuple((row, *ids) for row, ids in zip(rows, extra, strict=True))
    response_length = draw(st.integers(150, MAX_RESPONSE_LENGTH) | st.integers(2, 250))
    return Case(
        codec,
        prompts,
        turns=tuple(tuple(draw(turn(codec)) for _ in range(draw(st.integers(1, 4)))) for _ in rows),
        settings=draw(limits(codec, response_length)),
        replies=tuple(draw(st.lists(REPLIES, min_size=1, max_size=3))),
        prompt_length=max(map(len, prompts)) + draw(st.integers(0, 3)),
        response_length=response_length,
    )


@st.composite
def turn(draw: st.DrawFn, codec: ByteCodec | MergingCodec) -> tuple[int, ...]:
    """A turn that ends with EOS or never; stop strings may end it before. With merges it has any spelling."""
    text = draw(TURN_TEXTS)
    if isinstance(codec, MergingCodec):
        ids = codec.spell(text, draw(st.lists(st.integers(0, 3), min_size=1, max_size=5)))
    else:
        ids = codec.encode(text.encode(errors="replace").decode())
    return (*ids, *draw(mostly(st.just((EOS,)), st.just(RUNS_ON))))


@st.composite
def limits(draw: st.DrawFn, codec: ByteCodec | MergingCodec, response_length: int) -> LoopSettings:
    """Limits from the least that is accepted upwards."""
    least = tag_length(codec) + 1
    return LoopSettings(
        max_turns=draw(st.integers(1, 4)),
        final_turn=draw(st.booleans()),
        final_instruction=draw(st.sampled_from(["", "Answer now.\n"])),
        max_turn_tokens=draw(mostly(st.none(), st.integers(1, 60))),
        max_observation_tokens=draw(st.integers(least, least + 8) | st.integers(least, 400)),
        reserve_answer_tokens=draw(st.integers(1, min(40, response_length - 1))),
        on_invalid=draw(mostly(st.just("feedback"), st.just("stop"))),
        on_eos=draw(mostly(st.just("feedback"), st.just("stop"))),
        on_tool_failure=draw(mostly(st.just("show"), st.just("stop"))),
    )


def mostly(usual: st.SearchStrategy[T], other: st.SearchStrategy[T]) -> st.SearchStrategy[T]:
    return st.one_of(usual, usual, usual, other)


def tag_length(codec: ByteCodec | MergingCodec) -> int:
    frame = FORMAT.render(())
    return len(codec.encode(frame.prefix)) + len(codec.encode(frame.suffix))


@given(cases())
def test_engine_reads_the_prompt_and_everything_that_followed(case: Case) -> None:
    rollout = case.roll_out()
    for row, trajectory in enumerate(rollout.trajectories):
        so_far, read = trajectory.prompt_ids, []
        for segment in trajectory.segments:
            if segment.sampled:
                read.append(so_far)
            so_far += segment.token_ids
        assert [turn.prompt_ids for turn in rollout.tape.rows[row]] == read
        assert so_far == trajectory.prompt_ids + trajectory.response_ids


@given(cases())
def test_sampled_tokens_are_the_engines_own_with_their_logprobs(case: Case) -> None:
    rollout = case.roll_out()
    batch = case.collate(rollout.trajectories, pad_token_id=EOS)
    for row, trajectory in enumerate(rollout.trajectories):
        completions = [turn.completion for turn in rollout.tape.rows[row]]
        assert [(s.token_ids, s.logprobs) for s in sampled(trajectory)] == [
            (completion.token_ids, completion.logprobs) for completion in completions
        ]
        trained = batch["response_mask"][row].bool()
        ids = [token for completion in completions for token in completion.token_ids]
        logprobs = [logprob for completion in completions for logprob in completion.logprobs or ()]
        assert batch["responses"][row][trained].tolist() == ids
        assert torch.equal(batch["rollout_log_probs"][row][trained], torch.tensor(logprobs))


@given(cases())
def test_ids_masks_logprobs_and_positions_have_one_shape(case: Case) -> None:
    trajectories = case.roll_out().trajectories
    batch = case.collate(trajectories, pad_token_id=EOS)
    rows, width_p, width_r = len(trajectories), case.prompt_length, case.response_length
    for trajectory in trajectories:
        lengths = {len(trajectory.response_ids), len(trajectory.response_mask), len(trajectory.response_logprobs or ())}
        assert lengths == {trajectory.response_length}
        assert trajectory.response_length <= width_r
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "prompts": (rows, width_p),
        **dict.fromkeys(("responses", "response_mask", "rollout_log_probs"), (rows, width_r)),
        **dict.fromkeys(("input_ids", "attention_mask", "info_mask", "position_ids"), (rows, width_p + width_r)),
    }
    assert torch.equal(batch["responses"], batch["input_ids"][:, width_p:])
    assert torch.equal(batch["prompts"], batch["input_ids"][:, :width_p])
    assert torch.equal(batch["response_mask"], batch["info_mask"][:, width_p:])
    assert (batch["info_mask"] <= batch["attention_mask"]).all()
    for row, trajectory in enumerate(trajectories):
        attended = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row][attended].tolist() == [*trajectory.prompt_ids, *trajectory.response_ids]
        assert batch["position_ids"][row][attended].tolist() == list(range(int(attended.sum())))
        # Padding on the right counts on, as in verl's own rollouts; padding on the left stays at 0.
        first = width_p - len(trajectory.prompt_ids)
        assert batch["position_ids"][row].tolist() == [0] * first + list(range(width_p + width_r - first))


@given(cases())
def test_closing_tag_survives_and_the_question_stays_whole(case: Case) -> None:
    rollout = case.roll_out()
    final_ids = tuple(case.codec.encode(case.settings.final_instruction))
    for row, trajectory in enumerate(rollout.trajectories):
        question = case.prompts[row]
        assert trajectory.prompt_ids == question
        assert all(turn.prompt_ids[: len(question)] == question for turn in rollout.tape.rows[row])
        for index, segment in enumerate(trajectory.segments):
            if segment.sampled:
                continue
            action = FORMAT.parse(case.codec.decode(trajectory.segments[index - 1].token_ids))
            frame = FORMAT.render_invalid("") if isinstance(action, Invalid) else FORMAT.render(())
            before_final = index + 2 == len(trajectory.segments) and is_final_turn(case, trajectory)
            shown = segment.token_ids
            if before_final and final_ids:
                assert shown[-len(final_ids) :] == final_ids
                shown = shown[: -len(final_ids)]
            prefix, suffix = case.codec.encode(frame.prefix), case.codec.encode(frame.suffix)
            assert list(shown[: len(prefix)]) == prefix
            assert list(shown[-len(suffix) :]) == suffix
            assert len(shown) <= case.settings.max_observation_tokens


def is_final_turn(case: Case, trajectory: Trajectory) -> bool:
    return case.settings.final_turn and trajectory.num_turns == case.settings.max_turns + 1


@given(cases())
def test_every_generation_keeps_to_the_limits(case: Case) -> None:
    rollout = case.roll_out()
    settings = case.settings
    for row, trajectory in enumerate(rollout.trajectories):
        turns_of_row = rollout.tape.rows[row]
        assert len(turns_of_row) <= settings.max_turns + settings.final_turn
        for number, turn in enumerate(turns_of_row):
            free = case.response_length - (len(turn.prompt_ids) - len(trajectory.prompt_ids))
            assert turn.max_tokens == min(free, settings.max_turn_tokens or free)
            # Whatever an observation took, an answer still has its reserve.
            assert number == 0 or free >= settings.reserve_answer_tokens


@given(cases())
def test_batch_together_equals_each_row_alone(case: Case) -> None:
    together = case.roll_out().trajectories
    alone = [case.roll_out(slice(row, row + 1)).trajectory for row in range(len(case.prompts))]
    assert [without_latencies(t) for t in together] == [without_latencies(t) for t in alone]


def without_latencies(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, tool_calls=[replace(call, latency_s=0.0) for call in trajectory.tool_calls])


@given(cases(), st.sampled_from([EOS, ord("<"), ord("x"), 0, 5000]))
def test_pad_token_changes_nothing(case: Case, pad_token_id: int) -> None:
    """5000 occurs in no text, the others are EOS, part of every tag, filler, or a row's first token."""
    trajectories = case.roll_out().trajectories
    batch, unmistakable = case.collate(trajectories, pad_token_id), case.collate(trajectories, pad_token_id=5000)
    for name in ("attention_mask", "info_mask", "response_mask", "position_ids", "rollout_log_probs"):
        assert torch.equal(batch[name], unmistakable[name])
    attended = batch["attention_mask"].bool()
    assert torch.equal(batch["input_ids"][attended], unmistakable["input_ids"][attended])
    assert (batch["input_ids"][~attended] == pad_token_id).all()


@given(cases())
def test_no_row_is_empty_or_ends_on_an_observation(case: Case) -> None:
    for trajectory in case.roll_out().trajectories:
        assert trajectory.response_length > 0
        origins = [segment.sampled for segment in trajectory.segments]
        assert origins == [index % 2 == 0 for index in range(len(origins))]
        assert origins[-1] is True
        assert trajectory.stop_reason is not None
        assert (trajectory.stop_reason is StopReason.ANSWERED) == (trajectory.answer is not None)


@pytest.mark.parametrize("text", ["<search>ab</search>", "<think>a</think><answer>é</answer>"])
def test_merging_codec_would_betray_a_second_encoding(text: str) -> None:
    spelled = MERGING.spell(text, (0,))
    assert MERGING.decode(spelled) == text
    assert MERGING.encode(text) != spelled
    assert MERGING.decode(MERGING.encode(text)) == text
