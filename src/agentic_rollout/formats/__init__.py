"""Action formats: what the model's text means, and how an observation is written."""

from agentic_rollout.formats.base import ActionFormat
from agentic_rollout.formats.build import FORMATS, build_format
from agentic_rollout.formats.fenced import FencedCodeFormat
from agentic_rollout.formats.hermes import HermesFormat, HermesSettings
from agentic_rollout.formats.tags import CodeFormat, SearchCodeFormat, SearchR1Format, TagFormat, ToolTag

__all__ = [
    "FORMATS",
    "ActionFormat",
    "CodeFormat",
    "FencedCodeFormat",
    "HermesFormat",
    "HermesSettings",
    "SearchCodeFormat",
    "SearchR1Format",
    "TagFormat",
    "ToolTag",
    "build_format",
]
