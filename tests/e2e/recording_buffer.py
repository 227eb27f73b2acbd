"""A replay buffer for verl 0.9 that writes down what the trainer takes out of its storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from agentic_rollout.trace import append_trace

FIELDS = ["prompts", "responses", "input_ids", "response_mask", "loss_mask", "rollout_log_probs"]


class RecordingBuffer(ReplayBuffer):
    """Reads every training row back from TransferQueue, as the trainer is about to do."""

    def __init__(self, *args: Any, sampler_kwargs: Any, **kwargs: Any) -> None:
        super().__init__(*args, sampler_kwargs=sampler_kwargs, **kwargs)
        self._record = Path(sampler_kwargs["record"])

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        batch, metrics = super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        if partition_id == "train":
            data = tq.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=FIELDS)
            for row in range(len(batch.keys)):
                append_trace(self._record, {name: data[name][row].tolist() for name in FIELDS})
        return batch, metrics
