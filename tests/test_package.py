from __future__ import annotations

import ast
import importlib
import inspect
import logging
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType
from typing import TypeVar

import pytest

import agentic_rollout

# What users' own code relies on: own tools, formats, engines and reward functions.
PUBLIC = {
    "types": {
        "Action",
        "Answer",
        "Call",
        "Completion",
        "FinishReason",
        "Invalid",
        "Observation",
        "Segment",
        "StopReason",
        "ToolCall",
        "ToolRequest",
        "ToolStatus",
        "Trajectory",
    },
    "errors": {
        "AgenticRolloutError",
        "CorpusError",
        "EngineError",
        "InvariantError",
        "PromptError",
        "SearchIndexError",
        "SettingsError",
        "ToolError",
    },
    "batching": {"Batcher"},
    "tools.base": {"BaseTool", "Tool", "ToolContext", "Toolbox"},
    "tools.function": {"FunctionTool"},
    "tools.schemas": {"Check", "ToolSchema", "json_schema", "signature_schema", "tool_schema"},
    "engines.base": {"Engine"},
    "engines.scripted": {"Policy", "ScriptedEngine", "scripted_turns"},
    "formats.base": {"ActionFormat"},
    "formats.build": {"FORMATS", "build_format"},
    "formats.fenced": {"FencedCodeFormat"},
    "formats.hermes": {"HermesFormat", "HermesSettings"},
    "formats.tags": {
        "CODE_TAG",
        "CodeFormat",
        "SEARCH_TAG",
        "SearchCodeFormat",
        "SearchR1Format",
        "TagFormat",
        "TagName",
        "TagSettings",
        "ToolTag",
    },
    "codec": {"ByteCodec", "HFCodec", "TextCodec", "cut_text_tokens", "share_room"},
    "config": {"AGENT_KEY", "AgentSettings", "LoopSettings", "MISSING", "Recovery", "Settings", "build_settings"},
    "loop": {"AgentLoop", "Prompt", "turn_seed"},
    "collate": {"collate"},
    "rewards": {"exact_match", "f1_score", "format_score", "normalize_answer", "substring_match"},
    "trace": {"append_trace", "parse_trajectory", "read_trace", "trajectory_record", "write_trace"},
}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_module_defines_exactly_its_public_names(name: str) -> None:
    module = importlib.import_module(f"agentic_rollout.{name}")
    defined = [member for member in defined_names(module) if not member.startswith("_")]
    private = (TypeVar, logging.Logger)
    assert {member for member in defined if not isinstance(getattr(module, member), private)} == PUBLIC[name]


def defined_names(module: ModuleType) -> Iterator[str]:
    """What a module itself defines at its top level; imported names are left out."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_root_offers_its_version_and_registration() -> None:
    assert agentic_rollout.__version__ == metadata.version("agentic-rollout")
    assert callable(agentic_rollout.register)
