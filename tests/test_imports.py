from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest

from agentic_rollout.errors import SettingsError
from agentic_rollout.imports import load_object


def load(path: str) -> object:
    return load_object(path, key="agent.tools.search.type", known=["search", "dense"])


def test_dotted_path_is_imported() -> None:
    assert load("collections.OrderedDict") is OrderedDict


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("serach", "Did you mean 'search'?"),
        ("json", "Write package.module.Class for your own."),
        (".relative", "Write package.module.Class for your own."),
        ("..relative.Class", "Write package.module.Class for your own."),
        ("", "Write package.module.Class for your own."),
        ("no_such_module.Class", "PYTHONPATH"),
        ("collections.NoSuchClass", "Module collections has no 'NoSuchClass'."),
        ("collections.", "Module collections has no ''."),
    ],
)
def test_path_that_leads_nowhere_is_named_with_a_remedy(path: str, remedy: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(path)
    assert (caught.value.key, caught.value.value) == ("agent.tools.search.type", path)
    assert "dense, search" in caught.value.expected
    assert remedy in caught.value.remedy


def test_failure_inside_the_users_module_is_not_mistaken_for_a_missing_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_on_import.py").write_text("import json\njson.no_such_function\nclass Tool: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AttributeError, match="no_such_function"):
        load("broken_on_import.Tool")
