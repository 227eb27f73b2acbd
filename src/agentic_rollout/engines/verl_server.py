"""The `Engine` over the servers of verl 0.9, by way of its client. Imports neither verl nor vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentic_rollout.codec import TextCodec
from agentic_rollout.errors import EngineError
from agentic_rollout.types import Completion, FinishReason

_ABORTED = ("aborted", "abort")
_STEP_FIELDS = ("min_global_steps", "max_global_steps")
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0


class ServerClient(Protocol):
    """What is used of verl's `LLMServerClient`; it balances the load, and keeps a trajectory on one server."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> Any: ...


class VerlServerEngine:
    """Generates the turns of one trajectory.

    A generation that a weight update aborts goes on from the tokens it has. A stop string may then begin before the
    abort and end after it, where the server does not see it: such a turn is cut where it should have stopped.

    Args:
        client: verl's, for the trajectory's worker.
        sampling_params: verl's, for this trajectory.
        request_id: the trajectory's; the server that has its prefix cached is asked again.
        codec: for stop strings.
        eos_token_ids: what ends a text.
        patience_s: how long a server may stay aborted before that is an error.
    """

    def __init__(
        self,
        client: ServerClient,
        sampling_params: Mapping[str, Any],
        request_id: str,
        *,
        codec: TextCodec,
        eos_token_ids: Sequence[int],
        patience_s: float = 600.0,
    ) -> None:
        self._client = client
        self._sampling_params = sampling_params
        self._request_id = request_id
        self._codec = codec
        self._eos_token_ids = frozenset(eos_token_ids)
        self._patience_s = patience_s
        self.seconds = 0.0  # spent generating, waiting included
        self.preempted: int | None = None
        self.oldest_weights: int | None = None  # trainer steps whose weights sampled the trajectory
        self.newest_weights: int | None = None

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str], seed: int | None
    ) -> Completion:
        started = _now_s()
        try:
            token_ids, logprobs = await self._generate_whole(list(prompt_ids), max_tokens, stop, seed)
        finally:
            self.seconds += _now_s() - started
        length = self._stopped_length(token_ids, stop)
        token_ids = token_ids[:length]
        finish = self._finish_reason(token_ids, max_tokens, stop)
        return Completion(tuple(token_ids), None if logprobs is None else tuple(logprobs[:length]), finish)

    async def _generate_whole(
        self, prompt_ids: list[int], max_tokens: int, stop: Sequence[str], seed: int | None
    ) -> tuple[list[int], list[float] | None]:
        """One turn's tokens and log-probabilities, put together from the parts between aborts."""
        token_ids: list[int] = []
        logprobs: list[float] | None = []
        pause, deadline = _FIRST_PAUSE_S, _now_s() + self._patience_s
        while True:
            output = await self._ask(prompt_ids + token_ids, max_tokens - len(token_ids), stop, seed)
            token_ids += output.token_ids
            if output.log_probs is None and output.token_ids:
                logprobs = None
            elif logprobs is not None:
                logprobs += output.log_probs or []
            if output.stop_reason not in _ABORTED:
                break
            if self._is_over(token_ids, max_tokens, stop):
                break
            if output.token_ids:
                pause, deadline = _FIRST_PAUSE_S, _now_s() + self._patience_s
            elif _now_s() > deadline:
                raise EngineError(f"verl's servers aborted a turn and took none on for {self._patience_s:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if not token_ids:
            raise EngineError(f"verl's server ended a turn without a token ({output.stop_reason})")
        return token_ids, logprobs

    async def _ask(self, prompt_ids: list[int], max_tokens: int, stop: Sequence[str], seed: int | None) -> Any:
        params = {
            **self._sampling_params,
            "max_tokens": max_tokens,
            "stop": list(stop),
            "include_stop_str_in_output": True,
            "detokenize": True,  # stop strings are found in text
            "skip_special_tokens": False,  # a stop string may be a special token
        }
        if seed is not None:
            params["seed"] = seed
        try:
            output = await self._client.generate(self._request_id, prompt_ids=prompt_ids, sampling_params=params)
        except Exception as error:  # Ray wraps whatever the server raised
            raise EngineError(f"verl's server failed: {type(error).__name__}: {error}") from error
        self._note(output)
        return output

    def _note(self, output: Any) -> None:
        if output.num_preempted is not None:
            self.preempted = (self.preempted or 0) + output.num_preempted
        fields = output.extra_fields
        oldest, newest = (fields.get(name, fields.get("global_steps")) for name in _STEP_FIELDS)
        if oldest is not None and newest is not None:
            self.oldest_weights = oldest if self.oldest_weights is None else min(self.oldest_weights, oldest)
            self.newest_weights = newest if self.newest_weights is None else max(self.newest_weights, newest)

    def _is_over(self, token_ids: list[int], max_tokens: int, stop: Sequence[str]) -> bool:
        """Whether an abort hit a turn that had just come to its end."""
        if not token_ids:
            return False
        return len(token_ids) >= max_tokens or token_ids[-1] in self._eos_token_ids or self._has_stop(token_ids, stop)

    def _has_stop(self, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
        text = self._codec.decode(token_ids)
        return any(string in text for string in stop)

    def _stopped_length(self, token_ids: list[int], stop: Sequence[str]) -> int:
        """How many tokens there are up to the one that completes a stop string, or all."""
        if not self._has_stop(token_ids[:-1], stop):
            return len(token_ids)
        return next(length for length in range(1, len(token_ids)) if self._has_stop(token_ids[:length], stop))

    def _finish_reason(self, token_ids: list[int], max_tokens: int, stop: Sequence[str]) -> FinishReason:
        """verl says only that a turn is complete."""
        if self._has_stop(token_ids, stop):
            return FinishReason.STOP
        if len(token_ids) < max_tokens or token_ids[-1] in self._eos_token_ids:
            return FinishReason.EOS
        return FinishReason.LENGTH


def _now_s() -> float:
    return asyncio.get_running_loop().time()
