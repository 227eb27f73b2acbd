"""The shipped Hydra configurations compose over verl's own and pass verl's validation."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentic_rollout.config import AgentSettings, build_settings
from agentic_rollout.verl_plugin.launch import config_dir, cpu_platform
from agentic_rollout.verl_plugin.lines import installed_line
from e2e._engine import write_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # verl, Ray and vLLM warn on import
]

PATHS = ["actor_rollout_ref.model.path=model"]
SEARCHED = ["actor_rollout_ref.rollout.engine_kwargs.agent.tools.search.source=corpus.jsonl"]


def compose(name: str, overrides: list[str]):
    import verl.trainer
    from hydra import compose, initialize_config_dir

    verl_configs = Path(verl.trainer.__file__).parent / "config"
    search_path = f"hydra.searchpath=[file://{verl_configs}]"  # the trainer's own folder, and ours by --config-dir
    with initialize_config_dir(str(config_dir()), version_base=None):
        return compose(name, [search_path, *PATHS, *overrides])


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("search_grpo", "search"),
        ("search_ppo", "search"),
        ("demo_search", "search"),
        ("code_grpo", "python"),
        ("demo_code", "python"),
    ],
)
def test_recipe_is_valid_for_verl_and_for_us(name: str, tool: str, tmp_path: Path) -> None:
    from verl.trainer.ppo.utils import need_critic
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    write_tiny_model(str(tmp_path))  # which verl 0.9 loads to validate a critic
    overrides = [*(SEARCHED if tool == "search" else []), f"actor_rollout_ref.model.path={tmp_path}"]
    config = compose(name, [*overrides, f"platform={cpu_platform()}"] if name.startswith("demo") else overrides)
    assert config.actor_rollout_ref.rollout.name == "agent"
    assert config.actor_rollout_ref.rollout.mode == installed_line().mode
    validate_config(config, use_reference_policy=True, use_critic=need_critic(config))
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    settings = build_settings(AgentSettings, config.actor_rollout_ref.rollout.engine_kwargs.agent)
    assert {name: tool["type"] for name, tool in settings.tools.items()} == {tool: tool}
    assert settings.mask_observations


def test_ppo_recipe_has_a_critic_and_kl_in_the_reward() -> None:
    from verl.trainer.ppo.utils import need_critic

    config = compose("search_ppo", [])
    assert need_critic(config)
    assert config.algorithm.use_kl_in_reward
    assert config.critic.model.path == "model"


def test_reward_file_exists_where_the_recipes_point() -> None:
    path = config_dir() / Path(compose("search_grpo", []).custom_reward_function.path).name
    assert path.is_file()
