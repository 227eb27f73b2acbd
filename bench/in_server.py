"""The alternative to a loop in agent-loop workers: whole trajectories in the server's process. For loops.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from agentic_rollout.codec import HFCodec
from agentic_rollout.config import AGENT_KEY
from agentic_rollout.engines.verl_server import VerlServerEngine
from agentic_rollout.formats import build_format
from agentic_rollout.loop import AgentLoop, Prompt
from agentic_rollout.tools.build import build_toolbox
from agentic_rollout.verl_plugin.agent_loop import SearchAgentLoop
from agentic_rollout.verl_plugin.server import AgentReplica
from agentic_rollout.verl_plugin.settings import agent_settings


class LoopServer(vLLMHttpServer):
    """verl's server, and the loop beside its engine."""

    async def run_trajectory(self, prompt_ids: Sequence[int], sampling_params: dict[str, Any]) -> Any:
        tokenizer = self.model_config.tokenizer
        codec = HFCodec(tokenizer)
        engine = VerlServerEngine(
            _SameProcess(self), sampling_params, uuid4().hex, codec=codec, eos_token_ids=[tokenizer.eos_token_id]
        )
        if not hasattr(self, "_loop"):
            settings = agent_settings(self.config)
            self._loop = AgentLoop(
                engine,
                build_toolbox(settings.tools),
                build_format(settings.format, key=f"{AGENT_KEY}.format"),
                codec,
                settings,
                prompt_length=self.config.prompt_length,
                response_length=self.config.response_length,
            )
        trajectory = await self._loop.with_engine(engine).run(Prompt(tuple(prompt_ids), uuid4().hex))
        return trajectory, engine.seconds


class _SameProcess:
    """verl's client, without the way between processes."""

    def __init__(self, server: vLLMHttpServer) -> None:
        self._server = server

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        return await self._server.generate(prompt_ids, sampling_params, uuid4().hex)


class LoopReplica(AgentReplica):
    """Starts `LoopServer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(LoopServer)


class InServerLoop(SearchAgentLoop):
    """Hands the prompt over, and takes the finished trajectory."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        request_id = uuid4().hex
        prompt_ids = self._prompt_ids(row["raw_prompt"])
        server_id, server = await self.server_manager._acquire_server(request_id)
        try:
            trajectory, seconds = await server.run_trajectory.remote(prompt_ids, sampling_params)
        finally:
            self.server_manager._release_server(server_id, request_id)
        engine = VerlServerEngine(self.server_manager, {}, request_id, codec=HFCodec(self.tokenizer), eos_token_ids=[])
        engine.seconds = seconds
        return self._output(trajectory, engine, agent_settings(self.rollout_config), row)
