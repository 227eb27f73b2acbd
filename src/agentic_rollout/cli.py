"""The command `agentic-rollout`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from agentic_rollout.errors import AgenticRolloutError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it asks for DEBUG of its own accord
    try:
        return int(options.run(options))
    except AgenticRolloutError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agentic-rollout", description="Multi-turn tool use inside verl's rollout.")
    parser.add_argument("--verbose", action="store_true", help="log what is being done")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="train a tiny model to search, on two CPU cores")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--steps", type=int, default=30, help="training steps (default: 30)")
    demo.add_argument("--out", type=Path, default=Path("outputs/demo"))
    demo.add_argument(
        "--mask-observations",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="--no-mask-observations trains on observations, to see what that does",
    )
    demo.add_argument("overrides", nargs="*", help="further settings for verl, as KEY=VALUE")
    demo.set_defaults(run=_demo)
    configs = commands.add_parser("configs", help="print the folder for verl's --config-dir")
    configs.set_defaults(run=_configs)
    return parser


def _demo(options: argparse.Namespace) -> int:
    # Read when torch loads its threads: those that wait must not spin, or any other process slows them tenfold.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from rich.console import Console

    from agentic_rollout.demo.run import DemoSettings, run_demo

    settings = DemoSettings(
        seed=options.seed,
        steps=options.steps,
        mask_observations=options.mask_observations,
        out=options.out,
        overrides=tuple(options.overrides),
    )
    run_demo(settings, Console())
    return 0


def _configs(options: argparse.Namespace) -> int:
    from agentic_rollout.verl_plugin.launch import config_dir

    print(config_dir())
    return 0


if __name__ == "__main__":
    sys.exit(main())
