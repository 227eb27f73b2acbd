"""Our tools for those who keep verl 0.9's own `tool_agent` loop, where verl no longer ships a search or a Python tool.

`rollout.multi_turn.tool_config_path` names a file like configs/tools/tool_agent.yaml, whose entries are of the class
`VerlTool`; or `rollout.multi_turn.function_tool_path` a file of functions like configs/tools/functions.py, which ask a
`Toolbox` of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from agentic_rollout.errors import SettingsError
from agentic_rollout.tools.base import Toolbox, ToolContext
from agentic_rollout.tools.build import build_toolbox
from agentic_rollout.types import ToolRequest, ToolStatus

_KEY = "tools.config"


class VerlTool(BaseTool):
    """One tool of ours as a native tool of verl's.

    Args:
        config: `name`, as the model calls it, and `tool`, its settings as under `engine_kwargs.agent.tools`; `type` is
            verl's own (`native`).
        tool_schema: verl's, if its file gives one; otherwise the tool's own.

    Raises:
        SettingsError: a setting is missing or wrong.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        name, settings = config.get("name"), config.get("tool")
        if not isinstance(name, str):
            raise SettingsError(f"{_KEY}.name", name, "the name by which the model calls the tool", "Set it.")
        if not isinstance(settings, Mapping):
            raise SettingsError(f"{_KEY}.tool", settings, "a mapping with the tool's settings", "Set it.")
        self._toolbox = build_toolbox({name: settings}, key=_KEY)
        if self._toolbox.names != (name,):
            raise SettingsError(f"{_KEY}.tool.type", settings["type"], "one tool", "Name each tool in an entry.")
        schema = tool_schema or OpenAIFunctionToolSchema.model_validate(self._toolbox.schemas()[0])
        super().__init__(config, schema)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Runs one call.

        Returns:
            What the model is shown, a failure included; no reward; the call's status and latency.
        """
        call = await self._toolbox.call(ToolRequest(self.name, parameters), ToolContext(instance_id))
        facts = {"status": str(call.status), "latency_s": call.latency_s, "failed": call.status is not ToolStatus.OK}
        return ToolResponse(text=call.text), 0.0, facts

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Drops what was kept for one call: verl makes and releases an instance for each."""
        await self._toolbox.finish(instance_id)


async def call_tool(toolbox: Toolbox, name: str, **arguments: Any) -> str:
    """What the model is shown when it calls a tool: for functions registered with verl's `function_tool`."""
    call = await toolbox.call(ToolRequest(name, arguments), ToolContext("function"))
    await toolbox.finish("function")
    return call.text
