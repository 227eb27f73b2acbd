from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentic_rollout.cli import main
from agentic_rollout.retrieval.open import open_index


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        '{"id": "1", "contents": "Zomel\\nThe river of Zomel."}\n{"id": "2", "contents": "Havel\\nA garden."}\n'
    )
    return path


@pytest.mark.parametrize("kind", ["bm25", "dense-flat", "dense-hnsw"])
def test_index_is_built(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    out = tmp_path / "index"
    assert main(["index", str(corpus), "--out", str(out), "--kind", kind]) == 0
    assert capsys.readouterr().out == f"{out}: {kind}, 2 passages\n"
    (hits,) = open_index(out).search(["river"], 1)
    assert hits[0].passage.id == "1"


def test_settings_of_an_index_reach_it(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus.write_text(corpus.read_text() + "bad line\n")
    options = ["--k1", "1.2", "--b", "0.75", "--language", "german", "--shard-size", "1", "--skip-bad-lines"]
    assert main(["index", str(corpus), "--out", str(tmp_path / "index"), *options, "--processes", "1"]) == 0
    assert "2 passages, 1 lines skipped" in capsys.readouterr().out
    manifest = (tmp_path / "index" / "index.json").read_text()
    for setting in ('"k1": 1.2', '"b": 0.75', '"language": "german"', '"shard_size": 1', '"on_bad_line": "skip"'):
        assert setting in manifest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shard-size", "0"], "index.shard_size: got 0"),
        (["--b", "1.5"], "index.b: got 1.5"),
        (["--language", "klingon"], "language: got 'klingon'"),
        (["--kind", "dense-flat", "--encoder", "nowhere"], "nowhere"),
    ],
)
def test_wrong_setting_is_told_in_a_line(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["index", str(corpus), "--out", str(tmp_path / "index"), *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_missing_corpus_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", str(tmp_path / "nowhere"), "--out", str(tmp_path / "index")]) == 2
    assert "nowhere cannot be read" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_commands_are_parsed_without_heavy_imports() -> None:
    """`--help` must not take seconds."""
    code = (
        "import sys\nfrom agentic_rollout.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numba', 'aiohttp', 'faiss', 'ray', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "serve-search" in done.stdout
