"""What the rollout alone knows of a trajectory, for reward functions and logs."""

from __future__ import annotations

from typing import Any

from agentic_rollout.types import Trajectory


def reward_facts(trajectory: Trajectory) -> dict[str, Any]:
    """Facts parsed from sampled tokens, which an observation or a forged tag in the decoded text cannot fake."""
    return {
        "answer": trajectory.answer,
        "stop_reason": str(trajectory.stop_reason),
        "invalid_turns": trajectory.invalid_turns,
        "tool_calls": len(trajectory.tool_calls),
        "failed_tool_calls": sum(call.status != "ok" for call in trajectory.tool_calls),
    }
