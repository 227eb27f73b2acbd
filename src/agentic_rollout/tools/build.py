"""From settings to a toolbox."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from agentic_rollout.config import AGENT_KEY, build_settings
from agentic_rollout.errors import SettingsError
from agentic_rollout.imports import load_object
from agentic_rollout.tools.access import AccessSettings, AccessTool
from agentic_rollout.tools.base import Tool, Toolbox
from agentic_rollout.tools.function import FunctionTool
from agentic_rollout.tools.mcp import McpSettings, McpTool, start_mcp_tools
from agentic_rollout.tools.python import PythonSettings, PythonTool
from agentic_rollout.tools.search import SearchSettings, SearchTool


def build_toolbox(tools: Mapping[str, Mapping[str, Any]], *, key: str = f"{AGENT_KEY}.tools") -> Toolbox:
    """Builds every tool of the setting `tools`.

    Args:
        tools: name -> settings; `type` chooses a built-in or, as a dotted path, a class that is called with the
            remaining settings as keywords, or a typed function. The tools of an MCP server are named by the server.
        key: the mapping's own name, for error messages.

    Raises:
        SettingsError: a tool's settings are wrong.
        CorpusError: a tool's corpus is.
        SearchIndexError: a tool's index is.
    """
    named: dict[str, Tool] = {}
    opened: list[Tool] = []
    try:
        for name, settings in tools.items():
            built = _build_tools(name, settings, key=f"{key}.{name}")
            opened += built.values()
            for twice in named.keys() & built.keys():
                remedy = "Give the MCP server a `prefix`, or the other tool another name."
                raise SettingsError(f"{key}.{name}", twice, "tools that have names of their own", remedy)
            named |= built
        return Toolbox(named)
    except Exception:
        for tool in opened:
            if isinstance(tool, McpTool):
                tool.server.close()
        raise


def _build_tools(name: str, settings: Mapping[str, Any], *, key: str) -> Mapping[str, Tool]:
    if settings.get("type") == "mcp":
        return start_mcp_tools(build_settings(McpSettings, settings, key=key), key=key)
    return {name: _build_tool(settings, key=key)}


def _build_tool(settings: Mapping[str, Any], *, key: str) -> Tool:
    kind = settings.get("type")
    if not isinstance(kind, str):
        raise SettingsError(f"{key}.type", kind, ", ".join(_KINDS), "Say what the tool is.")
    builder = TOOLS.get(kind)
    if builder is not None:
        return builder(settings, key)
    cls = load_object(kind, key=f"{key}.type", known=_KINDS)
    own = {name: value for name, value in settings.items() if name != "type"}
    try:
        tool: Tool = FunctionTool(cls, **own) if inspect.isroutine(cls) else cls(**own)
    except TypeError as error:
        raise SettingsError(key, own, f"settings that {kind} accepts", f"It said: {error}.") from error
    for member in ("call", "finish", "aclose", "timeout_s"):
        if not hasattr(tool, member):
            remedy = "Derive it from agentic_rollout.tools.base.BaseTool."
            raise SettingsError(f"{key}.type", kind, f"a tool with a member {member!r}", remedy)
    return tool


def _build_search(settings: Mapping[str, Any], key: str) -> Tool:
    return SearchTool.from_settings(build_settings(SearchSettings, settings, key=key), key=key)


def _build_access(settings: Mapping[str, Any], key: str) -> Tool:
    return AccessTool.from_settings(build_settings(AccessSettings, settings, key=key), key=key)


def _build_python(settings: Mapping[str, Any], key: str) -> Tool:
    return PythonTool.from_settings(build_settings(PythonSettings, settings, key=key), key=key)


TOOLS: dict[str, Callable[[Mapping[str, Any], str], Tool]] = {
    "access": _build_access,
    "python": _build_python,
    "search": _build_search,
}

_KINDS = sorted([*TOOLS, "mcp"])
