"""A second look at what an index found: query and passage together, slower and better."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from pydantic import Field

from agentic_rollout.config import Settings, build_settings
from agentic_rollout.errors import SearchIndexError, SettingsError
from agentic_rollout.retrieval.encoders import (
    HashingEncoder,
    Vectors,
    batches_by_length,
    load_model,
    longest_input,
    model_folder,
)
from agentic_rollout.retrieval.index import Hit, Index

LEXICAL = "lexical"


class Reranker(Protocol):
    """Says how well passages answer queries. Thread-safe."""

    def score(self, pairs: Sequence[tuple[str, str]]) -> Vectors:
        """One score per pair of a query and a passage's contents, (pairs,); higher is better."""
        ...


class RerankerSettings(Settings):
    """Which reranker, and how it is used."""

    path: str = Field(
        default=LEXICAL, description=f"folder of a Hugging Face cross-encoder, or {LEXICAL!r}: no weights needed"
    )
    max_tokens: int = Field(default=512, ge=8, description="query and passage together are cut to this many tokens")
    fp16: bool = Field(default=True, description="half precision; on a GPU only")
    batch_size: int = Field(default=32, ge=1, description="pairs scored at once")
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")


def build_reranker(settings: RerankerSettings | Mapping[str, Any] | str, *, key: str = "reranker") -> Reranker:
    """The reranker that the settings describe.

    Args:
        settings: a text is the path, or `lexical`.
        key: the settings' own name, for error messages.

    Raises:
        SettingsError: a setting is wrong, there is no such model, or `transformers` is not installed.
    """
    if isinstance(settings, str):
        settings = RerankerSettings(path=settings)
    elif not isinstance(settings, RerankerSettings):
        settings = build_settings(RerankerSettings, settings, key=key)
    if settings.path == LEXICAL:
        return LexicalReranker()
    return CrossEncoderReranker(settings, key=key)


class LexicalReranker:
    """The cosine of query and passage as bags of words: for tests, and for machines without weights."""

    def __init__(self) -> None:
        self._encoder = HashingEncoder(dimension=8192)

    def score(self, pairs: Sequence[tuple[str, str]]) -> Vectors:
        scores = np.empty(len(pairs), dtype=np.float32)
        for start in range(0, len(pairs), 256):
            batch = pairs[start : start + 256]
            queries = self._encoder.encode_queries([query for query, _ in batch])
            passages = self._encoder.encode_queries([passage for _, passage in batch])
            scores[start : start + 256] = (queries * passages).sum(axis=1)
        return scores


class CrossEncoderReranker:
    """A sequence classifier that reads query and passage together, from this machine's disk.

    One output is the score; of two, the second's lead over the first is.

    Raises:
        SettingsError: there is no such model, it cannot be loaded, or it has more than two outputs.
    """

    def __init__(self, settings: RerankerSettings, *, key: str = "reranker") -> None:
        folder = model_folder(settings.path, key=f"{key}.path")
        self._model, self._tokenizer, self._device = load_model(
            "AutoModelForSequenceClassification", folder, key=key, device=settings.device, fp16=settings.fp16
        )
        if self._model.config.num_labels > 2:
            expected = "a cross-encoder with one or two outputs"
            remedy = f"This one has {self._model.config.num_labels}: it is no reranker."
            raise SettingsError(f"{key}.path", settings.path, expected, remedy)
        self._max_tokens = min(settings.max_tokens, longest_input(self._model))
        self._batch_size = settings.batch_size
        self._tokenizing = threading.Lock()  # a fast tokenizer cannot truncate in two threads at once

    def score(self, pairs: Sequence[tuple[str, str]]) -> Vectors:
        scores = np.empty(len(pairs), dtype=np.float32)
        for rows in batches_by_length([query + passage for query, passage in pairs], self._batch_size):
            scores[rows] = self._score_batch([pairs[row] for row in rows])
        return scores

    def _score_batch(self, pairs: list[tuple[str, str]]) -> Vectors:
        import torch

        with self._tokenizing:
            tokens = self._tokenizer(
                [query for query, _ in pairs],
                [passage for _, passage in pairs],
                padding=True,
                truncation=True,
                max_length=self._max_tokens,
                return_tensors="pt",
            ).to(self._device)
        with torch.inference_mode():
            logits = self._model(**tokens).logits.float()  # (B, 1 or 2)
        scores: Vectors = (logits[:, -1] - (logits[:, 0] if logits.shape[1] == 2 else 0)).cpu().numpy()
        return scores


def rerank(reranker: Reranker, query: str, hits: Sequence[Hit], topk: int) -> list[Hit]:
    """The best `topk` of the hits by the reranker's scores, which they then carry.

    Raises:
        SearchIndexError: see `rerank_all`.
    """
    (reranked,) = rerank_all(reranker, [query], [hits], topk)
    return reranked


def rerank_all(
    reranker: Reranker, queries: Sequence[str], results: Sequence[Sequence[Hit]], topk: int
) -> list[list[Hit]]:
    """As `rerank`, all queries' pairs in one call. Equal scores: the hits keep their order.

    Raises:
        SearchIndexError: the reranker returned something other than one finite score per pair.
    """
    pairs = [(query, hit.passage.contents) for query, hits in zip(queries, results, strict=True) for hit in hits]
    scores = reranker.score(pairs) if pairs else np.empty(0, dtype=np.float32)
    if scores.shape != (len(pairs),) or not np.isfinite(scores).all():
        raise SearchIndexError(
            f"the reranker returned NaN, infinity or a wrong number of scores for {len(pairs)} pairs. If its weights "
            "are in half precision, set fp16: false; otherwise they are damaged."
        )
    rescored = iter(scores.tolist())
    return [
        sorted((Hit(hit.passage, next(rescored)) for hit in hits), key=lambda hit: -hit.score)[:topk]
        for hits in results
    ]


class RerankedIndex:
    """An index, and a reranker that orders the best of what it finds.

    Args:
        index: is asked for `depth` hits, or for as many as are wanted if those are more.
        reranker: scores each of them.
        depth: more cost more, and let the reranker find what the index ranks low.
    """

    def __init__(self, index: Index, reranker: Reranker, *, depth: int = 30) -> None:
        if depth < 1:
            raise SettingsError("depth", depth, "at least 1", "Say how many hits are reranked.")
        self._index = index
        self._reranker = reranker
        self._depth = depth

    def __len__(self) -> int:
        return len(self._index)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The best passages of each query; their scores are the reranker's."""
        found = self._index.search(queries, max(topk, self._depth))
        return rerank_all(self._reranker, queries, found, topk)
