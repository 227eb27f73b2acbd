from __future__ import annotations

import pytest

from agentic_rollout.verl_plugin.launch import config_dir, cpu_environment, trainer_command


def test_command_is_verls_own_entry_point_with_our_configuration() -> None:
    command = trainer_command("search_grpo", ["trainer.total_epochs=1"])
    assert command[1:3] == ["-m", "verl.trainer.main_ppo"]
    assert command[command.index("--config-name") + 1] == "search_grpo"
    assert command[command.index("--config-dir") + 1] == str(config_dir())
    assert command[-1] == "trainer.total_epochs=1"


def test_every_file_that_the_command_names_is_there() -> None:
    assert (config_dir() / "search_grpo.yaml").is_file()
    assert (config_dir() / "reward.py").is_file()


def test_variables_that_are_set_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.delenv("RAY_DEDUP_LOGS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = cpu_environment(threads=3)
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert environment["RAY_DEDUP_LOGS"] == "0"
    assert environment["OMP_NUM_THREADS"] == "3"
