"""Makes `rollout.name=agent` known to verl, without importing verl.

verl looks things up in dictionaries of its modules. A worker may import this package before verl, after it, or, by
verl's entry point, in the middle of its import. So each entry is added at once where the module is loaded already,
and otherwise at the moment it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from agentic_rollout.verl_plugin.lines import AGENT, UnsupportedVerlError, VerlLine, installed_line

logger = logging.getLogger(__name__)


def register() -> None:
    """Adds the entries of the installed line to verl's registries, now or as their modules are loaded. Idempotent."""
    waiting = {}
    for name, (registry, add) in REGISTRIES.items():
        module = sys.modules.get(name)
        if module is not None and hasattr(module, registry):
            _fill(module, add)
        elif module is None:
            waiting[name] = add
    if waiting and not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder(waiting))


def load_dotted(path: str) -> Any:
    """The object that a dotted path names."""
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def _add_rollout(module: ModuleType, line: VerlLine) -> None:
    module._ROLLOUT_REGISTRY[AGENT, line.mode] = line.rollout


def _add_replica(module: ModuleType, line: VerlLine) -> None:
    if line.replica is not None:
        replica = line.replica
        module.RolloutReplicaRegistry.register(AGENT, lambda: load_dotted(replica))


def _add_agent_loop(module: ModuleType, line: VerlLine) -> None:
    if line.agent_loop is not None:
        module._agent_loop_registry[AGENT] = {"_target_": line.agent_loop}


def _repair_estimators(module: ModuleType, line: VerlLine) -> None:
    for name, path in line.estimators.items():
        module.ADV_ESTIMATOR_REGISTRY[name] = load_dotted(path)


_Add = Callable[[ModuleType, VerlLine], None]

# verl's module -> the registry in it, and what adds to it.
REGISTRIES: dict[str, tuple[str, _Add]] = {
    "verl.workers.rollout.base": ("_ROLLOUT_REGISTRY", _add_rollout),
    "verl.workers.rollout.replica": ("RolloutReplicaRegistry", _add_replica),
    "verl.experimental.agent_loop.agent_loop": ("_agent_loop_registry", _add_agent_loop),
    "verl.trainer.ppo.core_algos": ("ADV_ESTIMATOR_REGISTRY", _repair_estimators),
}


def _fill(module: ModuleType, add: _Add) -> None:
    try:
        add(module, installed_line())
    except UnsupportedVerlError as error:
        # verl would go on to say that there is no rollout of this name; this says why. Another rollout may be in use.
        logger.error("rollout.name=%s is not available. %s", AGENT, error)


class _RegistryFinder(MetaPathFinder):
    """Waits for the import of verl's modules, and steps aside after the last."""

    def __init__(self, waiting: dict[str, _Add]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        add = self._waiting.pop(fullname, None)
        if add is None:
            return None
        if not self._waiting:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader, add)
        return spec


class _RegisteringLoader(Loader):
    """Loads a module as its own loader would, then adds to its registry."""

    def __init__(self, loader: Loader, add: _Add) -> None:
        self._loader = loader
        self._add = add

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader  # source and pickling as without us
        self._loader.exec_module(module)
        _fill(module, self._add)
