from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from agentic_rollout.errors import SettingsError
from agentic_rollout.retrieval.corpus import Passage
from agentic_rollout.retrieval.index import Hit
from agentic_rollout.server import cli
from agentic_rollout.server.ray_app import RaySettings, build_application, merge
from agentic_rollout.server.settings import ServerSettings
from server.serving import COMMAND, PASSAGES, get, post
from server.test_run import options


def hits(*scores: float, shard: str = "") -> list[Hit]:
    return [Hit(Passage(f"{shard}{number}", ""), score) for number, score in enumerate(scores)]


def test_merged_hits_are_the_best_of_all_shards_the_earlier_shard_first() -> None:
    merged = merge([hits(3.0, 1.0, shard="a"), hits(), hits(4.0, 3.0, 2.0, shard="b")], 4)
    assert [(hit.passage.id, hit.score) for hit in merged] == [("b0", 4.0), ("a0", 3.0), ("b1", 3.0), ("b2", 2.0)]
    assert merge([hits(1.0), hits(2.0)], 9) == [*hits(2.0), *hits(1.0)]


@pytest.mark.filterwarnings("ignore")  # of Ray's imports
def test_online_source_is_no_shard() -> None:
    with pytest.raises(SettingsError, match="serper"):
        build_application(["serper"], ServerSettings(), RaySettings())


def test_port_that_ray_should_choose_is_refused() -> None:
    with pytest.raises(SettingsError, match="--port"):
        cli.run(options("corpus", "--ray", "--port", "0"))


def test_fewer_replicas_at_most_than_at_least_are_refused() -> None:
    with pytest.raises(SettingsError, match="max_replicas"):
        cli.run(options("corpus", "--ray", "--replicas", "3", "--max-replicas", "2"))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_shards_on_ray_answer_as_one_corpus_and_end_cleanly(tmp_path: Path) -> None:
    shards = [tmp_path / "even.jsonl", tmp_path / "odd.jsonl"]
    for number, shard in enumerate(shards):
        lines = (json.dumps({"id": p.id, "contents": p.contents, "url": p.url}) for p in PASSAGES[number::2])
        shard.write_text("\n".join(lines), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ["--ray", "--port", str(port), "--cpus", "0.1", "--replicas", "1", "--token-env", "TOKEN"]
    process = subprocess.Popen(
        [*COMMAND, "serve-search", *map(str, shards), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TOKEN": "s3cret", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"},
    )
    token = {"Authorization": "Bearer s3cret"}
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            url = json.loads(line)["listening"]
            both = post(f"{url}/retrieve", {"queries": ["river", "Havel"], "topk": 9}, headers=token)
            scored = post(f"{url}/retrieve", {"query": "Tarn", "topk": 1, "return_scores": True}, headers=token)
            refused, bad = post(f"{url}/retrieve", {"queries": ["a"]}), post(f"{url}/retrieve", b"{", headers=token)
            metrics, health = get(f"{url}/metrics", headers=token), get(f"{url}/health")
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=90)
        finally:
            process.kill()
    assert both.status_code == 200, both.text
    found = [{document["id"] for document in documents} for documents in both.json()["result"]]
    assert found == [{passage.id for passage in PASSAGES}, {"1"}]
    assert scored.json()["result"][0][0]["document"]["title"] == "Tarn river"
    assert (refused.status_code, bad.status_code, health.json()["backend"]) == (401, 422, "shards")
    assert 'requests_total{route="/retrieve",status="200"} 2.0' in metrics.text
    assert process.returncode == 0, errors
