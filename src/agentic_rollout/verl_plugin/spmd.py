"""The rollout for verl 0.6: vLLM inside each FSDP worker, driven by the agent loop.

verl builds the class that its registry names for (`agent`, `sync`), hands it weights before every rollout, and calls
`generate_sequences` on one shard of the batch. Building the engine, sleeping and waking, and loading weights (LoRA
adapters included) are inherited from verl's own vLLM rollout.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh
from verl import DataProto
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams

from agentic_rollout.codec import HFCodec
from agentic_rollout.collate import collate
from agentic_rollout.config import AGENT_KEY
from agentic_rollout.engines.tensor_parallel import TensorParallelLink
from agentic_rollout.engines.vllm_inprocess import VLLMInProcessEngine, abort_unfinished, step_engine
from agentic_rollout.formats import build_format
from agentic_rollout.loop import AgentLoop, Prompt, turn_seed
from agentic_rollout.tools.base import Toolbox
from agentic_rollout.tools.build import build_toolbox
from agentic_rollout.trace import trajectory_record, write_trace
from agentic_rollout.types import Trajectory
from agentic_rollout.verl_plugin.cpu import prepare_engine
from agentic_rollout.verl_plugin.facts import reward_facts
from agentic_rollout.verl_plugin.settings import agent_settings


class SearchRollout(vLLMRollout):
    """Generates whole trajectories (generate, act, observe) for a batch of prompts.

    Args:
        config: `actor_rollout_ref.rollout`; this rollout's own settings are in `engine_kwargs.agent`.
        model_config: `actor_rollout_ref.model`.
        device_mesh: dimensions `dp`, `infer_tp`, `infer_pp`.

    Raises:
        SettingsError: a setting is unknown or cannot be used.
        CorpusError: a tool's corpus is missing or malformed.
    """

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig, device_mesh: DeviceMesh) -> None:
        # Settings first: a mistake is told in a second, not after a model has been loaded.
        self._settings = agent_settings(config)
        self._format = build_format(self._settings.format, key=f"{AGENT_KEY}.format")
        self._codec = HFCodec(model_config.tokenizer)
        group = device_mesh["infer_tp"].get_group() if device_mesh["infer_tp"].size() > 1 else None
        self._link = None if group is None else TensorParallelLink(group)
        self._toolbox = build_toolbox(self._settings.tools) if self._leads else Toolbox({})
        if current_platform.is_cpu():
            prepare_engine(config.tensor_model_parallel_size)
        super().__init__(config, model_config, device_mesh)
        self._runner = asyncio.Runner()
        weakref.finalize(self, _close, self._runner, self._toolbox)  # verl tells a worker of no end
        self._steps_seen = 0
        # verl collects garbage several times a step; the engine's objects live as long as the worker.
        gc.collect()
        gc.freeze()

    @property
    def _leads(self) -> bool:
        return self._link is None or self._link.leads

    @torch.no_grad()
    def generate_sequences(self, prompts: DataProto, **kwargs: Any) -> DataProto:
        """Rolls out B rows.

        Args:
            prompts: `input_ids`, `attention_mask`, `position_ids` (B, P), left-padded; further columns of the data set
                reach the tools.

        Returns:
            The tensors of `collate` for the same rows in the same order, their own columns, and the columns
            `__num_turns__`, `tool_call_counts` and `reward_scores` (one dict of facts per row, for reward functions).
        """
        sampling = self._sampling_params(prompts.meta_info)
        if self._leads:
            trajectories = self._lead(prompts, sampling)
            self._write_trace(trajectories, prompts)
        else:
            trajectories = self._follow(sampling)
        return self._data_proto(trajectories, prompts, sampling)

    async def update_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None], **kwargs: Any) -> None:
        """Loads new weights; whatever the prefix cache holds was computed with the old ones."""
        await super().update_weights(weights, **kwargs)
        self.inference_engine.reset_prefix_cache()

    def _lead(self, prompts: DataProto, sampling: SamplingParams) -> list[Trajectory]:
        try:
            trajectories = self._runner.run(self._roll_out(prompts, sampling))
        except Exception as error:
            if self._link is not None:
                self._link.finish(error=error)
            raise
        if self._link is not None:
            self._link.finish(trajectories)
        return trajectories

    def _follow(self, sampling: SamplingParams) -> list[Trajectory]:
        assert self._link is not None
        llm_engine, lora = self.inference_engine.llm_engine, self._lora_request()
        trajectories: list[Trajectory]
        try:
            trajectories = self._link.follow(lambda added: step_engine(llm_engine, added, sampling, lora))
        finally:
            abort_unfinished(llm_engine)  # as the leader does
        return trajectories

    async def _roll_out(self, prompts: DataProto, sampling: SamplingParams) -> list[Trajectory]:
        engine = VLLMInProcessEngine(
            self.inference_engine.llm_engine, sampling, lora_request=self._lora_request(), link=self._link
        )
        loop = AgentLoop(
            engine,
            self._toolbox,
            self._format,
            self._codec,
            self._settings,
            prompt_length=prompts.batch["input_ids"].shape[1],
            response_length=self.config.response_length,
        )
        async with engine.running():
            return await loop.run_batch(self._prompts(prompts))

    def _prompts(self, prompts: DataProto) -> list[Prompt]:
        """The attended tokens of each row: exactly what the trainer will see before the response."""
        attention_mask = prompts.batch["attention_mask"].bool()
        seed = self._rollout_seed(prompts.meta_info)
        return [
            Prompt(
                token_ids=tuple(ids[mask].tolist()),
                trajectory_id=f"{self._steps_seen}-{index}",
                row={name: column[index] for name, column in prompts.non_tensor_batch.items()},
                seed=None if seed is None else turn_seed(seed, index),
            )
            for index, (ids, mask) in enumerate(zip(prompts.batch["input_ids"], attention_mask, strict=True))
        ]

    def _rollout_seed(self, meta_info: Mapping[str, Any]) -> int | None:
        """Differs by step, by purpose and by data-parallel rank, so that no two rows share their randomness."""
        self._steps_seen += 1
        if self._settings.seed is None:
            return None
        purpose = "validate" if meta_info.get("validate", False) else "train"
        step = meta_info.get("global_steps", self._steps_seen)
        return turn_seed(self._settings.seed, purpose, int(step), self.device_mesh["dp"].get_local_rank())

    def _sampling_params(self, meta_info: Mapping[str, Any]) -> SamplingParams:
        """verl's sampling settings for this call: training, validation, or greedy where it asks for that."""
        overrides: dict[str, Any] = {}
        if not meta_info.get("do_sample", True):
            overrides = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
        elif meta_info.get("validate", False):
            validation = self.config.val_kwargs
            overrides = {
                "temperature": validation.temperature,
                "top_p": validation.top_p,
                "top_k": validation.top_k,
            }
        params: SamplingParams = self.sampling_params.clone()
        for name, value in overrides.items():
            setattr(params, name, value)
        return params

    def _lora_request(self) -> LoRARequest | None:
        """The adapter that `update_weights` loaded last, if this is a LoRA run."""
        loaded = list(self.inference_engine.llm_engine.list_loras()) if self.lora_kwargs else []
        if not loaded:
            return None
        return LoRARequest(lora_name=str(loaded[0]), lora_int_id=loaded[0], lora_path="in-memory")

    def _data_proto(self, trajectories: list[Trajectory], prompts: DataProto, sampling: SamplingParams) -> DataProto:
        tensors = collate(
            trajectories,
            prompt_length=prompts.batch["input_ids"].shape[1],
            response_length=self.config.response_length,
            pad_token_id=self.pad_token_id,
            mask_observations=self._settings.mask_observations,
        )
        if not self.config.calculate_log_probs:
            tensors.pop("rollout_log_probs", None)
        device = prompts.batch["input_ids"].device
        batch = TensorDict({name: tensor.to(device) for name, tensor in tensors.items()}, batch_size=len(trajectories))
        columns = {name: column for name, column in prompts.non_tensor_batch.items() if name != "raw_prompt_ids"}
        columns |= rollout_columns(trajectories)
        return DataProto(batch=batch, non_tensor_batch=columns, meta_info={"temperature": sampling.temperature})

    def _write_trace(self, trajectories: list[Trajectory], prompts: DataProto) -> None:
        if self._settings.trace_dir is None:
            return
        meta_info = prompts.meta_info
        purpose = "validate" if meta_info.get("validate", False) else "train"
        step = int(meta_info.get("global_steps", self._steps_seen))
        rank = self.device_mesh["dp"].get_local_rank()
        index = prompts.non_tensor_batch.get("index", np.arange(len(trajectories)))
        records = (
            trajectory_record(trajectory, self._codec, step=step, purpose=purpose, row=row, index=index[row])
            for row, trajectory in enumerate(trajectories)
        )
        write_trace(Path(self._settings.trace_dir) / purpose / f"step_{step:06d}_rank_{rank}.jsonl", records)


def _close(runner: asyncio.Runner, toolbox: Toolbox) -> None:
    """Ends the tools' connections and processes: when the rollout is dropped, at the latest when its process ends."""
    runner.run(toolbox.aclose())
    runner.close()


def rollout_columns(trajectories: list[Trajectory]) -> dict[str, NDArray[np.object_]]:
    """What the rollout alone knows, one entry per row.

    `reward_scores` reaches a reward function as `extra_info["rollout_reward_scores"]`.
    """
    facts = np.empty(len(trajectories), dtype=object)
    for index, trajectory in enumerate(trajectories):
        facts[index] = reward_facts(trajectory)
    # Plain integers: verl logs the extremes of these columns, and its JSON logger knows no NumPy scalar.
    return {
        "__num_turns__": np.array([t.num_turns for t in trajectories], dtype=object),
        "tool_call_counts": np.array([len(t.tool_calls) for t in trajectories], dtype=object),
        "reward_scores": facts,
    }
