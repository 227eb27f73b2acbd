from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentic_rollout.errors import SearchIndexError, SettingsError
from agentic_rollout.retrieval.corpus import Passage
from agentic_rollout.retrieval.encoders import Vectors
from agentic_rollout.retrieval.index import CorpusIndex, Hit, Ranking
from agentic_rollout.retrieval.rerank import (
    CrossEncoderReranker,
    LexicalReranker,
    RerankedIndex,
    RerankerSettings,
    build_reranker,
    rerank,
)

TEXTS = ["gardens of havel", "the metal of zomel", "the river of zomel", "a long river"]
CORPUS = [Passage(str(number), text) for number, text in enumerate(TEXTS)]
HITS = [Hit(passage, 10.0 - row) for row, passage in enumerate(CORPUS)]

VOCABULARY = "[PAD] [UNK] [CLS] [SEP] [MASK] gardens of havel the metal zomel river a long".split()


def ids(hits: Sequence[Hit]) -> list[str]:
    return [hit.passage.id for hit in hits]


class InOrder:
    """Every passage for every query, the first row first."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def rank(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        self.asked.append(topk)
        return [[(row, 1.0) for row in range(len(CORPUS))][: topk if query else 0] for query in queries]


class Fixed:
    """Gives the scores it was made with."""

    def __init__(self, scores: Any) -> None:
        self.scores = np.asarray(scores, dtype=np.float32)

    def score(self, pairs: Sequence[tuple[str, str]]) -> Vectors:
        return self.scores


def test_hits_are_ordered_by_the_reranker_and_carry_its_scores() -> None:
    assert rerank(Fixed([1, 4, 2, 3]), "?", HITS, 3) == [Hit(CORPUS[1], 4), Hit(CORPUS[3], 3), Hit(CORPUS[2], 2)]


def test_equal_scores_keep_the_order_of_the_hits() -> None:
    assert ids(rerank(Fixed([1, 2, 1, 2]), "?", HITS, 10)) == ["1", "3", "0", "2"]


def test_nothing_found_is_nothing_to_rerank() -> None:
    assert rerank(Fixed([1, 2]), "?", [], 3) == []
    assert rerank(Fixed([1, 2, 3, 4]), "?", HITS, 0) == []


@pytest.mark.parametrize("scores", [[1, 2, 3], [1, 2, 3, float("nan")], [1, 2, 3, float("inf")], [[1], [2], [3], [4]]])
def test_scores_that_are_none_are_refused(scores: list[Any]) -> None:
    with pytest.raises(SearchIndexError, match="NaN, infinity or a wrong number of scores for 4 pairs"):
        rerank(Fixed(scores), "?", HITS, 3)


def test_lexical_reranker_counts_shared_words() -> None:
    assert ids(rerank(LexicalReranker(), "Which river is long?", HITS, 10)) == ["3", "2", "0", "1"]


def test_lexical_score_is_the_pairs_own() -> None:
    pairs = [
        (query, text) for query in ("river of zomel", "", "gardens") for text in TEXTS
    ] * 30  # over several batches
    together = LexicalReranker().score(pairs)
    assert together.dtype == np.float32
    alone = [LexicalReranker().score([pair])[0] for pair in pairs[:12]]
    assert together.tolist() == pytest.approx(alone * 30, abs=1e-6)
    assert together[:12].reshape(3, 4).argmax(axis=1).tolist() == [2, 0, 0]
    assert LexicalReranker().score([]).shape == (0,)


def test_reranked_index_looks_deeper_than_it_returns() -> None:
    ranker = InOrder()
    index = RerankedIndex(CorpusIndex(CORPUS, ranker), LexicalReranker(), depth=3)
    found = index.search(["river of zomel", "", "metal"], 1)
    assert [ids(hits) for hits in found] == [["2"], [], ["1"]]
    assert len(index.search(["river"], 4)[0]) == 4
    assert ranker.asked == [3, 4]
    assert len(index) == len(CORPUS)
    assert index.search([], 3) == []


def test_what_the_index_does_not_find_the_reranker_cannot() -> None:
    index = RerankedIndex(CorpusIndex(CORPUS, InOrder()), LexicalReranker(), depth=2)
    assert ids(index.search(["river of zomel"], 1)[0]) == ["1"]


def test_depth_below_one_is_refused() -> None:
    with pytest.raises(SettingsError, match="depth"):
        RerankedIndex(CorpusIndex(CORPUS, InOrder()), LexicalReranker(), depth=0)


@pytest.fixture(scope="module")
def write_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a small cross-encoder with random weights, and a tokenizer that knows a few words."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")

    def write(outputs: int) -> Path:
        folder = tmp_path_factory.mktemp("cross-encoder")
        (folder / "vocab.txt").write_text("\n".join(VOCABULARY), encoding="utf-8")
        transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=40,
            initializer_range=0.5,
            num_labels=outputs,
        )
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
        return folder

    return write


def logits(folder: Path, query: str, passage: str) -> list[float]:
    import torch
    import transformers

    tokens = transformers.AutoTokenizer.from_pretrained(folder)(query, passage, return_tensors="pt")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return model(**tokens).logits[0].tolist()


@pytest.mark.parametrize("outputs", [1, 2])
def test_cross_encoder_reads_each_pair_as_if_alone(write_model: Callable[..., Path], outputs: int) -> None:
    folder = write_model(outputs)
    reranker = build_reranker({"path": str(folder), "device": "cpu", "batch_size": 2})
    scores = reranker.score([("river", text) for text in TEXTS])
    expected = [logits(folder, "river", text) for text in TEXTS]
    assert scores.dtype == np.float32
    assert scores.tolist() == pytest.approx(
        [each[-1] - (each[0] if outputs == 2 else 0) for each in expected], abs=1e-4
    )
    assert len({round(score, 3) for score in scores.tolist()}) == 4
    assert reranker.score([]).shape == (0,)


def test_cross_encoder_cuts_long_pairs(write_model: Callable[..., Path]) -> None:
    folder = write_model(1)
    long = ("river " * 500, "metal " * 500)
    assert np.isfinite(build_reranker(str(folder)).score([long, ("river " * 500, "metal"), ("river", "")])).all()
    short = CrossEncoderReranker(RerankerSettings(path=str(folder), max_tokens=8, device="cpu"))
    assert np.allclose(*short.score([("river", "metal " * 10), ("river", "metal " * 20)]), atol=1e-5)


def test_threads_share_a_cross_encoder(write_model: Callable[..., Path]) -> None:
    reranker = build_reranker(str(write_model(1)))
    pairs = [("river", text) for text in TEXTS]
    expected = reranker.score(pairs)
    with ThreadPoolExecutor(8) as pool:
        for scores in pool.map(lambda _: reranker.score(pairs), range(32)):
            assert np.allclose(scores, expected, atol=1e-5)


def test_classifier_with_many_outputs_is_no_reranker(write_model: Callable[..., Path]) -> None:
    with pytest.raises(SettingsError, match="one or two outputs"):
        build_reranker(str(write_model(5)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("BAAI/bge-reranker-base", r"server\.reranker\.path.*not fetched"),
        ({"path": "lexical", "depth": 3}, r"server\.reranker\.depth"),
        ({"batch_size": 0}, r"server\.reranker\.batch_size"),
    ],
)
def test_wrong_setting_is_named(settings: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        build_reranker(settings, key="server.reranker")


def test_settings_choose_the_reranker() -> None:
    for settings in ("lexical", {}, RerankerSettings()):
        assert isinstance(build_reranker(settings), LexicalReranker)
