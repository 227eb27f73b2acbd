"""vLLM inside the worker: one `LLMEngine`, stepped from an asyncio loop.

Trajectories add requests whenever they are ready; each step of the engine serves whatever is there. While a trajectory
waits for a tool, the others go on, and the prefix cache keeps its earlier turns.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from agentic_rollout.errors import EngineError
from agentic_rollout.types import Completion, FinishReason

# After a step that finished requests, trajectories parse, call fast tools and come back within a few passes of the
# event loop; letting them do so first lets the next step serve them too.
_PASSES_AFTER_FINISH = 4
_HEARTBEAT_S = 10.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation as it is sent to every tensor-parallel rank."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...]
    seed: int | None


class StepLink(Protocol):
    """How the leader tells the other tensor-parallel ranks what it is about to do."""

    def send(self, command: Any) -> None: ...


class VLLMInProcessEngine:
    """The `Engine` over a vLLM `LLMEngine` that lives in this process.

    Args:
        llm_engine: vLLM's engine; nobody else may have requests in it meanwhile.
        sampling: temperature and the like; limits, stop strings and seed are set per request.
        lora_request: adapter for every request.
        link: to the other tensor-parallel ranks, which run `follow`; None without tensor parallelism.
    """

    def __init__(
        self, llm_engine: Any, sampling: SamplingParams, *, lora_request: Any = None, link: StepLink | None = None
    ) -> None:
        self._llm_engine = llm_engine
        self._sampling = sampling
        self._lora_request = lora_request
        self._link = link
        self._ids = itertools.count()
        self._added: list[GenerateRequest] = []
        self._futures: dict[str, asyncio.Future[Completion]] = {}
        self._wake = asyncio.Event()
        self._failure: EngineError | None = None

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str], seed: int | None
    ) -> Completion:
        if self._failure is not None:
            raise self._failure
        request = GenerateRequest(f"agent-{next(self._ids)}", tuple(prompt_ids), max_tokens, tuple(stop), seed)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._futures[request.request_id] = future
        self._added.append(request)
        self._wake.set()
        return await future

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Steps the engine while the block runs; requests left over by a failed block are aborted."""
        stepper = asyncio.create_task(self._step_forever())
        try:
            yield
        finally:
            stepper.cancel()
            await asyncio.gather(stepper, return_exceptions=True)
            self._added.clear()
            self._futures.clear()
            abort_unfinished(self._llm_engine)

    async def _step_forever(self) -> None:
        try:
            while True:
                await self._wait_for_work()
                finished = self._step()
                for _ in range(_PASSES_AFTER_FINISH if finished else 1):
                    await asyncio.sleep(0)
        except Exception as error:  # whatever vLLM raises must reach every waiting trajectory
            self._failure = EngineError(f"vLLM failed: {type(error).__name__}: {error}")
            self._failure.__cause__ = error
            for future in self._futures.values():
                if not future.done():
                    future.set_exception(self._failure)

    async def _wait_for_work(self) -> None:
        while not self._futures:
            self._wake.clear()
            try:
                async with asyncio.timeout(None if self._link is None else _HEARTBEAT_S):
                    await self._wake.wait()
            except TimeoutError:
                self._send(())  # followers wait in a collective that has a timeout of its own

    def _step(self) -> bool:
        """Adds what is new, steps once, resolves what has finished; True if anything has."""
        added, self._added = self._added, []
        self._send(tuple(added))
        outputs = step_engine(self._llm_engine, added, self._sampling, self._lora_request)
        for request_id, completion in outputs:
            future = self._futures.pop(request_id)
            if not future.done():
                future.set_result(completion)
        return bool(outputs)

    def _send(self, added: tuple[GenerateRequest, ...]) -> None:
        if self._link is not None:
            self._link.send(added)


def step_engine(
    llm_engine: Any, added: Sequence[GenerateRequest], sampling: SamplingParams, lora_request: Any
) -> list[tuple[str, Completion]]:
    """Adds requests and steps once; the same on every tensor-parallel rank, in the same order."""
    for request in added:
        llm_engine.add_request(
            request.request_id,
            {"prompt_token_ids": list(request.prompt_ids)},
            _request_params(sampling, request),
            lora_request=lora_request,
        )
        _skip_token_names(llm_engine, request.request_id)
    if not llm_engine.has_unfinished_requests():
        return []
    return [(output.request_id, _completion(output)) for output in llm_engine.step() if output.finished]


def abort_unfinished(llm_engine: Any) -> None:
    """Leaves the engine empty after a failure; on every tensor-parallel rank, or the ranks would step apart."""
    unfinished = list(llm_engine.output_processor.request_states)
    if unfinished:
        llm_engine.abort_request(unfinished)


def _skip_token_names(llm_engine: Any, request_id: str) -> None:
    """Log-probabilities are read by token id; vLLM would decode each token a second time only to name it."""
    llm_engine.output_processor.request_states[request_id].logprobs_processor.tokenizer = None


def _request_params(sampling: SamplingParams, request: GenerateRequest) -> SamplingParams:
    params = copy.copy(sampling)  # vLLM makes a deep copy of its own
    params.max_tokens = request.max_tokens
    params.seed = request.seed
    params.stop = list(request.stop)
    params.include_stop_str_in_output = True
    params.detokenize = True  # stop strings are found in text
    params.skip_special_tokens = False  # a stop string may be a special token
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.logprobs = 0  # the sampled token's own
    return params


def _completion(output: Any) -> Completion:
    sample = output.outputs[0]
    token_ids = tuple(sample.token_ids)
    if not token_ids or sample.finish_reason == "abort":
        raise EngineError(f"request {output.request_id} ended with reason {sample.finish_reason!r} and no turn")
    logprobs = None
    if sample.logprobs is not None:
        logprobs = tuple(float(step[token].logprob) for token, step in zip(token_ids, sample.logprobs, strict=True))
    return Completion(token_ids, logprobs, _finish_reason(sample))


def _finish_reason(sample: Any) -> FinishReason:
    if sample.finish_reason == "length":
        return FinishReason.LENGTH
    return FinishReason.STOP if isinstance(sample.stop_reason, str) else FinishReason.EOS
