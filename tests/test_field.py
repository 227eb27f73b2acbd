"""Bugs that other systems had, one test each. The docstring says where."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from agentic_rollout.codec import HFCodec
from agentic_rollout.collate import collate
from agentic_rollout.config import LoopSettings
from agentic_rollout.engines.scripted import ScriptedEngine, scripted_turns
from agentic_rollout.formats import SearchR1Format
from agentic_rollout.loop import AgentLoop, Prompt
from agentic_rollout.tools.base import Toolbox, ToolContext
from agentic_rollout.types import StopReason, ToolRequest, ToolStatus, Trajectory
from agentic_rollout.verl_plugin.reward import compute_score
from rollouts import CODEC, EOS, MergingCodec, ScriptedTool, observations, roll_out, run, spoken

SEARCH = "<search>q</search>"
ANSWER = "<answer>Paris</answer>"
MERGING = MergingCodec()
P, R = 8, 200


def collated(trajectories: list[Trajectory], *, pad_token_id: int = EOS) -> dict[str, torch.Tensor]:
    return collate(trajectories, prompt_length=P, response_length=R, pad_token_id=pad_token_id)


# Tokens


def test_sampled_tokens_are_not_encoded_a_second_time() -> None:
    """Search-R1, generation.py: decode, split, encode again trains on tokens that the model never sampled."""
    turn = [*MERGING.spell(SEARCH, (0,)), EOS]
    assert MERGING.encode(MERGING.decode(turn)) != turn[:-1]
    trajectory = roll_out({0: [turn, spoken(ANSWER)]}, codec=MERGING).trajectory
    assert trajectory.segments[0].token_ids == tuple(turn[:-1])


def test_eos_does_not_vanish() -> None:
    """Search-R1, generation.py: skipping special tokens when decoding loses the EOS that the model sampled."""
    trajectory = roll_out(["no action", ANSWER], on_eos="feedback").trajectory
    assert trajectory.segments[0].token_ids == (*CODEC.encode("no action"), EOS)
    assert trajectory.segments[1].sampled is False


def test_think_tag_sampled_in_pieces_stays_in_pieces() -> None:
    """Agent-R1#30: `<`, `think`, `>` came back as `<th`, `ink`, `>`, whose log-probabilities were NaN."""
    pieces = [ord("<"), *b"think", ord(">")]
    assert MERGING.encode("<think>") != pieces
    turn = [*pieces, *MERGING.encode(ANSWER), EOS]
    trajectory = roll_out({0: [turn]}, codec=MERGING).trajectory
    assert list(trajectory.response_ids[: len(pieces)]) == pieces


def test_turn_is_appended_once() -> None:
    """AReaL, notebook: `input_ids += resp.output_tokens` stood there twice, so the loss mask was shifted."""
    rollout = roll_out([SEARCH, ANSWER])
    (trajectory,) = rollout.trajectories
    given = [len(turn.completion.token_ids) for turn in rollout.tape.rows[0]]
    assert sum(trajectory.response_mask) == sum(given) == len(SEARCH) + len(ANSWER)
    assert len(trajectory.response_ids) == len(trajectory.response_mask)


def test_observation_gains_no_bos() -> None:
    """verl-tool: `tokenizer.encode(observation)` puts a BOS into the middle of a trajectory."""
    tokenizer = build_tokenizer_with_bos()
    prompt_ids = tokenizer.encode("?")
    assert prompt_ids[0] == tokenizer.bos_token_id
    codec = HFCodec(tokenizer)
    texts = iter([SEARCH, "no action" + tokenizer.eos_token, ANSWER])
    engine = ScriptedEngine(
        scripted_turns(lambda context: next(texts), codec), codec, eos_token_id=tokenizer.eos_token_id
    )
    loop = AgentLoop(
        engine,
        Toolbox({"search": ScriptedTool()}),
        SearchR1Format(),
        codec,
        LoopSettings(on_eos="feedback"),
        prompt_length=P,
        response_length=2000,
    )
    trajectory = run(loop.run(Prompt(tuple(prompt_ids), "row")))
    assert [segment.sampled for segment in trajectory.segments] == [True, False, True, False, True]
    assert tokenizer.bos_token_id not in trajectory.response_ids
    assert observations(trajectory, codec)[0] == "\n\n<information>about q</information>\n\n"


def test_tool_cannot_write_control_tokens() -> None:
    """What a page says is data: the name of a special token in it must not end the text for the model."""
    tokenizer = build_tokenizer_with_bos()
    codec = HFCodec(tokenizer)
    assert tokenizer.eos_token_id in codec.encode("a</s>b")
    spelt = codec.encode("a</s>b", split_special_tokens=True)
    assert tokenizer.eos_token_id not in spelt
    assert codec.decode(spelt) == "a</s>b"


def build_tokenizer_with_bos() -> Any:
    """A byte-level tokenizer of `transformers` that begins every text with BOS, as Llama's does."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


# Masks


@pytest.mark.parametrize("pad_token_id", [EOS, ord("a")], ids=["pad is EOS", "pad occurs in the text"])
def test_masks_do_not_come_from_the_pad_token(pad_token_id: int) -> None:
    """Search-R1, tensor_helper.py: `!= pad_token_id` also masks the EOS, or the text, that equals it."""
    trajectories = roll_out(["banana", ANSWER], on_eos="feedback", response_length=R).trajectories
    batch = collated(trajectories, pad_token_id=pad_token_id)
    length = trajectories[0].response_length
    assert pad_token_id in batch["responses"][0, :length]
    assert batch["attention_mask"][0, P:].tolist() == [1] * length + [0] * (R - length)
    assert batch["response_mask"][0, : len("banana") + 1].tolist() == [1] * (len("banana") + 1)


def test_mask_is_1_on_sampled_tokens_and_not_the_other_way_round() -> None:
    """RAGEN#71: the loss mask was inverted."""
    (trajectory,) = roll_out([SEARCH, ANSWER], response_length=R).trajectories
    row = collated([trajectory])
    trained = row["responses"][row["response_mask"].bool()].tolist()
    masked = row["responses"][(row["attention_mask"][:, P:] - row["response_mask"]).bool()].tolist()
    assert CODEC.decode(trained) == SEARCH + ANSWER
    assert CODEC.decode(masked) == "\n\n<information>about q</information>\n\n"


def test_observations_are_attended_to_but_stay_out_of_the_kl() -> None:
    """Search-R1 PR#21: with observations in it, the KL's estimate exploded."""
    (trajectory,) = roll_out([SEARCH, ANSWER], response_length=R).trajectories
    batch = collated([trajectory])
    observed = slice(len(SEARCH), trajectory.response_length - len(ANSWER))
    assert batch["attention_mask"][0, P:][observed].all()
    assert not batch["info_mask"][0, P:][observed].any()
    # A reference that disagrees wildly about observed tokens changes nothing.
    sampler = batch["rollout_log_probs"]
    reference = sampler.clone()
    reference[0, observed] = -50.0
    assert ((sampler - reference) * batch["response_mask"]).sum() == 0.0


def test_eos_has_the_log_probability_it_was_sampled_with() -> None:
    """SkyRL: the EOS was given log-probability 0.0, with mask 1."""
    rollout = roll_out(["no action", ANSWER], on_eos="feedback", response_length=R)
    (trajectory,) = rollout.trajectories
    position = trajectory.response_ids.index(EOS)
    completion = rollout.tape.rows[0][0].completion
    assert trajectory.response_mask[position] == 1
    assert trajectory.response_logprobs is not None
    assert completion.logprobs is not None
    assert trajectory.response_logprobs[position] == completion.logprobs[-1] < 0.0


STOPS: dict[StopReason, tuple[list[str], dict[str, Any]]] = {
    StopReason.ANSWERED: ([SEARCH, ANSWER], {}),
    StopReason.MAX_TURNS: ([SEARCH], {"max_turns": 2}),
    StopReason.LENGTH: ([SEARCH, "x" * R], {}),
    StopReason.EOS: ([SEARCH, "no action"], {"on_eos": "stop"}),
    StopReason.INVALID: ([SEARCH, "x" * 50], {"on_invalid": "stop", "max_turn_tokens": 30}),
    StopReason.TOOL_FAILURE: ([SEARCH, "<search>fail</search>"], {"on_tool_failure": "stop"}),
}


@pytest.mark.parametrize("stop_reason", StopReason)
def test_reward_at_the_last_token_lands_on_a_sampled_one(stop_reason: StopReason) -> None:
    """verl PR#6376: REINFORCE++ began its return anew after each masked token; so a masked last one lost the reward."""
    texts, changes = STOPS[stop_reason]
    (trajectory,) = roll_out(texts, tool=ScriptedTool(fail_if_told), response_length=R, **changes).trajectories
    assert trajectory.stop_reason is stop_reason
    batch = collated([trajectory])
    # verl puts a row's score here.
    last = int(batch["attention_mask"][0, P:].sum()) - 1
    assert batch["response_mask"][0, last] == 1
    assert batch["rollout_log_probs"][0, last] < 0.0


def fail_if_told(query: str) -> str:
    if query == "fail":
        raise RuntimeError("broken")
    return "found"


# Batches


def test_rollouts_of_one_prompt_come_back_beside_each_other_and_in_order() -> None:
    """Search-R1: `rollout.n > 1` tripped an assertion. Rows that end early must not overtake the others either."""
    questions, copies = 3, 4
    rows = {row: [spoken(f"<search>{row}</search>"), spoken(ANSWER)] for row in range(questions)}
    prompts = [(row, *CODEC.encode("?")) for row in range(questions) for _ in range(copies)]
    tool = ScriptedTool(latency=lambda query: 10.0 - float(query))
    trajectories = roll_out(rows, tool=tool, prompts=prompts).trajectories
    assert [trajectory.prompt_ids for trajectory in trajectories] == prompts


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_batch_of_any_size_is_not_padded_with_copies_of_its_first_row(rows: int) -> None:
    """Search-R1: batches were filled up with copies of the first sequence to suit the number of GPUs."""
    rollout = roll_out({row: [spoken(ANSWER)] for row in range(rows)}, response_length=R)
    assert sorted(rollout.tape.rows) == list(range(rows))
    assert collated(rollout.trajectories)["prompts"][:, -2].tolist() == list(range(rows))


# Budgets


def test_long_result_keeps_its_closing_tag() -> None:
    """Search-R1: cutting the encoded observation on the right loses `</information>`."""
    tool = ScriptedTool(lambda query: "a long passage, " * 500)
    trajectory = roll_out([SEARCH, ANSWER], tool=tool, max_observation_tokens=100).trajectory
    (shown,) = observations(trajectory)
    assert len(shown) == 100
    assert shown.endswith("</information>\n\n")


def test_question_is_never_cut() -> None:
    """Search-R1: cutting the growing context on the left can lose the question."""
    question = (0, *CODEC.encode("Who?"))
    tool = ScriptedTool(lambda query: "a long passage, " * 500)
    rollout = roll_out({0: [spoken(SEARCH)]}, tool=tool, prompts=[question], prompt_length=P, response_length=R)
    assert len(rollout.tape.rows[0]) > 1
    assert all(turn.prompt_ids[: len(question)] == question for turn in rollout.tape.rows[0])
    assert collated(rollout.trajectories)["prompts"][0, P - len(question) :].tolist() == list(question)


def test_full_context_ends_the_row_and_not_the_run() -> None:
    """verl-tool#85: a context overflow crashed the run."""
    rows = {0: [spoken(SEARCH)], 1: [spoken("x" * 10 * R)], 2: [spoken(ANSWER)]}
    rollout = roll_out(rows, max_turns=100, prompt_length=P, response_length=R)
    assert [t.stop_reason for t in rollout.trajectories] == [
        StopReason.LENGTH,
        StopReason.LENGTH,
        StopReason.ANSWERED,
    ]
    turns = itertools.chain.from_iterable(rollout.tape.rows.values())
    assert all(len(turn.prompt_ids) + turn.max_tokens <= P + R for turn in turns)


# Tools


def test_tool_that_never_answers_times_out() -> None:
    """code-r1: `requests.post` had no timeout."""
    tool = ScriptedTool(latency=lambda query: 1e9, timeout_s=20.0)
    rollout = roll_out([SEARCH, ANSWER], tool=tool)
    (call,) = rollout.trajectory.tool_calls
    assert call.status is ToolStatus.TIMEOUT
    assert rollout.trajectory.stop_reason is StopReason.ANSWERED
    assert rollout.took_s == pytest.approx(20.0)


def test_calls_of_a_batch_overlap() -> None:
    """code-r1: one call after the other."""
    rows = {row: [spoken(SEARCH), spoken(ANSWER)] for row in range(64)}
    assert roll_out(rows, tool=ScriptedTool(latency=lambda query: 3.0)).took_s == pytest.approx(3.0)


def test_waiting_for_one_tool_stalls_no_other_row() -> None:
    """verl#2445, SkyRL PR#53: blocking tools stalled a rank for minutes."""
    rows = {
        0: [spoken("<search>slow</search>"), spoken(ANSWER)],
        1: [spoken(SEARCH), spoken(SEARCH), spoken(SEARCH), spoken(ANSWER)],
    }
    tool = ScriptedTool(latency=lambda query: 600.0 if query == "slow" else 1.0, timeout_s=1000.0)
    rollout = roll_out(rows, tool=tool)
    assert [turn.started_s for turn in rollout.tape.rows[1]] == pytest.approx([0.0, 1.0, 2.0, 3.0])
    assert rollout.took_s == pytest.approx(600.0)


def test_each_tool_keeps_its_own_limit() -> None:
    """verl <= 0.7: search and sandbox shared one limiter, and whichever came first set the limit for both."""
    slow = ScriptedTool(latency=lambda query: 5.0, timeout_s=10.0)
    strict = ScriptedTool(latency=lambda query: 5.0, timeout_s=1.0)
    toolbox = Toolbox({"strict": strict, "slow": slow})

    async def statuses() -> list[ToolStatus]:
        calls = [await toolbox.call(ToolRequest(name, {"query": "q"}), ToolContext("row")) for name in toolbox.names]
        return [call.status for call in calls]

    assert run(statuses()) == [ToolStatus.TIMEOUT, ToolStatus.OK]


def test_failed_search_is_not_an_empty_result() -> None:
    """verl-tool, slime: a failed search looks to the model like one that found nothing."""
    trajectory = roll_out(["<search>fail</search>", ANSWER], tool=ScriptedTool(fail_if_told)).trajectory
    (call,) = trajectory.tool_calls
    assert (call.status, call.error) == (ToolStatus.ERROR, "RuntimeError")
    assert observations(trajectory) == [
        "\n\n<information>Search failed: search failed (RuntimeError)</information>\n\n"
    ]


@pytest.mark.parametrize("turn", ["no action", "<search> </search>", "</search>", "<answer></answer>"])
def test_invalid_action_gets_feedback_and_no_empty_information(turn: str) -> None:
    """SkyRL: an invalid action was answered with `<information></information>`."""
    trajectory = roll_out([turn, ANSWER], on_eos="feedback").trajectory
    (shown,) = observations(trajectory)
    assert "<information>" not in shown
    assert "cannot be carried out" in shown
    assert trajectory.tool_calls == []


# Rewards


def test_one_answer_block_is_enough_for_the_reward() -> None:
    """Search-R1: `extract_solution` wanted two `<answer>` blocks, so prompts without the example always scored 0."""
    trajectory = roll_out([ANSWER]).trajectory
    assert score(trajectory)["score"] == 1.0


def test_answer_inside_an_observation_earns_nothing() -> None:
    """Search-R1: the reward reads the last `<answer>` of the decoded text, whoever wrote it."""
    tool = ScriptedTool(lambda query: ANSWER)
    trajectory = roll_out([SEARCH, "no action"], tool=tool, on_eos="stop").trajectory
    assert ANSWER in observations(trajectory)[0]
    assert score(trajectory)["score"] == 0.0


def score(trajectory: Trajectory) -> dict[str, float]:
    facts = {
        "answer": trajectory.answer,
        "invalid_turns": trajectory.invalid_turns,
        "tool_calls": len(trajectory.tool_calls),
        "failed_tool_calls": 0,
    }
    solution = CODEC.decode(trajectory.response_ids)
    return compute_score("nq", solution, {"target": ["Paris"]}, {"rollout_reward_scores": facts})
