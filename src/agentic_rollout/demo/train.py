"""Runs verl's stock trainer and follows it line by line."""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from agentic_rollout.errors import AgenticRolloutError
from agentic_rollout.verl_plugin.launch import cpu_environment, trainer_command

logger = logging.getLogger(__name__)

_STEP_LINE = re.compile(r"step:(\d+) - (.*)")
_METRIC = re.compile(r"([\w/@.\-]+):(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?)")


class TrainerError(AgenticRolloutError):
    """verl's trainer ended with an error."""


@dataclass(frozen=True, slots=True)
class TrainerRun:
    """One run of the trainer and where it leaves its files."""

    config_name: str
    overrides: Sequence[str]
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "trainer.log"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def follow(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Runs to the end; yields (step, metrics) as the trainer logs them.

        Raises:
            TrainerError: the trainer failed; its last lines are in the message.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        command = trainer_command(self.config_name, self.overrides)
        environment = cpu_environment() | {"VERL_FILE_LOGGER_PATH": str(self.metrics)}
        logger.info("running %s", " ".join(command))
        with self.log.open("w") as log, _started(command, environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                step = parse_step(line)
                if step is not None:
                    yield step
        if process.returncode:
            tail = "".join(self.log.read_text().splitlines(keepends=True)[-25:])
            raise TrainerError(f"verl's trainer failed ({process.returncode}). The end of {self.log}:\n{tail}")


def _started(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def parse_step(line: str) -> tuple[int, dict[str, float]] | None:
    """The step and the metrics in a line of verl's console logger, or None for any other line."""
    match = _STEP_LINE.search(line)
    if match is None:
        return None
    metrics = {name: float(value) for name, value in _METRIC.findall(match.group(2))}
    return int(match.group(1)), metrics


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Step -> metrics, as verl's file logger wrote them."""
    rows = (orjson.loads(line) for line in path.read_bytes().splitlines())
    return {int(row["step"]): row["data"] for row in rows}


def find_metric(metrics: dict[str, float], fragment: str) -> float | None:
    """The value of the first metric whose name contains `fragment`."""
    return next((value for name, value in metrics.items() if fragment in name), None)
