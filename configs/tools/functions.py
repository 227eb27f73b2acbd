"""The same tools as functions, for verl 0.9's `actor_rollout_ref.rollout.multi_turn.function_tool_path`."""

import functools
import os

from verl.tools.function_tool import function_tool

from agentic_rollout.tools.base import Toolbox
from agentic_rollout.tools.build import build_toolbox
from agentic_rollout.verl_plugin.tools import call_tool


@functools.cache
def toolbox() -> Toolbox:
    """Built at the first call, as this file is also read where no tool is called."""
    return build_toolbox(
        {
            "search": {"type": "search", "source": os.environ["SEARCH_SOURCE"], "topk": 3},
            "python": {"type": "python", "source": os.environ.get("PYTHON_SOURCE", "embedded")},
        }
    )


@function_tool
async def search(query: str) -> str:
    """Search the corpus.

    Args:
        query: What to search for.
    """
    return await call_tool(toolbox(), "search", query=query)


@function_tool
async def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program.
    """
    return await call_tool(toolbox(), "python", code=code)
