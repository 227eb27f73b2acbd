from __future__ import annotations

import asyncio

import pytest

from agentic_rollout.engines.scripted import ScriptedEngine, scripted_turns
from agentic_rollout.errors import EngineError
from agentic_rollout.types import Completion, FinishReason
from rollouts import CODEC, EOS, now_s, run, spoken


def generate(
    turn: list[int], *, context: tuple[int, ...] = (0,), max_tokens: int = 100, stop: tuple[str, ...] = ()
) -> Completion:
    engine = ScriptedEngine(lambda context, seed: turn, CODEC, eos_token_id=EOS)
    return run(engine.generate(context, max_tokens=max_tokens, stop=stop, seed=None))


@pytest.mark.parametrize(
    ("turn", "max_tokens", "tokens", "finish_reason"),
    [
        (spoken("ab#c"), 100, CODEC.encode("ab#"), FinishReason.STOP),
        (spoken("ab"), 100, [*CODEC.encode("ab"), EOS], FinishReason.EOS),
        ([*spoken("a"), *CODEC.encode("b#")], 100, [*CODEC.encode("a"), EOS], FinishReason.EOS),
        (spoken("abcdef"), 3, CODEC.encode("abc"), FinishReason.LENGTH),
        (spoken("ab#"), 3, CODEC.encode("ab#"), FinishReason.STOP),
        (spoken("ab"), 3, [*CODEC.encode("ab"), EOS], FinishReason.EOS),
    ],
)
def test_turn_ends_where_a_real_engine_would_end_it(
    turn: list[int], max_tokens: int, tokens: list[int], finish_reason: FinishReason
) -> None:
    completion = generate(turn, max_tokens=max_tokens, stop=("#",))
    assert (list(completion.token_ids), completion.finish_reason) == (tokens, finish_reason)


def test_policy_that_ends_without_a_reason_is_an_error() -> None:
    with pytest.raises(EngineError, match="ended after 2 tokens"):
        generate(CODEC.encode("ab"))


def test_logprobs_depend_on_the_context_and_the_token_only() -> None:
    first, again = generate(spoken("abc")), generate(spoken("abc"))
    other_context, other_token = generate(spoken("abc"), context=(1,)), generate(spoken("abd"))
    assert first.logprobs is not None
    assert other_token.logprobs is not None
    assert first.logprobs == again.logprobs
    assert first.logprobs != other_context.logprobs
    assert first.logprobs[:2] == other_token.logprobs[:2]
    assert first.logprobs[2] != other_token.logprobs[2]
    assert all(logprob < 0.0 for logprob in first.logprobs)
    assert len(set(first.logprobs)) == len(first.logprobs)


def test_policy_of_texts_reads_the_context_as_text() -> None:
    engine = ScriptedEngine(scripted_turns(str.upper, CODEC), CODEC)
    completion = run(engine.generate(CODEC.encode("échos#"), max_tokens=100, stop=("#",), seed=None))
    assert CODEC.decode(completion.token_ids) == "ÉCHOS#"


def test_latencies_of_several_generations_overlap() -> None:
    engine = ScriptedEngine(lambda context, seed: spoken("a"), CODEC, eos_token_id=EOS, latency_s=4.0)

    async def both() -> float:
        await asyncio.gather(*(engine.generate((row,), max_tokens=9, stop=(), seed=None) for row in range(2)))
        return now_s()

    assert run(both()) == pytest.approx(4.0)
    assert engine.prompts == [(0,), (1,)]
