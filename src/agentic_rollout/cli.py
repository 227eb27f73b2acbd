"""The command `agentic-rollout`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentic_rollout.errors import AgenticRolloutError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it asks for DEBUG of its own accord
    try:
        return int(options.run(options))
    except AgenticRolloutError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def build_parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    parser = argparse.ArgumentParser(prog="agentic-rollout", description="Multi-turn tool use inside verl's rollout.")
    parser.add_argument("--verbose", action="store_true", help="log what is being done")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="train a tiny model to use a tool, on two CPU cores")
    demo.add_argument("--task", choices=["search", "code"], default="search", help="what to learn (default: search)")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--steps", type=int, default=30, help="training steps (default: 30)")
    demo.add_argument("--out", type=Path, default=Path("outputs/demo"))
    demo.add_argument(
        "--search",
        choices=["embedded", "http"],
        default="embedded",
        help="of task search: http asks a search server",
    )
    demo.add_argument(
        "--mask-observations",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="--no-mask-observations trains on observations, to see what that does",
    )
    demo.add_argument("overrides", nargs="*", help="further settings for verl, as KEY=VALUE")
    demo.set_defaults(run=_demo)
    _add_index(commands.add_parser("index", help="build a search index of a corpus"))
    _add_serve_search(commands)
    _add_serve_code(commands)
    configs = commands.add_parser("configs", help="print the folder for verl's --config-dir")
    configs.set_defaults(run=_configs)
    return parser


def _add_index(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", type=Path, help="JSON lines (.gz too), Parquet, or a folder saved by `datasets`")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the index; must not exist yet")
    parser.add_argument("--kind", choices=["bm25", "dense-flat", "dense-hnsw"], default="bm25")
    parser.add_argument("--k1", type=float, help="BM25: how soon repeated terms stop counting (default: 0.9)")
    parser.add_argument("--b", type=float, help="BM25: how much longer passages are held back (default: 0.4)")
    parser.add_argument("--language", help="BM25: english, cjk, or one with a Snowball stemmer (default: english)")
    parser.add_argument("--encoder", metavar="PATH", help="dense: folder of a model; without it, one without weights")
    parser.add_argument("--faiss", metavar="FILE", help="dense: a FAISS file of the corpus's vectors, used as it is")
    parser.add_argument("--shard-size", type=int, metavar="N", help="passages in memory at once (default: 250000)")
    parser.add_argument("--skip-bad-lines", action="store_true", help="count lines that are no passage, and go on")
    parser.add_argument("--processes", type=int, metavar="N", help="analysing side by side (default: all cores)")
    parser.set_defaults(run=_index)


def _add_serve_search(commands: Any) -> None:
    from agentic_rollout.server.cli import add_arguments, run

    parser = commands.add_parser("serve-search", help="serve an index, or an online service, over HTTP")
    add_arguments(parser)
    parser.set_defaults(run=run)


def _add_serve_code(commands: Any) -> None:
    from agentic_rollout.server.code_cli import add_code_arguments, run_code_server

    parser = commands.add_parser("serve-code", help="run programs in a sandbox, over HTTP")
    add_code_arguments(parser)
    parser.set_defaults(run=run_code_server)


def _index(options: argparse.Namespace) -> int:
    from agentic_rollout.config import build_settings
    from agentic_rollout.retrieval.build import IndexSettings, build_index

    given: dict[str, object] = {"kind": options.kind}
    for name in ("k1", "b", "language", "shard_size"):
        if getattr(options, name) is not None:
            given[name] = getattr(options, name)
    if options.encoder is not None:
        # The index may be opened from any other folder.
        given["encoder"] = {"path": str(Path(options.encoder).resolve())}
    if options.faiss is not None:
        given["faiss"] = str(Path(options.faiss).resolve())
    if options.skip_bad_lines:
        given["on_bad_line"] = "skip"
    settings = build_settings(IndexSettings, given, key="index")
    corpus = build_index(options.corpus, options.out, settings, processes=options.processes)["corpus"]
    skipped = f", {corpus['skipped']:,} lines skipped" if corpus["skipped"] else ""
    print(f"{options.out}: {options.kind}, {corpus['passages']:,} passages{skipped}")
    return 0


def _demo(options: argparse.Namespace) -> int:
    # Read when torch loads its threads: those that wait must not spin, or any other process slows them tenfold.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from rich.console import Console

    from agentic_rollout.demo.run import DemoSettings, run_demo

    settings = DemoSettings(
        task=options.task,
        seed=options.seed,
        steps=options.steps,
        mask_observations=options.mask_observations,
        search=options.search,
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
