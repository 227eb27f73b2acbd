"""The task `search`: questions about an invented world, answered by searching its passages."""

from __future__ import annotations

import random
from functools import cached_property
from pathlib import Path

import bm25s

from agentic_rollout.demo.task import WORDS, Example, Language, Question, Task
from agentic_rollout.demo.world import (
    Fact,
    World,
    build_world,
    document,
    information,
    invent_names,
    invent_place,
    query,
    question,
    write_corpus,
)

DOCUMENTS_PER_SEARCH = 3
CORPUS_FILE = "corpus.jsonl"
_MAX_COPIED = 6


class SearchTask(Task):
    """Facts to be looked up, for the format `search_r1`."""

    name = "search"
    title = "A world of invented facts"
    tool_tag = "search"
    observation_tag = "information"
    calls = "searches"
    max_turn_tokens = 16
    config = "demo_search"

    def __init__(self, seed: int, entities: int = 80) -> None:
        self._seed = seed
        self._world = build_world(seed, entities)
        self._taken = self._world.names
        self.train = tuple(map(_question, self._world.train))
        self.validation = tuple(map(_question, self._world.validation))

    def language(self) -> Language:
        return search_language(self._seed)

    def example(self, rng: random.Random) -> Example:
        place = invent_place(rng, self._taken)
        facts = rng.sample(place, DOCUMENTS_PER_SEARCH)
        return Example(_question(facts[0]), information(facts))

    def guess(self, rng: random.Random) -> str:
        return invent_names(rng, 1, self._taken)[0]

    def copying(self, rng: random.Random) -> tuple[str, str]:
        names = " ".join(invent_names(rng, rng.randint(2, _MAX_COPIED), self._taken)) + "\n"
        return names, names

    def observe(self, call: str) -> str:
        return information(self._index.search(call))

    def write_files(self, folder: Path) -> None:
        write_corpus(self._world, folder / CORPUS_FILE)

    @cached_property
    def _index(self) -> _SearchIndex:
        return _SearchIndex(self._world)


def search_language(seed: int, places: int = 2400) -> Language:
    """What the tokenizer is made for: questions and search results.

    The texts read like the world's and are about other places: a name that came again and again would
    end up as one token, which a warm start on other names could never teach.
    """
    rng = random.Random(seed)
    texts = []
    for facts in (invent_place(rng) for _ in range(places)):
        found = rng.sample(facts, DOCUMENTS_PER_SEARCH)
        texts += [f"Question: {question(found[0])}\n", information(found)]
    return Language(texts, SearchTask.tags(), WORDS)


class _SearchIndex:
    """BM25 over the world's documents."""

    def __init__(self, world: World) -> None:
        self._facts = world.facts
        self._retriever = bm25s.BM25(backend="numpy")
        documents = [document(fact) for fact in world.facts]
        self._retriever.index(bm25s.tokenize(documents, show_progress=False), show_progress=False)

    def search(self, text: str) -> list[Fact]:
        """The facts of the best `DOCUMENTS_PER_SEARCH` passages, best first."""
        tokens = bm25s.tokenize([text], return_ids=False, show_progress=False)
        found, _ = self._retriever.retrieve(
            tokens, k=DOCUMENTS_PER_SEARCH, show_progress=False, backend_selection="numpy"
        )
        return [self._facts[int(position)] for position in found[0]]


def _question(fact: Fact) -> Question:
    return Question(question(fact), query(fact), fact.value)
