"""Which line of verl the tests run on, and the marks of tests that belong to one."""

from __future__ import annotations

import pytest

from agentic_rollout.verl_plugin.lines import UnsupportedVerlError, VerlLine, installed_line


def _line() -> VerlLine | None:
    try:
        return installed_line()
    except UnsupportedVerlError:
        return None


LINE = _line()
NAME = LINE.name if LINE is not None else "none"

verl06 = pytest.mark.skipif(NAME != "0.6", reason="of verl 0.6, whose rollout lives in the worker")
verl09 = pytest.mark.skipif(NAME != "0.9", reason="of verl 0.9, whose rollouts are servers")
