from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import agentic_rollout
from agentic_rollout.verl_plugin.lines import LINES, VerlLine
from lines import LINE, verl09

HEAVY = ("verl", "vllm", "torch", "transformers", "ray")

REPORT = """
import importlib.machinery, inspect, json
from agentic_rollout.verl_plugin.registration import REGISTRIES
from verl.workers.rollout import base
print(json.dumps({
    "agent": {mode: path for (name, mode), path in base._ROLLOUT_REGISTRY.items() if name == "agent"},
    "others": len(base._ROLLOUT_REGISTRY),
    "loader": type(base.__loader__).__name__,
    "source": "_ROLLOUT_REGISTRY" in inspect.getsource(base),
    "waiting": [
        name
        for finder in sys.meta_path if type(finder).__name__ == "_RegistryFinder"
        for name in finder._waiting if name in sys.modules
    ],
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
    assert LINE is not None
    assert report["agent"] == {LINE.mode: LINE.rollout}
    assert report["others"] > 1
    # verl's module is as it would be without us, and nothing waits for what is there.
    assert (report["loader"], report["source"], report["waiting"]) == ("SourceFileLoader", True, [])


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_every_path_of_a_line_names_something(line: VerlLine) -> None:
    """By its source: the modules of one line cannot be imported beside the verl of the other."""
    package = Path(agentic_rollout.__file__).parent
    paths = [line.rollout, line.replica, line.agent_loop, *line.estimators.values()]
    for module, name in (path.rsplit(".", 1) for path in paths if path is not None):
        source = (package / f"{module.removeprefix('agentic_rollout.').replace('.', '/')}.py").read_text()
        assert re.search(rf"^(class|def) {name}\b", source, re.MULTILINE), f"{module}.{name}"


def registry(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


def test_a_verl_of_another_line_is_named_when_its_registry_is_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentic_rollout.verl_plugin.lines.metadata.version", lambda _: "0.8.2")
    module = registry("verl.workers.rollout.base", _ROLLOUT_REGISTRY={})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    agentic_rollout.register()
    assert not module._ROLLOUT_REGISTRY
    assert "verl: found 0.8.2, expected a version of 0.6 or 0.9" in caplog.text


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_each_line_fills_the_registries_that_it_has(monkeypatch: pytest.MonkeyPatch, line: VerlLine) -> None:
    monkeypatch.setattr("agentic_rollout.verl_plugin.lines.metadata.version", lambda _: f"{line.name}.1")
    rollouts = registry("verl.workers.rollout.base", _ROLLOUT_REGISTRY={})
    loops = registry("verl.experimental.agent_loop.agent_loop", _agent_loop_registry={})
    for module in (rollouts, loops):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    agentic_rollout.register()
    assert {("agent", line.mode): line.rollout} == rollouts._ROLLOUT_REGISTRY
    wanted = {} if line.agent_loop is None else {"agent": {"_target_": line.agent_loop}}
    assert wanted == loops._agent_loop_registry


def test_a_plugin_that_fails_says_so_loudly() -> None:
    """verl swallows the exception; a line of text on standard error remains, with the cause."""
    code = """
from importlib import metadata
metadata.version = lambda name: "0.8.2"
import os
os.environ["VERL_PLATFORM"] = "cpu"
try:
    import agentic_rollout.verl_plugin.plugin
except Exception as error:
    print(type(error).__name__)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert result.stdout.split() == ["UnsupportedVerlError"]
    assert "agentic-rollout could not be loaded into verl" in result.stderr
    assert "found 0.8.2" in result.stderr


@verl09
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_verl_finds_the_plugin_by_its_entry_point() -> None:
    code = "import json, verl\nfrom verl.workers.rollout.base import get_rollout_class\n"
    code += "from verl.workers.rollout.replica import get_rollout_replica_class\n"
    code += "from verl.experimental.agent_loop import agent_loop\n"
    code += "print(json.dumps([get_rollout_class('agent').__mro__[1].__name__, "
    code += "get_rollout_replica_class('agent').__name__, agent_loop._agent_loop_registry['agent']['_target_']]))"
    found = json.loads(python(code, timeout_s=350))
    assert found == ["ServerAdapter", "AgentReplica", "agentic_rollout.verl_plugin.agent_loop.SearchAgentLoop"]


@verl09
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_warnings_are_heard_beside_vllms_server() -> None:
    """One of its dependencies silences the root logger, as it is imported."""
    code = "import logging, sys, verl\nimport verl.workers.rollout.vllm_rollout.vllm_async_server\n"
    code += "logging.getLogger('agentic_rollout.tools').warning('the search server is down')\n"
    code += "print('model_hosting_container_standards' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=350, check=True)
    assert result.stdout.splitlines()[-1] == "True"
    assert "the search server is down" in result.stderr
