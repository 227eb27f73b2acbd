"""The protocol of an action format.

A format is pure: text in, actions and texts out. To add one, write a class with these members and give its dotted path
as the setting `format`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentic_rollout.types import Action, Observation, ToolCall


class ActionFormat(Protocol):
    """How a model writes actions and reads observations."""

    @property
    def stop(self) -> Sequence[str]:
        """Strings that end a turn and stay part of it; none where every turn ends with the text (EOS)."""
        ...

    def parse(self, text: str) -> Action:
        """The action in the text of one turn. Never raises: a turn without a valid action is `Invalid`."""
        ...

    def render(self, calls: Sequence[ToolCall]) -> Observation:
        """The observation for the tool calls of one turn.

        Its tags may depend on which tools were called and how often, never on how the calls ended: an observation is
        measured before any tool is asked, by rendering the calls with empty results.
        """
        ...

    def render_invalid(self, problem: str) -> Observation:
        """What the model is told after an invalid action."""
        ...
