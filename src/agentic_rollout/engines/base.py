"""The engine as the loop sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentic_rollout.types import Completion


class Engine(Protocol):
    """Samples one turn. Temperature and the like belong to the engine; the loop decides only where a turn ends."""

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str], seed: int | None
    ) -> Completion:
        """Continues `prompt_ids`.

        Args:
            prompt_ids: prompt and response so far.
            max_tokens: at least 1.
            stop: strings that end the turn and stay in it; the token that completes one is kept whole.
            seed: makes this one generation repeatable; None leaves it to the engine.

        Returns:
            At least one token; the end-of-sequence token, if sampled, is among them.

        Raises:
            EngineError: the engine cannot go on.
        """
        ...
