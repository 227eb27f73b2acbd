"""A real engine in a process of its own.

vLLM changes the environment, the threads, the process groups and the warnings of the process it lives in. A test
therefore starts a `Worker` and sends it functions of its module; what they return comes back.
"""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agentic_rollout.types import Action, Call, Observation, ToolCall, ToolRequest, Trajectory
from agentic_rollout.verl_plugin.launch import CPU_ENVIRONMENT, LINE_ENVIRONMENT

ENVIRONMENT = {
    **CPU_ENVIRONMENT,
    **LINE_ENVIRONMENT["0.6"],
    "VLLM_CPU_OMP_THREADS_BIND": "all",  # pinned threads would share a processor with those of another engine
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}
BLOCK_TOKENS = 32  # of the prefix cache


class Worker:
    """A spawned process that builds one subject and then runs functions on it, one at a time.

    Args:
        build: makes the subject; it and all functions sent later live at the top level of a module.
        args: for `build`.
        environment: variables of the new process, over this one's.
    """

    def __init__(self, build: Callable[..., Any], *args: Any, environment: Mapping[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, remote = context.Pipe()
        self._process = context.Process(target=_serve, args=(remote,), daemon=True)
        with _environment({**ENVIRONMENT, **(environment or {})}):
            self._process.start()
        remote.close()
        self.submit(build, *args)

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        """Starts `function(subject, *args)`; the first function of all is `build`, which has no subject yet."""
        self._connection.send((function.__module__, sys.modules[function.__module__].__file__))
        self._connection.send((function, args))

    def result(self, timeout_s: float = 120.0) -> Any:
        """What the oldest function not yet asked for returned, or raises what it raised."""
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"the worker did not answer within {timeout_s:g} s")
        result, error = self._connection.recv()
        if error is not None:
            raise error
        return result

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> Any:
        self.submit(function, *args)
        return self.result(timeout_s)

    def close(self) -> None:
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(connection: Connection) -> None:
    """The worker's side: until the other end closes."""
    subject: tuple[Any, ...] = ()
    while True:
        try:
            _load_module(*connection.recv())
            function, args = connection.recv()
        except EOFError:
            break
        try:
            result = function(*subject, *args)
            if not subject:
                subject, result = (result,), None
            reply = (result, None)
        except Exception as error:
            error.add_note("".join(traceback.format_exception(error)))
            reply = (None, error)
        connection.send(reply)
    os._exit(0)  # gloo and vLLM have nothing to save, and can wait for each other at exit


def _load_module(name: str, path: str) -> None:
    """Loads a module under the name that pytest gave it, so that what is pickled by name is found."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass
class LLMSubject:
    """An engine set up as verl's in-worker rollout sets it up, and what a test needs beside it.

    Attributes:
        llm: `vllm.LLM`.
        sampling: verl's base parameters; `detokenize` is off in them.
        codec: of the model's tokenizer.
        model_path: the folder of the model.
    """

    llm: Any
    sampling: Any
    codec: Any
    model_path: str

    @property
    def llm_engine(self) -> Any:
        return self.llm.llm_engine


def write_tiny_model(folder: str, seed: int = 0) -> str:
    """Writes an untrained model of half a million weights and its tokenizer."""
    from agentic_rollout.demo.model import build_model, build_tokenizer
    from agentic_rollout.demo.search_task import search_language

    tokenizer = build_tokenizer(search_language(0, places=400), Path(folder))
    build_model(tokenizer, seed).save_pretrained(folder)
    return folder


def build_llm(folder: str, max_model_len: int) -> LLMSubject:
    """Builds the tiny model in `folder` and an engine over it."""
    write_tiny_model(folder)
    from vllm import LLM, SamplingParams

    from agentic_rollout.codec import HFCodec

    llm = LLM(
        model=folder,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=BLOCK_TOKENS,
        max_model_len=max_model_len,
        max_num_seqs=64,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        seed=0,
    )
    sampling = SamplingParams(temperature=1.0, logprobs=0, detokenize=False)
    return LLMSubject(llm, sampling, HFCodec(llm.get_tokenizer()), folder)


def join_ranks(tensor_parallel_size: int = 1) -> Any:
    """Does what verl's worker has done before it builds a rollout; returns its device mesh."""
    import verl  # noqa: F401  (loads the platform module that the environment names)
    from torch.distributed import init_process_group
    from torch.distributed.device_mesh import init_device_mesh

    import agentic_rollout  # noqa: F401  (as external_lib does)

    init_process_group("cpu:gloo,cpu:nccl")  # waits for the other ranks
    return init_device_mesh("cpu", (1, tensor_parallel_size, 1), mesh_dim_names=("dp", "infer_tp", "infer_pp"))


def prompt_batch(lengths: Sequence[int], prompt_length: int, pad_token_id: int, meta_info: Mapping[str, Any]) -> Any:
    """A `DataProto` as verl hands it to a rollout: one left-padded prompt per length, all of them different."""
    import numpy as np
    import torch
    from verl import DataProto

    input_ids = torch.full((len(lengths), prompt_length), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        input_ids[row, prompt_length - length :] = torch.arange(40 + row, 40 + row + length)
        attention_mask[row, prompt_length - length :] = 1
    return DataProto.from_dict(
        tensors={"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": attention_mask.cumsum(1)},
        non_tensors={"index": np.arange(len(lengths), dtype=object)},
        meta_info=dict(meta_info),
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class EveryTurnCalls:
    """An action format to which every turn of a random model is a call of the tool `tool`."""

    stop: Sequence[str] = ("</search>", "</answer>")

    def parse(self, text: str) -> Action:
        return Call((ToolRequest("tool", {"text": text}),))

    def render(self, calls: Sequence[ToolCall]) -> Observation:
        return Observation("<information>", "\n".join(call.text for call in calls), "</information>")

    def render_invalid(self, problem: str) -> Observation:
        return Observation("", problem, "")


def roll_out(subject: LLMSubject, toolbox: Any, prompts: Sequence[Any], **options: Any) -> list[Trajectory]:
    """Runs the prompts together.

    Args:
        subject: the engine.
        toolbox: for every call.
        prompts: `agentic_rollout.loop.Prompt`s.
        options: `sampling`, `response_length` in tokens, and settings of the loop.
    """
    from agentic_rollout.config import LoopSettings
    from agentic_rollout.engines.vllm_inprocess import VLLMInProcessEngine
    from agentic_rollout.loop import AgentLoop

    sampling = options.pop("sampling", subject.sampling)
    response_length = options.pop("response_length", 384)
    settings = LoopSettings(**{"final_turn": False, "max_turns": 3, **options})

    async def run() -> list[Trajectory]:
        engine = VLLMInProcessEngine(subject.llm_engine, sampling)
        loop = AgentLoop(
            engine,
            toolbox,
            EveryTurnCalls(),
            subject.codec,
            settings,
            prompt_length=10_000,  # the engine's own limit shall speak
            response_length=response_length,
        )
        async with engine.running():
            return await loop.run_batch(prompts)

    return asyncio.run(run())
