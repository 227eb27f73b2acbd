"""BM25 in process, with `bm25s`, analysing English as Lucene does."""

from __future__ import annotations

import re
from collections.abc import Sequence

import bm25s
import numpy as np
import Stemmer

from agentic_rollout.errors import CorpusError
from agentic_rollout.retrieval.corpus import Passage
from agentic_rollout.retrieval.index import Hit

# Lucene's English stop set.
STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they "
    "this to was will with".split()
)
_WORD = re.compile(r"[^\W_]+(?:[.'’][^\W_]+)*")  # close to UAX#29: inner periods and apostrophes do not split
_POSSESSIVE = re.compile(r"['’]s$")


class EnglishAnalyzer:
    """Words, possessives dropped, lower case, stop words dropped, Porter stems: as Lucene's English analyser."""

    def __init__(self) -> None:
        self._stemmer = Stemmer.Stemmer("porter")

    def analyze(self, text: str) -> list[str]:
        words = (_POSSESSIVE.sub("", word.lower()) for word in _WORD.findall(text))
        stems: list[str] = self._stemmer.stemWords([word for word in words if word not in STOP_WORDS])
        return stems


class BM25Index:
    """An index in memory."""

    def __init__(self, passages: Sequence[Passage], retriever: bm25s.BM25, vocabulary: dict[str, int]) -> None:
        self._passages = passages
        self._retriever = retriever
        self._vocabulary = vocabulary
        self._analyzer = EnglishAnalyzer()

    @classmethod
    def build(cls, passages: Sequence[Passage], *, k1: float = 0.9, b: float = 0.4) -> BM25Index:
        """Indexes title and text of every passage.

        Raises:
            CorpusError: no passage has a word to search for.
        """
        analyzer = EnglishAnalyzer()
        vocabulary: dict[str, int] = {}
        token_ids = [
            [vocabulary.setdefault(word, len(vocabulary)) for word in analyzer.analyze(passage.contents)]
            for passage in passages
        ]
        if not vocabulary:
            raise CorpusError(
                f"none of the {len(passages)} passages has a word to search for, stop words aside. Check `contents`."
            )
        retriever = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
        retriever.index((token_ids, vocabulary), show_progress=False)
        return cls(passages, retriever, vocabulary)

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The best passages of each query, best first.

        A query that shares no word with the corpus finds nothing; fewer than `topk` hits come back rather than
        passages that do not match.
        """
        return [self._search(query, topk) for query in queries]

    def _search(self, query: str, topk: int) -> list[Hit]:
        words = self._analyzer.analyze(query)
        known = [self._vocabulary[word] for word in words if word in self._vocabulary]
        if not known:
            return []
        scores = self._retriever.get_scores_from_ids(known)  # (passages,)
        k = min(topk, len(scores))
        least = np.partition(scores, -k)[-k]
        found = np.flatnonzero((scores >= least) & (scores > 0))
        ranked = found[np.lexsort((found, -scores[found]))][:k]  # equal scores: the earlier passage first
        return [Hit(self._passages[index], float(scores[index])) for index in ranked]
