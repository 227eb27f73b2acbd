"""Do trajectories wait for each other? One vLLM engine, many trajectories, slow tools.

    python bench/overlap.py

Overlap: trajectories of one to three turns call a tool whose latency is log-normal. Nothing can finish before the
slowest trajectory's tools have, nor before the engine has generated everything; the larger of the two is the bound.
Lockstep is the usual other way: all rows generate, all tools are awaited, and only then comes the next turn.

Overhead: one turn and no tool, against `LLM.generate` on the same requests.

Both compare on one engine in one run, every repetition beside the other, so that a slow machine slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny  # isort: skip  # first, as it sets the environment that vLLM reads at import

import numpy as np
from rich.console import Console
from rich.table import Table
from vllm import SamplingParams

from agentic_rollout.codec import HFCodec
from agentic_rollout.config import LoopSettings
from agentic_rollout.engines.vllm_inprocess import VLLMInProcessEngine
from agentic_rollout.loop import AgentLoop, Prompt
from agentic_rollout.tools.base import BaseTool, Toolbox, ToolContext
from agentic_rollout.types import Action, Call, Observation, ToolCall, ToolRequest

PROMPT_TOKENS = 64
MAX_TURNS = 3
OBSERVATION = "<information>" + "nothing was found " * 8 + "</information>"
SEARCH = Call((ToolRequest("sleep", {}),))
# A random model never writes this string, and the engine looks for it all the same.
STOP = ("</search\u2603>", "</answer\u2603>")


@dataclass(frozen=True, slots=True)
class Plan:
    """What one trajectory is going to do, whatever its model samples.

    Attributes:
        prompt_ids: its prompt.
        turns: generations, 1 to `MAX_TURNS`.
        turn_tokens: length of each of its turns.
        latencies_s: latency in seconds of the tool call after each turn but the last.
    """

    prompt_ids: tuple[int, ...]
    turns: int
    turn_tokens: int
    latencies_s: tuple[float, ...]


class EveryTurnCalls:
    """An action format to which every turn is a tool call; `max_turns` ends the trajectory."""

    stop = STOP

    def parse(self, text: str) -> Action:
        return SEARCH

    def render(self, calls: Sequence[ToolCall]) -> Observation:
        return Observation("", OBSERVATION, "")

    def render_invalid(self, problem: str) -> Observation:
        return Observation("", problem, "")


class SleepingTool(BaseTool):
    """Waits as long as the plan says."""

    timeout_s = 600.0

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        call = self._calls.get(context.trajectory_id, 0)
        self._calls[context.trajectory_id] = call + 1
        latency_s = context.row["latencies_s"][call]
        if latency_s > 0:
            await asyncio.sleep(latency_s)
        return ""


class Bench:
    """The ways to roll out the same plans on one engine."""

    def __init__(self, llm: Any, max_model_len: int) -> None:
        self._llm = llm
        self._response_length = max_model_len - PROMPT_TOKENS
        self._codec = HFCodec(llm.get_tokenizer())
        self._observation_ids = tuple(self._codec.encode(OBSERVATION))
        # As verl sets it: temperature and log-probabilities; the turn lengths are planned, so EOS does not end them.
        self._sampling = SamplingParams(temperature=1.0, logprobs=0, detokenize=False, ignore_eos=True)

    def time_s(self, roll_out: Callable[[Sequence[Plan]], object], plans: Sequence[Plan]) -> float:
        """Wall seconds of one way, from a cold prefix cache."""
        self._llm.reset_prefix_cache()
        gc.collect()
        start = time.perf_counter()
        roll_out(plans)
        return time.perf_counter() - start

    def agent_loop(self, plans: Sequence[Plan]) -> None:
        """Ours."""
        asyncio.run(self._agent_loop(plans))

    async def _agent_loop(self, plans: Sequence[Plan]) -> None:
        engine = VLLMInProcessEngine(self._llm.llm_engine, self._sampling)
        toolbox = Toolbox({"sleep": SleepingTool()})
        loops = {
            shape: self._build_loop(engine, toolbox, *shape)
            for shape in {(plan.turns, plan.turn_tokens) for plan in plans}
        }
        prompts = [
            Prompt(plan.prompt_ids, str(index), {"latencies_s": plan.latencies_s}) for index, plan in enumerate(plans)
        ]
        async with engine.running(), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(loops[plan.turns, plan.turn_tokens].run(prompt))
                for plan, prompt in zip(plans, prompts, strict=True)
            ]
        for plan, task in zip(plans, tasks, strict=True):
            sampled = sum(task.result().response_mask)
            assert sampled == plan.turns * plan.turn_tokens, f"{sampled} tokens sampled, planned {plan}"

    def _build_loop(self, engine: VLLMInProcessEngine, toolbox: Toolbox, turns: int, turn_tokens: int) -> AgentLoop:
        settings = LoopSettings(
            max_turns=turns, final_turn=False, max_turn_tokens=turn_tokens, reserve_answer_tokens=turn_tokens
        )
        return AgentLoop(
            engine,
            toolbox,
            EveryTurnCalls(),
            self._codec,
            settings,
            prompt_length=PROMPT_TOKENS,
            response_length=self._response_length,
        )

    def lockstep(self, plans: Sequence[Plan]) -> None:
        """All rows generate, all tools are awaited, then the next turn."""
        contexts = [list(plan.prompt_ids) for plan in plans]
        for turn in range(MAX_TURNS):
            active = [index for index, plan in enumerate(plans) if plan.turns > turn]
            outputs = self._generate([contexts[index] for index in active], [plans[i].turn_tokens for i in active])
            latencies = [plans[index].latencies_s[turn] for index in active if plans[index].turns > turn + 1]
            if any(latencies):
                asyncio.run(_sleep_all(latencies))
            for index, token_ids in zip(active, outputs, strict=True):
                contexts[index] += [*token_ids, *self._observation_ids]

    def llm_generate(self, plans: Sequence[Plan]) -> None:
        """One turn of every row with vLLM's own offline interface."""
        self._generate([list(plan.prompt_ids) for plan in plans], [plan.turn_tokens for plan in plans])

    def _generate(self, contexts: Sequence[list[int]], max_tokens: Sequence[int]) -> list[list[int]]:
        params = {limit: self._params(limit) for limit in set(max_tokens)}
        prompts = [{"prompt_token_ids": context} for context in contexts]
        return [
            output.outputs[0].token_ids
            for output in self._llm.generate(prompts, [params[limit] for limit in max_tokens], use_tqdm=False)
        ]

    def _params(self, max_tokens: int) -> SamplingParams:
        """The same request as the agent loop's engine makes."""
        params = self._sampling.clone()
        params.max_tokens = max_tokens
        params.stop = list(STOP)
        params.include_stop_str_in_output = True
        params.detokenize = True
        params.skip_special_tokens = False
        return params


async def _sleep_all(latencies_s: Sequence[float]) -> None:
    await asyncio.gather(*(asyncio.sleep(latency) for latency in latencies_s))


def draw_plans(seed: int, count: int, turn_tokens: Sequence[int], median_s: float, sigma: float) -> list[Plan]:
    """Trajectories of 1 to `MAX_TURNS` turns, each of one of the lengths, with log-normal latencies in seconds."""
    rng = np.random.default_rng(seed)
    plans = []
    for _ in range(count):
        turns = int(rng.integers(1, MAX_TURNS + 1))
        latencies = median_s * np.exp(sigma * rng.standard_normal(turns - 1))
        prompt = tuple(rng.integers(10, 250, PROMPT_TOKENS).tolist())
        plans.append(Plan(prompt, turns, int(rng.choice(turn_tokens)), tuple(latencies.tolist())))
    return plans


def without_latency(plans: Sequence[Plan]) -> list[Plan]:
    return [Plan(plan.prompt_ids, plan.turns, plan.turn_tokens, (0.0,) * len(plan.latencies_s)) for plan in plans]


def measure_overlap(bench: Bench, plans: Sequence[Plan]) -> dict[str, float]:
    """Seconds of each way for one set of plans, and their ratios.

    The engine's time is the shortest of four runs without latency, two of each way, so that no overhead of ours can
    loosen the bound.
    """
    fast = without_latency(plans)
    engine_s = [bench.time_s(bench.agent_loop, fast), bench.time_s(bench.lockstep, fast)]
    ours_s = bench.time_s(bench.agent_loop, plans)
    lockstep_s = bench.time_s(bench.lockstep, plans)
    engine_s += [bench.time_s(bench.agent_loop, fast), bench.time_s(bench.lockstep, fast)]
    tools_s = max(sum(plan.latencies_s) for plan in plans)
    bound_s = max(min(engine_s), tools_s)
    return {
        "engine_s": min(engine_s),
        "slowest_tools_s": tools_s,
        "bound_s": bound_s,
        "ours_s": ours_s,
        "lockstep_s": lockstep_s,
        "ours_over_bound": ours_s / bound_s,
        "ours_over_lockstep": ours_s / lockstep_s,
        "lockstep_over_bound": lockstep_s / bound_s,
    }


def measure_overhead(bench: Bench, plans: Sequence[Plan], repeats: int) -> dict[str, Any]:
    """One turn without tools, ours and `LLM.generate` in turn; which goes first alternates."""
    ways = {"ours_s": bench.agent_loop, "llm_generate_s": bench.llm_generate}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats):
        for name in sorted(ways, reverse=bool(repeat % 2)):
            seconds[name].append(bench.time_s(ways[name], plans))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        **medians,
        "ours_over_llm_generate": medians["ours_s"] / medians["llm_generate_s"],
        "repeats": repeats,
        "all": seconds,
    }


def render_table(overlap: Sequence[Mapping[str, float]], median: Mapping[str, float]) -> Table:
    columns = {
        "engine_s": "engine",
        "slowest_tools_s": "tools",
        "bound_s": "bound",
        "ours_s": "ours",
        "lockstep_s": "lockstep",
        "ours_over_bound": "÷ bound",
        "ours_over_lockstep": "÷ lockstep",
    }
    table = Table("seed", title="Wall time in seconds; ours ÷ the others")
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for row in overlap:
        table.add_row(str(int(row["seed"])), *(f"{row[column]:.2f}" for column in columns))
    table.add_row("median", *(f"{median[column]:.2f}" for column in columns), style="bold")
    return table


def draw_chart(overlap: Sequence[Mapping[str, float]], path: Path) -> None:
    """Bars of the bound, ours and lockstep for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 3.6), layout="constrained")
    bars = (
        ("bound_s", "lower bound", "#b8b8b8"),
        ("ours_s", "agentic-rollout", "#1f6fb4"),
        ("lockstep_s", "lockstep", "#e08a2e"),
    )
    positions = np.arange(len(overlap))
    for offset, (column, label, colour) in enumerate(bars):
        heights = [row[column] for row in overlap]
        drawn = axes.bar(positions + (offset - 1) * 0.27, heights, 0.25, label=label, color=colour)
        axes.bar_label(drawn, fmt="%.1f", fontsize=8, padding=1)
    axes.set_xticks(positions, [f"seed {int(row['seed'])}" for row in overlap])
    axes.set_ylabel("wall time (s)")
    axes.set_ylim(0, 1.18 * max(row["lockstep_s"] for row in overlap))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=3, frameon=False, loc="upper left")
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Overlap of trajectories on one vLLM engine.")
    parser.add_argument("--model", help="path of a model; default: a tiny random one")
    parser.add_argument("--trajectories", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--turn-tokens", type=int, nargs="+", default=[16, 32, 48], help="lengths of a turn, in tokens")
    parser.add_argument("--latency-median", type=float, default=0.3, help="of the tool, in seconds")
    parser.add_argument("--latency-sigma", type=float, default=1.0, help="of the logarithm of the latency")
    parser.add_argument("--overhead-turn-tokens", type=int, nargs="+", default=[64, 96, 128])
    parser.add_argument("--overhead-repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=tiny.OUTPUTS)
    return parser.parse_args()


def run(arguments: argparse.Namespace, llm: Any, max_model_len: int) -> dict[str, Any]:
    """All measurements, as they are written to `overlap.json`."""
    bench = Bench(llm, max_model_len)
    latency = (arguments.latency_median, arguments.latency_sigma)
    bench.time_s(
        bench.agent_loop, without_latency(draw_plans(99, arguments.trajectories, arguments.turn_tokens, *latency))
    )
    overlap = []
    for seed in range(arguments.seeds):
        plans = draw_plans(seed, arguments.trajectories, arguments.turn_tokens, *latency)
        overlap.append({"seed": seed, **measure_overlap(bench, plans)})
    median = {key: statistics.median(row[key] for row in overlap) for key in overlap[0] if key != "seed"}
    plans = draw_plans(0, arguments.trajectories, arguments.overhead_turn_tokens, *latency)
    one_turn = [Plan(plan.prompt_ids, 1, plan.turn_tokens, ()) for plan in plans]
    settings = {key: value for key, value in vars(arguments).items() if key not in {"out", "model"}}
    return {
        "settings": settings,
        "machine": tiny.machine(),
        "overlap": overlap,
        "overlap_median": median,
        "overhead": measure_overhead(bench, one_turn, arguments.overhead_repeats),
    }


def main() -> None:
    arguments = parse_arguments()
    tiny.quiet_logs()
    max_model_len = PROMPT_TOKENS + 512 + MAX_TURNS * max(arguments.turn_tokens)
    with tempfile.TemporaryDirectory() as folder:
        llm = tiny.build_llm(arguments.model, Path(folder), max_model_len=max_model_len)
        gc.collect()
        gc.freeze()  # as the rollout does: the engine's objects stay
        figures = run(arguments, llm, max_model_len)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "overlap.json").write_text(json.dumps(figures, indent=1) + "\n")
    draw_chart(figures["overlap"], arguments.out / "overlap.png")
    console = Console()
    console.print(render_table(figures["overlap"], figures["overlap_median"]))
    overhead = figures["overhead"]
    console.print(
        f"One turn, no tool: ours {overhead['ours_s']:.3f} s, LLM.generate {overhead['llm_generate_s']:.3f} s, "
        f"ratio {overhead['ours_over_llm_generate']:.3f} (medians of {overhead['repeats']})"
    )


if __name__ == "__main__":
    main()
