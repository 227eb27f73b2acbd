"""verl 0.9's servers and agent-loop workers without a trainer or a GPU: for benchmarks and tests.

Import this before anything that imports verl, torch or vLLM: it sets the environment that they read at import.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentic_rollout.verl_plugin.launch import config_dir, cpu_environment, cpu_platform

os.environ.update(cpu_environment())


@dataclass(frozen=True)
class Serving:
    """A running server, and the configuration that it was started with."""

    config: Any
    manager: Any  # verl's LLMServerManager

    @property
    def replica(self) -> Any:
        return self.manager.get_replicas()[0]

    def workers(
        self, *, client: type | None = None, loop: str = "agent", rollout: Mapping[str, Any] | None = None
    ) -> Any:
        """Agent-loop workers that ask the server.

        Args:
            client: verl's client class; None takes the one without partial rollout.
            loop: the agent loop that rolls out.
            rollout: settings of `actor_rollout_ref.rollout` for these workers alone.
        """
        from omegaconf import OmegaConf
        from verl.experimental.agent_loop import AgentLoopManager

        chosen = {"agent": {"default_agent_loop": loop}}
        config = OmegaConf.merge(
            self.config, *({"actor_rollout_ref": {"rollout": part}} for part in (rollout or {}, chosen))
        )
        return AgentLoopManager.create(config=config, llm_client=self.manager.get_client(client))


@contextmanager
def serving(
    model: Path, overrides: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> Iterator[Serving]:
    """Starts Ray and one vLLM server over `model`, with the demo's configuration.

    Args:
        model: folder of a model and its tokenizer.
        overrides: for verl's configuration.
        environment: for all processes, besides what a machine without a GPU needs.
    """
    os.environ.update(environment or {})
    import ray
    import verl.trainer
    from hydra import compose, initialize_config_dir
    from verl.workers.rollout.llm_server import LLMServerManager

    search_path = f"hydra.searchpath=[file://{Path(verl.trainer.__file__).parent / 'config'}]"
    with initialize_config_dir(str(config_dir()), version_base=None):
        config = compose(
            "demo_search",
            [
                search_path,
                f"platform={cpu_platform()}",
                f"actor_rollout_ref.model.path={model}",
                "actor_rollout_ref.rollout.nnodes=1",
                *overrides,
            ],
        )
    ray.init(num_gpus=1, num_cpus=32, include_dashboard=False, log_to_driver=False)
    try:
        yield Serving(config, LLMServerManager.create(config=config))
    finally:
        ray.shutdown()


def question_batch(questions: Sequence[str], *, repeat: int = 1, **columns: Any) -> Any:
    """Rows as verl's data set gives them to agent loops: one per question, `repeat` times in a row."""
    from verl import DataProto

    indexes = np.repeat(np.arange(len(questions)), repeat)
    prompts = np.empty(len(indexes), dtype=object)
    for row, index in enumerate(indexes):
        prompts[row] = [{"role": "user", "content": questions[index]}]
    rows = {"raw_prompt": prompts, "index": indexes.astype(object)}
    rows |= {name: np.array([value] * len(indexes), dtype=object) for name, value in columns.items()}
    return DataProto(non_tensor_batch=rows, meta_info={"global_steps": 0})


def timed(workers: Any, batch: Any) -> tuple[Any, float]:
    """The rolled-out batch, and the seconds that it took."""
    started = time.perf_counter()
    output = workers.generate_sequences(batch)
    return output, time.perf_counter() - started
