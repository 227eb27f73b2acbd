from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentic_rollout.demo.world import ATTRIBUTES, build_world, query, question, write_corpus
from agentic_rollout.retrieval.open import open_index


def test_same_seed_same_world() -> None:
    assert build_world(3) == build_world(3)
    assert build_world(3).facts != build_world(4).facts


def test_nothing_about_validated_entities_is_trained_on() -> None:
    world = build_world(0)
    assert not {fact.entity for fact in world.train} & {fact.entity for fact in world.validation}
    assert len(world.train) + len(world.validation) == len(world.facts) == 80 * len(ATTRIBUTES)


def test_answers_cannot_be_read_off_the_question() -> None:
    assert all(fact.value not in question(fact) for fact in build_world(0).facts)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_right_query_finds_its_passage_first(seed: int, tmp_path: Path) -> None:
    world = build_world(seed)
    write_corpus(world, tmp_path / "corpus.jsonl")
    index = open_index(tmp_path / "corpus.jsonl")
    found = index.search([query(fact) for fact in world.facts], topk=1)
    assert [hits[0].passage.id for hits in found] == [str(row) for row in range(len(world.facts))]


def test_corpus_is_one_json_object_a_line(tmp_path: Path) -> None:
    write_corpus(build_world(0), tmp_path / "corpus.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert all(set(row) == {"id", "contents"} for row in rows)
