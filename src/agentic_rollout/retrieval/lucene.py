"""Lucene through pyserini: opens an index as Search-R1 ships it, with the documents stored inside."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentic_rollout.errors import SearchIndexError
from agentic_rollout.retrieval.corpus import parse_passage
from agentic_rollout.retrieval.index import Hit

_JVM = threading.Lock()  # pyjnius keeps the receiver of a call in an object that all threads share
_MOST_CLAUSES = 1 << 20


class LuceneIndex:
    """A folder that pyserini's or Anserini's indexer wrote with `--storeRaw`, as `wiki-18-bm25-index` is.

    The queries of a batch are spread over threads of Java. Any thread of Python may call, one at a time: the others
    wait, so large batches are better than many threads.

    Args:
        folder: holds Lucene's `segments_N`.
        k1: BM25's saturation of a word's count.
        b: BM25's weight of a passage's length.
        threads: of Java, for one batch; as many as there are cores, up to 16, unless told.
        language: of the analyser, as pyserini names it (`en`, `zh`, …); the indexer must have had the same.

    Raises:
        SearchIndexError: pyserini or Java is missing, the folder is no index, or documents are not stored in it.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        k1: float = 0.9,
        b: float = 0.4,
        threads: int | None = None,
        language: str = "en",
    ) -> None:
        self._folder = Path(folder)
        if not any(self._folder.glob("segments_*")):
            raise SearchIndexError(f"{folder} is no Lucene index: there is no segments_N in it. Check the path.")
        self._threads = threads or min(16, os.cpu_count() or 1)
        searcher_class = _import_searcher()
        with _JVM:
            try:
                self._searcher = searcher_class(str(self._folder))
                self._searcher.set_language(language)
                self._searcher.set_bm25(k1, b)
            except Exception as error:  # Java's own, of whatever class
                raise SearchIndexError(
                    f"{folder} cannot be opened by this pyserini's Lucene ({error}). Was it written by a newer one?"
                ) from error
            self._length = int(self._searcher.num_docs)
            self._check_documents()

    def __len__(self) -> int:
        return self._length

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The best passages of each query, best first. A blank query finds nothing.

        Raises:
            SearchIndexError: Lucene failed at a query, or a document found is no passage.
        """
        # Java takes no lone surrogate.
        texts = [query.encode(errors="replace").decode() for query in queries]
        asked = {str(position): text for position, text in enumerate(texts) if text.strip()}
        found = self._found(asked, topk) if asked and topk > 0 else {}
        return [found.get(str(position), []) for position in range(len(queries))]

    def _found(self, asked: Mapping[str, str], topk: int) -> dict[str, list[Hit]]:
        threads = min(self._threads, len(asked))
        with _JVM:
            try:
                results = self._searcher.batch_search(list(asked.values()), list(asked), k=topk, threads=threads)
            except Exception as error:  # Java's own, of whatever class
                raise SearchIndexError(f"Lucene failed at one of {len(asked)} queries ({error}).") from error
            if results.keys() != asked.keys():
                raise SearchIndexError(f"Lucene answered {len(results)} of {len(asked)} queries.")
            return {position: [_hit(result) for result in found] for position, found in results.items()}

    def _check_documents(self) -> None:
        first = self._searcher.doc(0) if len(self) else None
        if first is None or first.raw() is None:
            raise SearchIndexError(
                f"{self._folder} holds no documents to show, only what finds them. Index the corpus again with "
                "--storeRaw, or use an index that was."
            )


def _hit(result: Any) -> Hit:
    raw = result.lucene_document.get("raw") or ""
    passage = parse_passage(raw.encode())
    if isinstance(passage, str):
        raise SearchIndexError(f"document {result.docid} is no passage: {passage}: {raw[:80]!r}.")
    return Hit(passage, float(result.score))


def _import_searcher() -> Any:
    remedy = (
        "Install it: pip install pyserini, with a JDK (21; 11 or 17 for pyserini before 0.35) that JAVA_HOME names."
    )
    try:
        from pyserini.pyclass import autoclass
        from pyserini.search.lucene import LuceneSearcher

        # Of 1024 words, a longer query fails, and every query of its batch with it.
        autoclass("org.apache.lucene.search.IndexSearcher").setMaxClauseCount(_MOST_CLAUSES)
    except Exception as error:  # pyjnius raises whatever it meets while it starts the JVM
        raise SearchIndexError(
            f"a Lucene index needs pyserini, which cannot be used here ({error}). {remedy}"
        ) from error
    return LuceneSearcher
