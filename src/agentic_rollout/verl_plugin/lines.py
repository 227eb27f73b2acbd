"""The lines of verl, and all that is chosen by version.

verl 0.6 generates inside its FSDP workers; verl 0.9 asks servers, from agent loops that run in workers of their own.
Everything is named here by its dotted path, so that this module imports neither verl nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

from agentic_rollout.errors import AgenticRolloutError

AGENT = "agent"  # what `rollout.name` is set to


class UnsupportedVerlError(AgenticRolloutError):
    """The installed verl is of a line that this package has not been made for."""


@dataclass(frozen=True, slots=True)
class VerlLine:
    """One line of verl.

    Attributes:
        name: of the line, major and minor version.
        mode: what `rollout.mode` is on this line.
        rollout: class for verl's registry of rollouts.
        replica: class for its registry of server replicas, if it has one.
        agent_loop: class for its registry of agent loops, if they roll out.
        estimators: advantage estimators that lose credit at observations, and what stands in for them.
        cpu_module: loaded in every process, lets this line run without a GPU.
    """

    name: str
    mode: str
    rollout: str
    cpu_module: str
    replica: str | None = None
    agent_loop: str | None = None
    estimators: Mapping[str, str] = field(default_factory=dict)


LINES = (
    VerlLine(
        name="0.6",
        mode="sync",
        rollout="agentic_rollout.verl_plugin.spmd.SearchRollout",
        cpu_module="agentic_rollout.verl_plugin.cpu",
        estimators={"reinforce_plus_plus": "agentic_rollout.verl_plugin.estimators.reinforce_plus_plus"},
    ),
    VerlLine(
        name="0.9",
        mode="async",
        rollout="agentic_rollout.verl_plugin.server.SearchRollout",
        cpu_module="agentic_rollout.verl_plugin.cpu_platform",
        replica="agentic_rollout.verl_plugin.server.AgentReplica",
        agent_loop="agentic_rollout.verl_plugin.agent_loop.SearchAgentLoop",
    ),
)


def installed_line() -> VerlLine:
    """The line of the installed verl.

    Raises:
        UnsupportedVerlError: verl is missing, or of another line.
    """
    try:
        version = metadata.version("verl")
    except metadata.PackageNotFoundError:
        version = "none"
    for line in LINES:
        if version.startswith(f"{line.name}."):
            return line
    raise UnsupportedVerlError(
        f"verl: found {version}, expected a version of {' or '.join(line.name for line in LINES)}. "
        "Install verl==0.9.1 or verl==0.6.1."
    )
