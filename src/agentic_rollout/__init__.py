"""Multi-turn tool use inside verl's rollout: generate, act, observe, with masks that are right to the last token.

Importing this package never imports verl. It makes sure that verl knows the rollout `agent` whenever verl's registry of
rollouts is loaded, before or after this import.
"""

from __future__ import annotations

from agentic_rollout.verl_plugin.registration import register

__version__ = "0.1.0"

register()
