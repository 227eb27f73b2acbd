"""Three agent loops on one server of verl 0.9: same tiny model, prompts and tool latencies, in turns in one run.

- `agent`: ours, in verl's agent-loop workers, one request to the server for each turn;
- `in_server`: ours, but the whole trajectory within the server's own process;
- `tool_agent`: verl's own loop, with our search tool.

    python bench/loops.py                 # in the environment of verl 0.9: .venv09/bin/python
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentic_rollout.config import AGENT_KEY
from agentic_rollout.tools.base import BaseTool, ToolContext
from agentic_rollout.tools.search import SearchSettings, SearchTool

BENCH = Path(__file__).resolve().parent
OUTPUTS = BENCH.parent / "outputs" / "bench"
sys.path.insert(0, str(BENCH.parent / "tests"))  # the server and the model are those of the tests
MEDIAN_LATENCY_S = 0.1
LOOPS = ("agent", "in_server", "tool_agent")


class SlowSearch(BaseTool):
    """Search that takes as long as its query says: log-normal, the same for every loop."""

    schema: Mapping[str, Any] = {
        "description": "Search the corpus.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    }

    def __init__(self, source: str, topk: int = 3) -> None:
        self._search = SearchTool.from_settings(SearchSettings(type="search", source=source, topk=topk), key="tool")

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        await asyncio.sleep(latency_s(arguments["query"]))
        return await self._search.call(arguments, context)


def latency_s(query: str) -> float:
    """Seconds; the same query always takes as long."""
    share = int.from_bytes(hashlib.blake2b(query.encode(), digest_size=4).digest(), "big") / 2**32
    normal = statistics.NormalDist().inv_cdf(min(max(share, 0.001), 0.999))
    return float(MEDIAN_LATENCY_S * 2.0**normal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=4, help="trajectories per question")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    import serving  # noqa: F401  (first, for the environment that it sets)
    from chatml import write_model

    with tempfile.TemporaryDirectory() as folder:
        task = write_model(Path(folder))
        questions = [question.text for question in (*task.train, *task.validation)]
        with started(Path(folder)) as server:
            result = measure(server, Path(folder), questions[: options.questions], options)
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    (OUTPUTS / "loops.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


@contextmanager
def started(folder: Path) -> Iterator[Any]:
    """The server, with the loop inside it, too."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from serving import serving

    def load_replica() -> type:
        from in_server import LoopReplica

        return LoopReplica

    overrides = [
        f"actor_rollout_ref.model.tokenizer_path={folder / 'tokenizer'}",
        f"{AGENT_KEY}.format=hermes",
        f"{AGENT_KEY}.tools.search={{type: loops.SlowSearch, source: {folder / 'corpus.jsonl'}}}",
        "data.max_response_length=256",
    ]
    import agentic_rollout.verl_plugin.server  # noqa: F401  (registers the replica that is replaced below)

    RolloutReplicaRegistry.register("agent", load_replica)
    with serving(folder / "model", overrides, environment={"PYTHONPATH": str(BENCH)}) as server:
        yield server


def measure(server: Any, folder: Path, questions: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Every loop in turns, after one round that is not counted."""
    from serving import question_batch, timed

    workers = {name: server.workers(loop=name, rollout=_rollout(name, folder)) for name in LOOPS}
    seconds: dict[str, list[float]] = {name: [] for name in LOOPS}
    turns: dict[str, list[float]] = {name: [] for name in LOOPS}
    for round_number in range(options.rounds + 1):
        for name in LOOPS:
            output, spent = timed(workers[name], question_batch(questions, repeat=options.repeat))
            if round_number:
                seconds[name].append(spent)
                mask = output.batch["response_mask"]
                turns[name].append(float((mask[:, 1:] > mask[:, :-1]).sum(1).float().mean()) + 1.0)
    rows = len(questions) * options.repeat
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "trajectories": rows,
        "seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "trajectories_per_second": {name: round(rows / value, 1) for name, value in medians.items()},
        "turns_per_trajectory": {name: round(statistics.mean(values), 2) for name, values in turns.items()},
        "wall_time_of_agent_over": {
            name: round(medians["agent"] / medians[name], 3) for name in ("in_server", "tool_agent")
        },
    }


def _rollout(name: str, folder: Path) -> dict[str, Any]:
    """What a loop needs in `actor_rollout_ref.rollout`."""
    if name == "in_server":
        path = folder / "loops.yaml"
        path.write_text(json.dumps([{"name": "in_server", "_target_": "in_server.InServerLoop"}]))
        return {"agent": {"agent_loop_config_path": str(path)}}
    if name == "tool_agent":
        tool = {"type": "loops.SlowSearch", "source": str(folder / "corpus.jsonl")}
        entry = {
            "class_name": "agentic_rollout.verl_plugin.tools.VerlTool",
            "config": {"type": "native", "name": "search", "tool": tool},
        }
        path = folder / "tools.yaml"
        path.write_text(json.dumps({"tools": [entry]}))
        return {"multi_turn": {"tool_config_path": str(path), "max_tool_response_length": 4096}}
    return {}


if __name__ == "__main__":
    main()
