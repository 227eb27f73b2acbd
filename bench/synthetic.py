"""A corpus of invented text of any size, with the statistics that cost a search engine its time.

Word frequencies follow Zipf's law, as in natural language: the most frequent words are English stop words, passages
have around 100 words, and the vocabulary grows with the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import orjson

from agentic_rollout.retrieval.analysis import STOP_WORDS

VOCABULARY = 1_000_000
CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"


def words(count: int = VOCABULARY, seed: int = 0) -> list[str]:
    """Distinct words, the most frequent first: the stop words, then pronounceable ones that grow longer."""
    rng = np.random.default_rng(seed)
    syllables = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
    seen = dict.fromkeys(sorted(STOP_WORDS))
    while len(seen) < count:
        length = 1 + sum(len(seen) > size for size in (80, 4_000, 200_000))
        for row in rng.integers(len(syllables), size=(1000, length)):
            word = "".join(syllables[index] for index in row)
            seen.setdefault(word + ("n" if len(word) < 4 else ""))
    return list(seen)[:count]


def passages(count: int, vocabulary: list[str], *, seed: int = 0, batch: int = 10_000) -> Iterator[bytes]:
    """Lines of a corpus: `id`, `contents`."""
    rng = np.random.default_rng(seed + 1)
    weights = np.cumsum(1.0 / (np.arange(len(vocabulary)) + 2.7) ** 1.07)
    table = np.array(vocabulary, dtype=object)
    for start in range(0, count, batch):
        lengths = rng.integers(60, 140, size=min(batch, count - start))
        ranks = np.searchsorted(weights, rng.random(int(lengths.sum())) * weights[-1])
        texts = np.split(table[ranks], np.cumsum(lengths)[:-1])
        for row, text in enumerate(texts, start=start):
            yield orjson.dumps({"id": str(row), "contents": f'"{" ".join(text[:3])}"\n{" ".join(text[3:])}'}) + b"\n"


def queries(count: int, lines: list[bytes], *, seed: int = 0) -> list[str]:
    """Questions of 6 to 12 words out of one passage each, in their order."""
    rng = np.random.default_rng(seed + 2)
    made = []
    for _ in range(count):
        text = orjson.loads(lines[rng.integers(len(lines))])["contents"].split("\n")[1].split()
        size = int(rng.integers(6, 13))
        made.append(" ".join(text[index] for index in sorted(rng.choice(len(text), size, replace=False))))
    return made
