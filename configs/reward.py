"""The file that verl's `custom_reward_function.path` wants; the function lives in the package."""

from agentic_rollout.verl_plugin.reward import compute_score

__all__ = ["compute_score"]
