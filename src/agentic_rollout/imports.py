"""Classes named in settings: a built-in's short name, or a dotted path of the user's own."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

from agentic_rollout.errors import SettingsError


def load_object(path: str, *, key: str, known: Iterable[str]) -> Any:
    """The object at `package.module.Name`.

    Args:
        path: dotted path.
        key: the setting it came from, for error messages.
        known: built-in names that would have been accepted too.

    Raises:
        SettingsError: the path has no absolute module part, cannot be imported, or names nothing.
    """
    module_name, _, attribute = path.rpartition(".")
    names = sorted(known)
    expected = f"{', '.join(names)}, or the dotted path of a class"
    if not module_name or path.startswith("."):
        nearest = difflib.get_close_matches(path, names, n=1)
        remedy = f"Did you mean {nearest[0]!r}?" if nearest else "Write package.module.Class for your own."
        raise SettingsError(key, path, expected, remedy)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        remedy = f"The import failed ({error}); is the module on PYTHONPATH in every worker?"
        raise SettingsError(key, path, expected, remedy) from error
    if not hasattr(module, attribute):
        raise SettingsError(key, path, expected, f"Module {module_name} has no {attribute!r}.")
    return getattr(module, attribute)
