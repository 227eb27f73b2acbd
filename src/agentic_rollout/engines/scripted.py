"""An engine without a model: a function plays the policy. For tests, examples and dry runs of tools."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence

from agentic_rollout.codec import TextCodec
from agentic_rollout.errors import EngineError
from agentic_rollout.types import Completion, FinishReason

Policy = Callable[[tuple[int, ...], int | None], Sequence[int]]


class ScriptedEngine:
    """Replies with what `policy` says, under the rules of a real engine.

    Tokens come one by one; the turn ends at the end-of-sequence token, after the token that completes a stop string,
    or at `max_tokens`. Log-probabilities are invented but depend only on the context and the token, so that two runs
    can be compared.

    Args:
        policy: (context ids, seed) -> the ids it would sample next, before stop rules.
        codec: for stop strings.
        eos_token_id: ends a turn; None if the policy never ends one.
        latency_s: pause before each reply.
    """

    def __init__(
        self, policy: Policy, codec: TextCodec, *, eos_token_id: int | None = None, latency_s: float = 0.0
    ) -> None:
        self._policy = policy
        self._codec = codec
        self._eos_token_id = eos_token_id
        self._latency_s = latency_s
        self.prompts: list[tuple[int, ...]] = []

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str], seed: int | None
    ) -> Completion:
        context = tuple(prompt_ids)
        self.prompts.append(context)
        await asyncio.sleep(self._latency_s)
        token_ids: list[int] = []
        finish = FinishReason.LENGTH
        for token in self._policy(context, seed):
            token_ids.append(token)
            if token == self._eos_token_id:
                finish = FinishReason.EOS
                break
            text = self._codec.decode(token_ids)
            if any(string in text for string in stop):
                finish = FinishReason.STOP
                break
            if len(token_ids) == max_tokens:
                break
        else:
            raise EngineError(f"the policy ended after {len(token_ids)} tokens without a stop string or EOS")
        return Completion(tuple(token_ids), _logprobs(context, token_ids), finish)


def scripted_turns(turns: Callable[[str], str], codec: TextCodec) -> Policy:
    """A policy from text to text: the context's text in, the turn's text out."""

    def policy(context: tuple[int, ...], seed: int | None) -> Sequence[int]:
        return codec.encode(turns(codec.decode(context)))

    return policy


def _logprobs(context: tuple[int, ...], token_ids: Sequence[int]) -> tuple[float, ...]:
    digest = hashlib.blake2b(repr(context).encode(), digest_size=8).digest()
    base = int.from_bytes(digest, "big") / 2**64
    return tuple(-0.001 - (base + 0.37 * (index + 1) + 0.11 * token) % 1.0 for index, token in enumerate(token_ids))
