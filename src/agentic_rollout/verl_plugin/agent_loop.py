"""verl 0.9's agent loop around ours: one call is one trajectory, in a worker that runs many at a time."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.utils.tokenizer import normalize_token_ids
from verl.utils.tokenizer.chat_template import apply_chat_template

from agentic_rollout.codec import HFCodec
from agentic_rollout.config import AGENT_KEY, AgentSettings
from agentic_rollout.engines.verl_server import ServerClient, VerlServerEngine
from agentic_rollout.formats import build_format
from agentic_rollout.loop import AgentLoop, Prompt, turn_seed
from agentic_rollout.tools.build import build_toolbox
from agentic_rollout.trace import append_trace, trajectory_record
from agentic_rollout.types import Trajectory
from agentic_rollout.verl_plugin.facts import reward_facts
from agentic_rollout.verl_plugin.settings import agent_settings

logger = logging.getLogger(__name__)


class SearchAgentLoop(AgentLoopBase):
    """Runs one trajectory; verl makes an object of this class for each.

    Raises:
        SettingsError: a setting is unknown or cannot be used.
        CorpusError: a tool's corpus is missing or malformed.
    """

    def __init__(
        self, trainer_config: Any, server_manager: ServerClient, tokenizer: Any, data_config: Any, **_: Any
    ) -> None:
        # Not verl's own: it prepares to merge chat messages into token sequences, for which it wants tokens that a
        # model may not have, and here messages become tokens only once.
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.data_config = data_config.config

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Rolls out one row of the data set.

        Args:
            sampling_params: verl's, for training or validation.
            row: the row's columns; they reach the tools.

        Returns:
            Ids, mask and log-probabilities of the response; in `extra_fields` the facts for reward functions
            (`reward_scores`) and the steps of the weights that sampled it (`min_global_steps`, `max_global_steps`).
        """
        worker = _worker_state(self)
        token_ids = self._prompt_ids(row["raw_prompt"])
        engine = VerlServerEngine(
            self.server_manager,
            sampling_params,
            uuid4().hex,
            codec=worker.codec,
            eos_token_ids=worker.eos_token_ids,
        )
        prompt = Prompt(token_ids, uuid4().hex, row, worker.trajectory_seed(token_ids, row))
        loop = worker.loop(engine, self.rollout_config)
        trajectory = await loop.run(prompt)
        output = self._output(trajectory, engine, worker.settings, row)
        worker.trace(trajectory, row, trainer_step(row, output.extra_fields["max_global_steps"]))
        return output

    def _prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The chat template's tokens, up to where the response begins."""
        rendered = apply_chat_template(
            self.tokenizer, list(messages), **(self.data_config.get("apply_chat_template_kwargs") or {})
        )
        return tuple(normalize_token_ids(rendered))

    def _output(
        self, trajectory: Trajectory, engine: VerlServerEngine, settings: AgentSettings, row: Mapping[str, Any]
    ) -> AgentLoopOutput:
        masked = settings.mask_observations
        length = trajectory.response_length
        logprobs = trajectory.response_logprobs if masked else None  # nobody sampled an observation
        step = int(row.get("global_steps", 0))
        return AgentLoopOutput(
            prompt_ids=list(trajectory.prompt_ids),
            response_ids=list(trajectory.response_ids),
            response_mask=list(trajectory.response_mask) if masked else [1] * length,
            response_logprobs=None if logprobs is None else list(logprobs),
            num_turns=trajectory.num_turns,
            metrics=AgentLoopMetrics(
                generate_sequences=engine.seconds,
                tool_calls=sum(call.latency_s for call in trajectory.tool_calls),
                num_preempted=-1 if engine.preempted is None else engine.preempted,
            ),
            extra_fields={
                "reward_scores": reward_facts(trajectory),
                "tool_call_counts": len(trajectory.tool_calls),
                "min_global_steps": step if engine.oldest_weights is None else engine.oldest_weights,
                "max_global_steps": step if engine.newest_weights is None else engine.newest_weights,
                "turn_scores": [],
                "tool_rewards": [],
            },
        )


@dataclass(slots=True)
class _WorkerState:
    """What the trajectories of one worker share: settings, tools, and the loop they are run by."""

    settings: AgentSettings
    codec: HFCodec
    eos_token_ids: tuple[int, ...]
    _loop: AgentLoop | None = None
    _times_seen: defaultdict[tuple[int, ...], Iterator[int]] = field(
        default_factory=lambda: defaultdict(itertools.count)
    )

    def loop(self, engine: VerlServerEngine, config: Any) -> AgentLoop:
        """The loop over one trajectory's engine."""
        if self._loop is None:
            self._loop = AgentLoop(
                engine,
                build_toolbox(self.settings.tools),
                build_format(self.settings.format, key=f"{AGENT_KEY}.format"),
                self.codec,
                self.settings,
                prompt_length=config.prompt_length,
                response_length=config.response_length,
            )
        return self._loop.with_engine(engine)

    def trajectory_seed(self, token_ids: tuple[int, ...], row: Mapping[str, Any]) -> int | None:
        """Differs by prompt, step and trajectory of a group.

        The legacy trainer tells neither step nor trajectory; there, a prompt's occurrences are counted.
        """
        if self.settings.seed is None:
            return None
        if "session_id" in row:
            which = (int(row["global_steps"]), int(row["session_id"]))
        else:
            which = (-1, next(self._times_seen[token_ids]))
        prompt = hashlib.blake2b(repr(token_ids).encode(), digest_size=8).hexdigest()
        return turn_seed(self.settings.seed, purpose_of(row), prompt, *which)

    def trace(self, trajectory: Trajectory, row: Mapping[str, Any], step: int) -> None:
        """Appends the trajectory to its step's file, if trajectories are kept."""
        if self.settings.trace_dir is None:
            return
        purpose = purpose_of(row)
        record = trajectory_record(
            trajectory,
            self.codec,
            step=step,
            purpose=purpose,
            row=row.get("session_id"),
            index=row.get("index"),
        )
        append_trace(Path(self.settings.trace_dir) / purpose / f"step_{step:06d}_{_PROCESS}.jsonl", record)


def purpose_of(row: Mapping[str, Any]) -> str:
    """`train` or `validate`, by the split that the row's `extra_info` names: verl tells an agent loop neither."""
    split = str((row.get("extra_info") or {}).get("split", "train")).lower()
    return "train" if split.startswith("train") else "validate"


def trainer_step(row: Mapping[str, Any], weights: int) -> int:
    """The trainer's step; the legacy trainer does not tell it, and trains with what the step before has left."""
    if "global_steps" in row:
        return int(row["global_steps"])
    return weights + (purpose_of(row) == "train")


_PROCESS = f"worker_{uuid4().hex[:8]}"  # several workers write side by side
_states: dict[int, tuple[Any, _WorkerState]] = {}


def _worker_state(loop: SearchAgentLoop) -> _WorkerState:
    """The state of this worker; kept with the configuration it was made from, one for the life of the process."""
    key = id(loop.config)
    if key not in _states:
        codec = HFCodec(loop.tokenizer)
        state = _WorkerState(agent_settings(loop.rollout_config), codec, _eos_token_ids(loop.tokenizer))
        _states[key] = (loop.config, state)
    return _states[key][1]


@functools.cache
def _eos_token_ids(tokenizer: Any) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
