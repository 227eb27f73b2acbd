"""The rollout for verl 0.9: vLLM behind servers, and the agent loop in workers of its own.

`SearchRollout` lives in each training worker and hands weights to the server; `AgentReplica` starts it. Both are
verl's own for vLLM. What makes a rollout of them is `agent_loop.SearchAgentLoop`, which the replica chooses for every
trajectory, so that `rollout.name=agent` is the only switch.
"""

from __future__ import annotations

import logging
from typing import Any

from omegaconf import DictConfig, open_dict
from verl.workers.rollout.vllm_rollout import ServerAdapter
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from agentic_rollout.verl_plugin.lines import AGENT
from agentic_rollout.verl_plugin.settings import agent_settings

logger = logging.getLogger(__name__)

_VERL_DEFAULT_LOOP = "single_turn_agent"


class SearchRollout(ServerAdapter):
    """Sends weights to the server that rolls out; resumes and releases it."""


class AgentReplica(vLLMReplica):
    """A vLLM server whose trajectories are run by `SearchAgentLoop`.

    Raises:
        SettingsError: a setting of `rollout.engine_kwargs.agent` is unknown or cannot be used.
    """

    def __init__(self, replica_rank: int, config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        agent_settings(config)  # a mistake is told in a second, not after a model has been loaded
        choose_agent_loop(config)
        super().__init__(replica_rank, config, model_config, *args, **kwargs)

    def _get_server_name_prefix(self) -> str:
        """As `SearchRollout` looks the server up: by the rollout's name."""
        return f"{AGENT}_"


def choose_agent_loop(config: Any) -> None:
    """Makes the agent loop the default one in verl's live configuration, unless the user has chosen another.

    Args:
        config: `actor_rollout_ref.rollout`. A copy of it (verl's validated dataclass) is left as it is.
    """
    if not isinstance(config, DictConfig):
        return
    if config.agent.default_agent_loop == _VERL_DEFAULT_LOOP:
        with open_dict(config):
            config.agent.default_agent_loop = AGENT
    elif config.agent.default_agent_loop != AGENT:
        logger.warning(
            "rollout.agent.default_agent_loop=%s: trajectories without a column `agent_name` are not run by "
            "rollout.name=%s",
            config.agent.default_agent_loop,
            AGENT,
        )
