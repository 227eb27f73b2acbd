from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from rich.console import Console

from agentic_rollout.cli import build_parser
from agentic_rollout.demo.run import DemoSettings, run_demo
from agentic_rollout.demo.tasks import TASKS
from agentic_rollout.errors import SettingsError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (DemoSettings(task="sums"), "task: got 'sums'"),
        (DemoSettings(task="code", search="http"), "search: got 'http'"),
    ],
)
def test_wrong_settings_are_told_before_anything_is_touched(
    settings: DemoSettings, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=message):
        run_demo(settings, Console(quiet=True))
    assert list(tmp_path.iterdir()) == []


def test_the_command_offers_every_task() -> None:
    for name in TASKS:
        assert build_parser().parse_args(["demo", "--task", name]).task == name
    with pytest.raises(SystemExit):
        build_parser().parse_args(["demo", "--task", "sums"])


def test_the_command_searches_unless_told_otherwise() -> None:
    options: argparse.Namespace = build_parser().parse_args(["demo"])
    assert (options.task, DemoSettings().task) == ("search", "search")
