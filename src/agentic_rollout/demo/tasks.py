"""The demo's tasks by name."""

from __future__ import annotations

from collections.abc import Mapping

from agentic_rollout.demo.code_task import CodeTask
from agentic_rollout.demo.search_task import SearchTask
from agentic_rollout.demo.task import Task

TASKS: Mapping[str, type[Task]] = {task.name: task for task in (SearchTask, CodeTask)}
