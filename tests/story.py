"""A server of verl 0.9 whose model goes on with one text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentic_rollout.codec import TextCodec


@dataclass
class Reply:
    """As verl's `TokenOutput`."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class StoryServer:
    """A server whose model goes on with one text, and which aborts as it is told to.

    Like vLLM it sees a stop string only in what it generates for one request.

    Args:
        aborts: the n-th entry aborts the n-th request after so many tokens; None lets it through.
        story: prompt and everything after it; ends with EOS.
        codec: for stop strings.
    """

    def __init__(self, aborts: Sequence[int | None], story: Sequence[int], codec: TextCodec) -> None:
        self._aborts = list(aborts)
        self._story = list(story)
        self._codec = codec
        self.requests: list[Mapping[str, Any]] = []
        self.request_ids: list[str] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> Reply:
        await asyncio.sleep(0)
        step = len(self.requests)
        self.requests.append(sampling_params)
        self.request_ids.append(request_id)
        assert prompt_ids == self._story[: len(prompt_ids)]
        token_ids: list[int] = []
        abort = self._aborts[step] if step < len(self._aborts) else None
        while not self._ended(token_ids, sampling_params):
            if abort == len(token_ids):
                return self._reply(len(prompt_ids), token_ids, "aborted", step)
            token_ids.append(self._story[len(prompt_ids) + len(token_ids)])
        return self._reply(len(prompt_ids), token_ids, "completed", step)

    def _ended(self, token_ids: list[int], sampling_params: Mapping[str, Any]) -> bool:
        text = self._codec.decode(token_ids)
        if len(token_ids) == sampling_params["max_tokens"] or token_ids[-1:] == self._story[-1:]:
            return True
        return any(stop in text for stop in sampling_params["stop"])

    def _reply(self, start: int, token_ids: list[int], reason: str, step: int) -> Reply:
        logprobs = [-float(start + index) for index in range(len(token_ids))]
        return Reply(token_ids, logprobs, reason, 1, {"global_steps": 3 + step})
