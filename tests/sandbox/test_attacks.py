"""Every attack against the real sandbox: contained, nothing changed outside, nothing left running, and on it goes."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentic_rollout.sandbox.containment import bubblewrap_problem
from agentic_rollout.sandbox.landlock import landlock_version
from sandbox.attack_runner import MODES, arena, program
from sandbox.attacks import ABOVE, ATTACKS, Attack

RUNNER = Path(__file__).with_name("attack_runner.py")
ROOT = os.geteuid() == 0
BUBBLEWRAP = bubblewrap_problem(shutil.which("bwrap")) is None
TESTS = Path(__file__).parents[1]
SOURCES = Path(sys.modules["agentic_rollout"].__file__ or "").parents[1]

# mode, user, what the container denies
SITUATIONS = [
    ("landlock", "self", "nothing"),
    ("bubblewrap", "self", "nothing"),
    ("landlock", "nobody", "nothing"),
    ("bubblewrap", "nobody", "nothing"),
    ("landlock", "self", "docker"),
    ("landlock", "nobody", "docker"),
    ("landlock of version 1", "nobody", "nothing"),
    ("landlock of version 3", "nobody", "nothing"),
    ("bubblewrap without landlock", "self", "nothing"),
    ("bubblewrap without landlock", "nobody", "nothing"),
]
QUICK = 2


def situations() -> list[Any]:
    return [
        pytest.param(situation, id=", ".join(situation), marks=[] if index < QUICK else [pytest.mark.slow])
        for index, situation in enumerate(SITUATIONS)
    ]


def outcomes(situation: tuple[str, str, str]) -> dict[str, Any]:
    mode, user, profile = situation
    if not ROOT and (user == "nobody" or profile == "docker"):
        pytest.skip("only root can become another user or a container")
    if mode.startswith("bubblewrap") and not BUBBLEWRAP:
        pytest.skip("bubblewrap does not work here")
    if mode.startswith("landlock") and landlock_version() < (MODES[mode] or 1):
        pytest.skip("the kernel's landlock is missing or older")
    return run_all(mode, user, profile)


@functools.cache
def run_all(mode: str, user: str, profile: str) -> dict[str, Any]:
    """Runs all attacks once, in a process that becomes the user and the container."""
    environment = {**os.environ, "PYTHONPATH": f"{SOURCES}:{TESTS}", "TMPDIR": "/tmp"}
    command = [sys.executable, str(RUNNER), mode, user, profile]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("situation", situations())
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack_is_contained(attack: Attack, situation: tuple[str, str, str]) -> None:
    if attack.name == ABOVE and situation[:2] == ("bubblewrap without landlock", "nobody"):
        pytest.skip("without landlock and without root, all programs of a sandbox own the folder of their folders")
    outcome = outcomes(situation)[attack.name]
    assert outcome["status"] in attack.ends, outcome
    assert "ESCAPED" not in outcome["stdout"], outcome["stdout"]
    assert "BROKEN" not in outcome["stdout"], outcome["stdout"]
    if attack.attempts:
        assert int(outcome["stdout"].rpartition("attempts ")[2]) > 0, outcome
    assert outcome["files"] == []
    assert outcome["changes"] == []
    assert outcome["left running"] == []
    assert outcome["same zygote"]
    assert outcome["works after"] == "42\n"
    assert outcome["elapsed_s"] < 10.0


@pytest.mark.parametrize("situation", situations())
def test_a_closed_sandbox_leaves_no_process_and_no_file(situation: tuple[str, str, str]) -> None:
    found = outcomes(situation)
    assert situation[0].startswith(found["mode"])
    assert (found["left running"], found["left in scratch"]) == ([], [])


@pytest.mark.skipif(not ROOT, reason="only root can become a container")
def test_where_bubblewrap_is_denied_it_is_refused_with_the_reason() -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    found = run_all("bubblewrap", "self", "docker")
    assert "sandbox.sandbox: got 'bubblewrap'" in found["unfit"]
    assert "bwrap" in found["unfit"]


@pytest.mark.parametrize(
    "attack", [attack for attack in ATTACKS if attack.works_uncontained], ids=lambda attack: attack.name
)
def test_attack_works_where_nothing_contains_it(attack: Attack) -> None:
    with arena() as outside:
        environment = {**os.environ, "SECRET_TOKEN": "top-secret"}
        command = [sys.executable, "-I", "-c", program(attack, outside)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.count("ESCAPED") >= 3, done.stdout + done.stderr
