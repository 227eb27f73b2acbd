"""The world of the task `search`: places nobody has heard of, and one short passage for every fact about them.

Every name is invented, so an answer can only be found by searching. The questions are split by
place: whoever answers a validation question has never been rewarded for that place.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

ATTRIBUTES = ("river", "metal", "drink", "feast", "fruit", "dance")
VALIDATION_SHARE = 0.25
MAX_ENTITIES = 200  # of 2880 names about half are left for the warm start to practise on

# A name is a head and a tail, such as Zo-mel. No letter both begins and ends a tail, and tails are
# fewer than the pairs of a head's vowel and the letter after it: so a BPE finds the two parts.
_HEADS = tuple(onset + vowel for onset in "BDFGHJKLMNPRSTVZ" for vowel in "aeiou")
_TAILS = tuple(onset + rime for onset in "bdfgkmpvz" for rime in ("an", "el", "ir", "un"))


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known of a place: its `attribute` is called `value`."""

    entity: str
    attribute: str
    value: str


@dataclass(frozen=True, slots=True)
class World:
    """All facts, and the two disjoint parts of them (by entity) that are asked about."""

    facts: tuple[Fact, ...]
    train: tuple[Fact, ...]
    validation: tuple[Fact, ...]

    @property
    def names(self) -> frozenset[str]:
        """Every invented name of this world, of entities and of values."""
        return frozenset(_names(self.facts))


def invent_names(rng: random.Random, count: int, taken: Set[str] = frozenset()) -> list[str]:
    """Invent pronounceable names that are not `taken`, no two of which begin alike.

    Names from one call can thus be told apart by their first token.
    """
    names = []
    for head in rng.sample(_HEADS, count):
        free = [head + tail for tail in _TAILS if head + tail not in taken]
        names.append(rng.choice(free))
    return names


def invent_place(rng: random.Random, taken: Set[str] = frozenset()) -> tuple[Fact, ...]:
    """Invent a place: one fact for each attribute, every name new."""
    entity, *values = invent_names(rng, 1 + len(ATTRIBUTES), taken)
    return tuple(Fact(entity, *known) for known in zip(ATTRIBUTES, values, strict=True))


def build_world(seed: int, entities: int = 80) -> World:
    """Build the world of `seed`: the same seed gives the same world.

    Raises:
        ValueError: there are too few entities to split, or too many to name.
    """
    held_out = round(entities * VALIDATION_SHARE)
    if held_out < 1 or entities > MAX_ENTITIES:
        raise ValueError(f"entities={entities}: ask for 3 to {MAX_ENTITIES}.")
    rng = random.Random(seed)
    places: list[tuple[Fact, ...]] = []
    taken: set[str] = set()
    for _ in range(entities):
        places.append(invent_place(rng, taken))
        taken |= _names(places[-1])
    train = [fact for place in places[held_out:] for fact in place]
    validation = [fact for place in places[:held_out] for fact in place]
    facts = [fact for place in places for fact in place]
    for part in (facts, train, validation):
        rng.shuffle(part)
    return World(tuple(facts), tuple(train), tuple(validation))


def passage(fact: Fact) -> tuple[str, str]:
    """Return the title and the text of the passage that states the fact."""
    return query(fact), f"The {fact.attribute} of {fact.entity} is {fact.value}."


def question(fact: Fact) -> str:
    """Return the question that the fact answers."""
    return f"What is the {fact.attribute} of {fact.entity}?"


def query(fact: Fact) -> str:
    """Return the search query that finds the fact."""
    return f"{fact.entity} {fact.attribute}"


def document(fact: Fact) -> str:
    """Return the passage as a corpus row holds it: the title in quotes, a newline, the text."""
    title, text = passage(fact)
    return f'"{title}"\n{text}'


def information(facts: Sequence[Fact]) -> str:
    """Return what a search that finds these passages shows, best first, without its tags."""
    titled = enumerate(map(passage, facts), start=1)
    return "\n".join(f"Doc {rank}(Title: {title}) {text}" for rank, (title, text) in titled)


def write_corpus(world: World, path: Path) -> None:
    """Write one JSON object a line, with the keys `id` and `contents`, for every fact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for index, fact in enumerate(world.facts):
            file.write(json.dumps({"id": str(index), "contents": document(fact)}) + "\n")


def _names(facts: Iterable[Fact]) -> set[str]:
    return {name for fact in facts for name in (fact.entity, fact.value)}
