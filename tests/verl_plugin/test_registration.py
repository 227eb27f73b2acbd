from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("verl", "vllm", "torch", "transformers", "ray")

REPORT = """
import importlib.machinery, inspect, json
from verl.workers.rollout import base
print(json.dumps({
    "class": base._ROLLOUT_REGISTRY.get(("agent", "sync")),
    "others": len(base._ROLLOUT_REGISTRY),
    "loader": type(base.__loader__).__name__,
    "source": "_ROLLOUT_REGISTRY" in inspect.getsource(base),
    "finders": sum(type(finder).__name__ == "_RegistryFinder" for finder in sys.meta_path),
}))
"""


def python(code: str, *, timeout_s: float) -> str:
    result = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


def test_import_brings_in_neither_verl_nor_torch() -> None:
    loaded = python(f"import agentic_rollout\nprint([name for name in {HEAVY} if name in sys.modules])", timeout_s=50)
    assert loaded == "[]"


def test_core_needs_neither_verl_nor_torch() -> None:
    modules = (
        "loop",
        "trace",
        "rewards",
        "engines.scripted",
        "tools.build",
        "verl_plugin.reward",
        "verl_plugin.launch",
    )
    imports = "\n".join(f"import agentic_rollout.{name}" for name in modules)
    loaded = python(f"{imports}\nprint([name for name in {HEAVY} if name in sys.modules])", timeout_s=50)
    assert loaded == "[]"


def test_registering_twice_waits_once() -> None:
    code = """
import agentic_rollout
agentic_rollout.register()
print(sum(type(finder).__name__ == "_RegistryFinder" for finder in sys.meta_path))
"""
    assert python(code, timeout_s=50) == "1"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "imports",
    [
        "import agentic_rollout, verl.workers.rollout.base",
        "import verl.workers.rollout.base, agentic_rollout",
        "import verl, agentic_rollout, verl.workers.rollout.base",
    ],
    ids=["before verl", "after verl's registry", "between verl and its registry"],
)
def test_verl_knows_the_rollout_whatever_is_imported_first(imports: str) -> None:
    pytest.importorskip("verl", exc_type=ImportError)
    report = json.loads(python(f"{imports}\n{REPORT}", timeout_s=350))
    assert report["class"] == "agentic_rollout.verl_plugin.spmd.SearchRollout"
    assert report["others"] > 1
    # verl's module is as it would be without us, and nothing waits any more.
    assert (report["loader"], report["source"], report["finders"]) == ("SourceFileLoader", True, 0)
