"""Makes `rollout.name=agent` known to verl, without importing verl.

verl looks rollouts up in a dictionary. A worker imports this package through `actor_rollout_ref.model.external_lib`,
but some other import may have come first, even before verl itself. So the entry is added at once if verl's registry is
loaded, and otherwise at the moment it is.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

REGISTRY_MODULE = "verl.workers.rollout.base"
ROLLOUTS = {("agent", "sync"): "agentic_rollout.verl_plugin.spmd.SearchRollout"}


def register() -> None:
    """Adds the rollout to verl's registry, now or as soon as that module is imported. Idempotent."""
    module = sys.modules.get(REGISTRY_MODULE)
    if module is not None and hasattr(module, "_ROLLOUT_REGISTRY"):
        _add_rollouts(module)
    elif not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder())


def _add_rollouts(module: ModuleType) -> None:
    module._ROLLOUT_REGISTRY.update(ROLLOUTS)


class _RegistryFinder(MetaPathFinder):
    """Waits for the import of verl's registry module, then steps aside."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != REGISTRY_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    """Loads the registry module as its own loader would, then adds the rollout."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader  # source and pickling as without us
        self._loader.exec_module(module)
        _add_rollouts(module)
