"""verl 0.9's side of the rollout: what its workers build, call and get back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentic_rollout.errors import PromptError, SettingsError
from agentic_rollout.tools.base import BaseTool, ToolContext
from agentic_rollout.trace import parse_trajectory, read_trace
from lines import verl09
from story import StoryServer

pytestmark = [
    verl09,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # verl, Ray and vLLM warn on import
]

QUESTION = "What is the river of Nokel?"
TURNS = ("<search>Nokel river</search>", "<answer>Gopun</answer>")
FOUND = "The river of Nokel is Gopun."


class Found(BaseTool):
    rows: list[Mapping[str, Any]] = []  # noqa: RUF012  (what the tests look at)

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        Found.rows.append(context.row)
        return FOUND


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from agentic_rollout.demo.model import build_tokenizer
    from agentic_rollout.demo.search_task import search_language

    return build_tokenizer(search_language(0, places=400), tmp_path_factory.mktemp("tokenizer"))


def configuration(tmp_path: Path, **agent: Any) -> Any:
    """As much of verl's configuration as an agent loop reads."""
    from omegaconf import OmegaConf

    tools = {"search": {"type": f"{__name__}.Found"}}
    rollout = {
        "name": "agent",
        "prompt_length": 32,
        "response_length": 200,
        "max_model_len": None,
        "agent": {"default_agent_loop": "single_turn_agent"},
        "engine_kwargs": {"agent": {"tools": tools, "trace_dir": str(tmp_path / "traces"), **agent}},
    }
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    OmegaConf.set_struct(config, True)
    return config


def roll_out(
    config: Any, tokenizer: Any, *, aborts: tuple[int | None, ...] = (), **row: Any
) -> tuple[Any, StoryServer]:
    """What verl's worker does for one row."""
    import hydra
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap, _agent_loop_registry

    from agentic_rollout.codec import HFCodec

    codec = HFCodec(tokenizer)
    texts = (f"Question: {QUESTION}\n", TURNS[0], "\n\n<information>", FOUND, "</information>\n\n", TURNS[1])
    story = [token for text in texts for token in codec.encode(text)] + [tokenizer.eos_token_id]
    server = StoryServer(aborts, story, codec)
    loop = hydra.utils.instantiate(
        config=_agent_loop_registry["agent"],
        trainer_config=DictConfigWrap(config=config),
        server_manager=server,
        tokenizer=tokenizer,
        processor=None,
        hf_model_type="qwen2",
        dataset_cls=None,
        data_config=DictConfigWrap(config.data),
        tools=ToolListWrap([]),
    )
    columns = {
        "raw_prompt": [{"role": "user", "content": QUESTION}],
        "index": 7,
        "extra_info": {"split": "train"},
        **row,
    }
    sampling = {"temperature": 1.0, "top_p": 1, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    return asyncio.run(loop.run(sampling, **columns)), server


@pytest.mark.parametrize("aborts", [(), (3, None, 1, 0)], ids=["whole", "aborted"])
def test_output_is_what_verl_wants(tmp_path: Path, tokenizer: Any, aborts: tuple[int | None, ...]) -> None:
    import torch

    config = configuration(tmp_path)
    output, _ = roll_out(config, tokenizer, aborts=aborts, global_steps=4, session_id=2, uid="u")
    fields = output.as_dict()
    assert fields["responses"].shape == fields["response_mask"].shape == fields["rollout_log_probs"].shape
    text = tokenizer.decode(fields["responses"])
    assert text == f"{TURNS[0]}\n\n<information>{FOUND}</information>\n\n{TURNS[1]}"
    assert tokenizer.decode(fields["responses"][fields["response_mask"].bool()]) == "".join(TURNS)
    assert torch.equal(fields["rollout_log_probs"] < 0, fields["response_mask"].bool())
    assert output.num_turns == 2
    extra = output.extra_fields
    assert extra["reward_scores"]["answer"] == "Gopun"
    assert extra["tool_call_counts"] == 1
    assert isinstance(extra["min_global_steps"], int)
    assert isinstance(extra["max_global_steps"], int)
    assert extra["min_global_steps"] == 3 <= extra["max_global_steps"]
    assert Found.rows[-1]["index"] == 7


def test_without_the_mask_there_are_no_log_probabilities(tmp_path: Path, tokenizer: Any) -> None:
    output, _ = roll_out(configuration(tmp_path, mask_observations=False), tokenizer)
    assert set(output.response_mask) == {1}
    assert output.response_logprobs is None


def test_reward_function_reads_the_rollouts_facts(tmp_path: Path, tokenizer: Any) -> None:
    """As verl 0.9's reward manager hands them over: within `extra_info`, beside an empty column of its own."""
    from agentic_rollout.verl_plugin.reward import compute_score

    output, _ = roll_out(configuration(tmp_path), tokenizer)
    info = {**output.extra_fields, "rollout_reward_scores": {}}
    score = compute_score("facts", "forged <answer>Nokel</answer>", {"target": ["Gopun"]}, info)
    assert (score["score"], score["tool_calls"]) == (1.0, 1.0)


def test_traces_are_kept_by_step_and_purpose(tmp_path: Path, tokenizer: Any) -> None:
    config = configuration(tmp_path)
    first, _ = roll_out(config, tokenizer, global_steps=3, session_id=0)
    roll_out(config, tokenizer, global_steps=3, session_id=1)
    roll_out(config, tokenizer, global_steps=3, session_id=0, extra_info={"split": "test"})
    records = [record for file in (tmp_path / "traces" / "train").glob("step_000003_*") for record in read_trace(file)]
    assert [record["row"] for record in records] == [0, 1]
    assert parse_trajectory(records[0]).response_ids == tuple(first.response_ids)
    assert len(list((tmp_path / "traces" / "validate").glob("step_000003_*"))) == 1
    roll_out(config, tokenizer)  # the legacy trainer: sampled by the weights of step 4
    roll_out(config, tokenizer, extra_info={"split": "test"})
    for purpose, step in (("train", 5), ("validate", 4)):
        assert len(list((tmp_path / "traces" / purpose).glob(f"step_{step:06d}_*"))) == 1


def test_seeds_differ_by_turn_step_trajectory_and_purpose_and_repeat(tmp_path: Path, tokenizer: Any) -> None:
    def seeds(config: Any, **row: Any) -> tuple[int, ...]:
        _, server = roll_out(config, tokenizer, **row)
        return tuple(request["seed"] for request in server.requests)

    config = configuration(tmp_path, seed=1)
    rows = [{"global_steps": step, "session_id": session} for step in (1, 2) for session in (0, 1)]
    rows.append({**rows[0], "extra_info": {"split": "validation"}})
    first = [seeds(config, **row) for row in rows]
    assert len({seed for pair in first for seed in pair}) == 2 * len(rows)
    assert [seeds(configuration(tmp_path, seed=1), **row) for row in rows] == first
    legacy = [seeds(config) for _ in range(3)]  # the legacy trainer names neither step nor trajectory
    assert len(set(legacy)) == 3
    again = configuration(tmp_path, seed=1)
    assert [seeds(again) for _ in range(3)] == legacy


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_generated(tmp_path: Path, tokenizer: Any) -> None:
    config = configuration(tmp_path)
    with pytest.raises(PromptError, match="max_prompt_length is 32"):
        roll_out(config, tokenizer, raw_prompt=[{"role": "user", "content": QUESTION * 9}])


def test_wrong_settings_are_told_before_a_server_is_started(tmp_path: Path) -> None:
    from agentic_rollout.verl_plugin.server import AgentReplica

    config = configuration(tmp_path, max_turn=3)
    with pytest.raises(SettingsError, match="Did you mean 'max_turns'"):
        AgentReplica(0, config.actor_rollout_ref.rollout, None)


@pytest.mark.parametrize(("chosen", "becomes"), [("single_turn_agent", "agent"), ("agent", "agent"), ("mine", "mine")])
def test_the_agent_loop_is_the_default_unless_another_is_chosen(tmp_path: Path, chosen: str, becomes: str) -> None:
    from agentic_rollout.verl_plugin.server import choose_agent_loop

    rollout = configuration(tmp_path).actor_rollout_ref.rollout
    rollout.agent.default_agent_loop = chosen
    choose_agent_loop(rollout)
    assert rollout.agent.default_agent_loop == becomes
