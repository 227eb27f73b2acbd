"""What the tests share: scripted rows, a tape, a scripted tool, a codec with merges, and a clock that never waits."""

from __future__ import annotations

import asyncio
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentic_rollout.codec import ByteCodec, TextCodec
from agentic_rollout.config import LoopSettings
from agentic_rollout.engines.base import Engine
from agentic_rollout.engines.scripted import Policy, ScriptedEngine
from agentic_rollout.formats import SearchR1Format
from agentic_rollout.loop import AgentLoop, Prompt, turn_seed
from agentic_rollout.tools.base import BaseTool, Tool, Toolbox, ToolContext
from agentic_rollout.types import Completion, Segment, Trajectory

EOS = ByteCodec.eos_token_id
CODEC = ByteCodec()

ResultT = TypeVar("ResultT")


class MergingCodec:
    """Bytes, EOS, and tokens for some runs of bytes: the same text has many spellings, and `encode` knows one.

    Tokens that a policy samples are therefore rarely what encoding their text would give, as with a real tokenizer.
    Some merges go across the border of a tag, some end inside a character.
    """

    eos_token_id = EOS
    merges = (
        *(b"<search>", b"</search>", b"<answer>", b"</answer>", b"</", b"<", b">", b"<th", b"ink>", b"th", b"ink"),
        *(b">\n", b"\n\n", b">a", b"ab", b"e ", b" a", "é".encode(), "😀".encode()[:2]),
    )

    def encode(self, text: str, *, split_special_tokens: bool = False) -> list[int]:
        """Always the longest token that fits."""
        return self.spell(text, (-1,))

    def spell(self, text: str, picks: Sequence[int]) -> list[int]:
        """One of the spellings: `picks`, used in turn, choose among the tokens that fit next, shortest first."""
        rest, token_ids = text.encode(errors="replace"), list[int]()
        while rest:
            fitting = [(1, rest[0])]
            fitting += [(len(m), EOS + 1 + index) for index, m in enumerate(self.merges) if rest.startswith(m)]
            pick = picks[len(token_ids) % len(picks)]
            length, token = sorted(fitting)[pick if pick < 0 else pick % len(fitting)]
            token_ids.append(token)
            rest = rest[length:]
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._bytes(token) for token in token_ids).decode(errors="replace")

    def _bytes(self, token: int) -> bytes:
        if token == EOS:
            return b""
        return bytes([token]) if token < EOS else self.merges[token - EOS - 1]


class _SkippingSelector(selectors.DefaultSelector):
    """Skips the time that an event loop would sleep."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("everything waits and nothing is left to happen")
        if not events:
            self.now_s += timeout
        return events


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _SkippingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


def run(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Runs in virtual time: deadlines and latencies of hours take no time and never race. Not for threads."""
    with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
        return runner.run(coroutine)


def now_s() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True)
class TapedTurn:
    """What one generation read and gave, and when it began."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int | None
    started_s: float
    completion: Completion


@dataclass
class Tape:
    """An engine that passes everything on and keeps it, by the first token of the prompt."""

    engine: Engine
    rows: dict[int, list[TapedTurn]] = field(default_factory=dict)

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str], seed: int | None
    ) -> Completion:
        started_s = now_s()
        completion = await self.engine.generate(prompt_ids, max_tokens=max_tokens, stop=stop, seed=seed)
        turn = TapedTurn(tuple(prompt_ids), max_tokens, seed, started_s, completion)
        self.rows.setdefault(prompt_ids[0], []).append(turn)
        return completion


@dataclass
class ScriptedTool(BaseTool):
    """Answers a query with `reply`, which may raise, after `latency` seconds."""

    reply: Callable[[str], str] = "about {}".format
    latency: Callable[[str], float] = lambda query: 0.0
    timeout_s: float = 30.0
    queries: list[str] = field(default_factory=list)

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        query = arguments["query"]
        self.queries.append(query)
        await asyncio.sleep(self.latency(query))
        return self.reply(query)


def play(rows: Mapping[int, Sequence[Sequence[int]]]) -> Policy:
    """A policy: where the context begins with token r, row r's turns one after the other, the last one for ever."""
    played: Counter[int] = Counter()

    def policy(context: tuple[int, ...], seed: int | None) -> Sequence[int]:
        row = context[0]
        turn = min(played[row], len(rows[row]) - 1)
        played[row] += 1
        return rows[row][turn]

    return policy


def spoken(text: str, *, codec: TextCodec = CODEC) -> list[int]:
    """A turn that ends with EOS, should no stop string end it earlier."""
    return [*codec.encode(text), EOS]


@dataclass(frozen=True)
class Rollout:
    """What came of a rollout, and how."""

    trajectories: list[Trajectory]
    tape: Tape
    took_s: float

    @property
    def trajectory(self) -> Trajectory:
        (only,) = self.trajectories
        return only


def roll_out(
    rows: Mapping[int, Sequence[Sequence[int]]] | Sequence[str],
    *,
    tool: Tool | None = None,
    codec: TextCodec = CODEC,
    prompts: Sequence[tuple[int, ...]] | None = None,
    prompt_length: int = 64,
    response_length: int = 2000,
    seed: int | None = None,
    settings: LoopSettings | None = None,
    **changes: Any,
) -> Rollout:
    """Rolls out scripted rows in virtual time.

    Args:
        rows: the turns of each row, by the first token of its prompt; or the texts of the only row's turns.
        tool: what `<search>` calls.
        prompts: by default each row's token and a question mark.
        changes: settings other than the defaults.
    """
    if not isinstance(rows, Mapping):
        rows = {0: [spoken(text, codec=codec) for text in rows]}
    if prompts is None:
        prompts = [(row, *codec.encode("?")) for row in rows]
    tape = Tape(ScriptedEngine(play(rows), codec, eos_token_id=EOS))
    loop = AgentLoop(
        tape,
        Toolbox({"search": tool or ScriptedTool()}),
        SearchR1Format(),
        codec,
        settings or LoopSettings(**changes),
        prompt_length=prompt_length,
        response_length=response_length,
    )
    batch = [
        Prompt(ids, trajectory_id=f"row {index}", seed=None if seed is None else turn_seed(seed, index))
        for index, ids in enumerate(prompts)
    ]

    async def timed() -> Rollout:
        return Rollout(await loop.run_batch(batch), tape, took_s=now_s())

    return run(timed())


def observations(trajectory: Trajectory, codec: TextCodec = CODEC) -> list[str]:
    """What the model was shown, as text."""
    return [codec.decode(segment.token_ids) for segment in trajectory.segments if not segment.sampled]


def sampled(trajectory: Trajectory) -> list[Segment]:
    return [segment for segment in trajectory.segments if segment.sampled]
