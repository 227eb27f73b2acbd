"""A codec with ChatML's control tokens, and rollouts in which a scripted model writes Hermes's tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from agentic_rollout.config import LoopSettings
from agentic_rollout.engines.scripted import ScriptedEngine
from agentic_rollout.formats import HermesFormat
from agentic_rollout.loop import AgentLoop, Prompt
from agentic_rollout.tools.base import Toolbox


class ChatCodec:
    """UTF-8 bytes, and one token for each control token of ChatML."""

    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    eos_token_id = 257

    def encode(self, text: str, *, split_special_tokens: bool = False) -> list[int]:
        if split_special_tokens:
            return list(text.encode())
        token_ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, self.special)) + ")", text):
            token_ids += [256 + self.special.index(part)] if part in self.special else part.encode()
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        pieces = (self.special[token - 256].encode() if token > 255 else bytes([token]) for token in token_ids)
        return b"".join(pieces).decode(errors="replace")


CHAT = ChatCodec()


def tool_call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def chat_loop(
    turns: Callable[[int, int], str], toolbox: Toolbox, *, action_format: HermesFormat | None = None, **changes: Any
) -> AgentLoop:
    """A loop whose model writes `turns(row, number of the turn)`, then ends its turn; row r's prompt is token r."""

    def policy(context: tuple[int, ...], seed: int | None) -> list[int]:
        assistant = tuple(CHAT.encode("<|im_start|>assistant\n"))
        said = sum(context[index : index + len(assistant)] == assistant for index in range(len(context)))
        return CHAT.encode(turns(context[0], said) + "<|im_end|>")

    engine = ScriptedEngine(policy, CHAT, eos_token_id=CHAT.eos_token_id)
    settings = LoopSettings(**{"max_observation_tokens": 400, **changes})
    return AgentLoop(
        engine, toolbox, action_format or HermesFormat(), CHAT, settings, prompt_length=4, response_length=4000
    )


def prompts(rows: int) -> list[Prompt]:
    return [Prompt((row,), f"row {row}") for row in range(rows)]
