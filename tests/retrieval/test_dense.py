from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from agentic_rollout.errors import SearchIndexError, SettingsError
from agentic_rollout.retrieval.corpus import Passage
from agentic_rollout.retrieval.dense import DenseKind, DenseRanker, build_dense, load_dense, open_faiss
from agentic_rollout.retrieval.encoders import Encoder, HashingEncoder, Vectors
from agentic_rollout.retrieval.index import Ranking

pytest.importorskip("faiss")

XQUAD = Path(__file__).resolve().parents[3] / "shared" / "data" / "xquad"
KINDS: list[DenseKind] = ["flat", "hnsw"]
TOPICS = "zomel havel rudun bafan kigir luvor teska miron".split()
FIELDS = "river metal mountain capital anthem harvest".split()
CORPUS = [
    Passage(f"{topic} {field}", f'"{topic} {field}"\nThe {field} of {topic} is number {len(topic + field)}.')
    for topic in TOPICS
    for field in FIELDS
]
ENCODER = HashingEncoder(dimension=128)


class NumberEncoder:
    """Reads a vector out of the text: `1 0 0.5`."""

    fingerprint = "numbers"

    def __init__(self, dimension: int = 3) -> None:
        self.dimension = dimension
        self.encoded: list[str] = []

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        return np.array([[float(number) for number in text.split()] for text in texts], dtype=np.float32)

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        self.encoded += [passage.id for passage in passages]
        return self.encode_queries([passage.contents for passage in passages])


def random_corpus(rows: int, dimension: int, *, seed: int = 0) -> list[Passage]:
    vectors = np.random.default_rng(seed).standard_normal((rows, dimension))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return [Passage(str(row), " ".join(map(str, vector))) for row, vector in enumerate(vectors)]


def built(
    folder: Path,
    corpus: Sequence[Passage] = CORPUS,
    encoder: Encoder = ENCODER,
    *,
    kind: DenseKind = "flat",
    shard_size: int = 10,
    ef_search: int | None = None,
) -> DenseRanker:
    build_dense(corpus, folder, encoder, kind=kind, shard_size=shard_size)
    return load_dense(folder, encoder, ef_search=ef_search)


def best(corpus: Sequence[Passage], encoder: Encoder, query: str, topk: int) -> Ranking:
    """By looking at every passage, in double precision."""
    vectors = encoder.encode_passages(corpus).astype(np.float64)
    scores = vectors @ encoder.encode_queries([query])[0].astype(np.float64)
    order = sorted(range(len(corpus)), key=lambda row: (-round(scores[row], 6), row))
    return [(row, scores[row]) for row in order if scores[row] > 1e-6][:topk]


def rows(ranking: Ranking) -> list[int]:
    return [row for row, _ in ranking]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard_size", [7, 48, 1000])
def test_best_passages_come_first_however_they_are_kept(tmp_path: Path, kind: DenseKind, shard_size: int) -> None:
    ranker = built(tmp_path, kind=kind, shard_size=shard_size)
    queries = ["river of zomel", "Which capital has Teska?", "harvest", "luvor miron anthem"]
    assert len(ranker) == len(CORPUS)
    for query, ranking in zip(queries, ranker.rank(queries, 5), strict=True):
        expected = best(CORPUS, ENCODER, query, 5)
        assert rows(ranking) == rows(expected)
        assert [score for _, score in ranking] == pytest.approx([score for _, score in expected], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_query_that_says_nothing_finds_nothing(tmp_path: Path, kind: DenseKind) -> None:
    ranker = built(tmp_path, kind=kind)
    rankings = ranker.rank(["", "  \n", "what is the", "river"], 3)
    assert rankings[:3] == [[], [], []]
    assert rows(rankings[3]) == rows(best(CORPUS, ENCODER, "river", 3))
    assert ranker.rank([], 3) == []
    assert ranker.rank(["river"], 0) == [[]]


@pytest.mark.parametrize("kind", KINDS)
def test_passages_with_nothing_in_common_are_no_hits(tmp_path: Path, kind: DenseKind) -> None:
    corpus = [Passage(str(row), text) for row, text in enumerate(["1 0 0", "0 1 0", "-1 0 0", "0.6 0.8 0"])]
    (ranking,) = built(tmp_path, corpus, NumberEncoder(), kind=kind, shard_size=3).rank(["1 0 0"], 100)
    assert ranking == [(0, 1.0), (3, pytest.approx(0.6))]


@pytest.mark.parametrize("shard_size", [30, 64, 5000])
def test_of_equal_scores_the_smaller_row_comes_first(tmp_path: Path, shard_size: int) -> None:
    same = [Passage(str(row), "0.6 0.8 0") for row in range(300)]
    corpus = [*same[:40], Passage("best", "1 0 0"), *same[40:]]
    (ranking,) = built(tmp_path, corpus, NumberEncoder(), shard_size=shard_size).rank(["1 0 0"], 4)
    assert rows(ranking) == [40, 0, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_scores_do_not_depend_on_the_batch(tmp_path: Path, kind: DenseKind) -> None:
    corpus = random_corpus(500, 24)
    ranker = built(tmp_path, corpus, NumberEncoder(24), kind=kind, shard_size=200)
    queries = [passage.contents for passage in random_corpus(64, 24, seed=1)]
    assert ranker.rank(queries, 5) == [ranker.rank([query], 5)[0] for query in queries]


def test_threads_share_a_ranker(tmp_path: Path) -> None:
    ranker = built(tmp_path, kind="hnsw")
    queries = [f"{field} of {topic}" for topic in TOPICS for field in FIELDS]
    expected = ranker.rank(queries, 3)
    with ThreadPoolExecutor(4) as pool:
        assert all(rankings == expected for rankings in pool.map(lambda _: ranker.rank(queries, 3), range(16)))


def test_wider_search_of_the_graph_finds_what_a_narrow_one_misses(tmp_path: Path) -> None:
    """In random directions, far from each other, neighbours are hard to find."""
    corpus, encoder = random_corpus(3000, 64), NumberEncoder(64)
    queries = [passage.contents for passage in random_corpus(50, 64, seed=1)]
    build_dense(corpus, tmp_path / "flat", encoder, kind="flat", shard_size=3000)
    build_dense(corpus, tmp_path / "hnsw", encoder, kind="hnsw", shard_size=3000)
    exact = load_dense(tmp_path / "flat", encoder).rank(queries, 3)

    def recall(ef_search: int | None) -> float:
        found = load_dense(tmp_path / "hnsw", encoder, ef_search=ef_search).rank(queries, 3)
        return float(np.mean([len({*rows(a)} & {*rows(b)}) / 3 for a, b in zip(exact, found, strict=True)]))

    assert recall(1) < 0.8
    assert recall(None) > 0.95
    assert recall(1) < recall(None)


class Interrupted(NumberEncoder):
    """Fails after a number of passages, as a killed build does."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        if len(self.encoded) >= self.after:
            raise KeyboardInterrupt
        return super().encode_passages(passages)


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_build_goes_on_behind_its_last_whole_shard(tmp_path: Path, kind: DenseKind) -> None:
    corpus = random_corpus(25, 3)
    with pytest.raises(KeyboardInterrupt):
        build_dense(corpus, tmp_path, Interrupted(after=20), kind=kind, shard_size=10)
    with pytest.raises(SearchIndexError, match="shard-00002"):
        load_dense(tmp_path, NumberEncoder())
    (tmp_path / "vectors" / "shard-00002.faiss.partial").write_bytes(b"half of it")
    encoder, progress = NumberEncoder(), list[int]()
    build_dense(corpus, tmp_path, encoder, kind=kind, shard_size=10, progress=progress.append)
    assert encoder.encoded == [str(row) for row in range(20, 25)]
    assert sum(progress) == 25
    query = corpus[22].contents
    assert load_dense(tmp_path, encoder).rank([query], 3)[0][0] == (22, pytest.approx(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder": HashingEncoder(64)}, "begun with encoder hashing"),
        ({"kind": "hnsw"}, r"kind flat \(now hnsw\)"),
        ({"shard_size": 11}, r"shard_size 10 \(now 11\)"),
        ({"corpus": CORPUS[:-1]}, r"passages 48 \(now 47\)"),
    ],
)
def test_build_is_not_continued_with_other_settings(tmp_path: Path, change: dict[str, object], message: str) -> None:
    given = {"corpus": CORPUS, "encoder": ENCODER, "kind": "flat", "shard_size": 10}
    build_dense(folder=tmp_path, **given)
    with pytest.raises(SearchIndexError, match=message):
        build_dense(folder=tmp_path, **{**given, **change})
    assert len(load_dense(tmp_path, ENCODER)) == len(CORPUS)


def test_vectors_are_read_with_the_encoder_that_made_them(tmp_path: Path) -> None:
    built(tmp_path)
    with pytest.raises(SearchIndexError, match="another encoder"):
        load_dense(tmp_path, HashingEncoder(128, language="german"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", ["missing", "cut", "overwritten", "from elsewhere"])
def test_damaged_index_is_refused(tmp_path: Path, kind: DenseKind, damage: str) -> None:
    built(tmp_path, kind=kind)
    shard, last = sorted((tmp_path / "vectors").glob("shard-*"))[1:5:3]
    if damage == "missing":
        shard.unlink()
    elif damage == "from elsewhere":
        shard.write_bytes(last.read_bytes())
    else:
        content = shard.read_bytes()
        shard.write_bytes(content[: len(content) // 2] if damage == "cut" else b"x" * 100)
    with pytest.raises(SearchIndexError, match=r"[Bb]uild"):
        load_dense(tmp_path, ENCODER)


@pytest.mark.parametrize("kind", KINDS)
def test_file_of_faiss_is_opened_as_it_is(tmp_path: Path, kind: DenseKind) -> None:
    ranker = built(tmp_path, kind=kind, shard_size=100)
    opened = open_faiss(tmp_path / "vectors" / "shard-00000.faiss", ENCODER)
    assert opened.rank(["river of zomel"], 3) == ranker.rank(["river of zomel"], 3)


def test_file_of_faiss_must_fit_its_encoder(tmp_path: Path) -> None:
    import faiss

    faiss.write_index(faiss.IndexFlatL2(128), str(tmp_path / "l2.index"))
    faiss.write_index(faiss.IndexLSH(128, 64), str(tmp_path / "lsh.index"))
    built(tmp_path, shard_size=100)
    for path, encoder in [("l2.index", ENCODER), ("vectors/shard-00000.faiss", HashingEncoder(64))]:
        with pytest.raises(SearchIndexError, match="the encoder that the index was made with"):
            open_faiss(tmp_path / path, encoder)
    with pytest.raises(SearchIndexError, match="holds a IndexLSH"):
        open_faiss(tmp_path / "lsh.index", ENCODER)
    with pytest.raises(SearchIndexError, match=r"missing\.index cannot be read"):
        open_faiss(tmp_path / "missing.index", ENCODER)


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"kind": "flat"}'])
def test_folder_without_a_dense_index_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "vectors").mkdir()
        (tmp_path / "vectors" / "build.json").write_bytes(content)
    with pytest.raises(SearchIndexError, match=r"build\.json"):
        load_dense(tmp_path, ENCODER)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_vectors_that_are_no_numbers_are_refused_when_they_are_made(
    tmp_path: Path, kind: DenseKind, number: str
) -> None:
    corpus = [Passage("0", "1 0 0"), Passage("1", f"0 {number} 0")]
    with pytest.raises(SearchIndexError, match="NaN or infinity for text 1"):
        build_dense(corpus, tmp_path / "bad", NumberEncoder(), kind=kind, shard_size=10)
    ranker = built(tmp_path, corpus[:1], NumberEncoder(), kind=kind)
    with pytest.raises(SearchIndexError, match="NaN or infinity for text 2"):
        ranker.rank(["1 0 0", "", f"{number} 0 0"], 1)


def test_vectors_of_another_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SearchIndexError, match=r"shape \(1, 2\), expected \(1, 3\)"):
        build_dense([Passage("0", "1 0")], tmp_path, NumberEncoder(), kind="flat", shard_size=1)


@pytest.mark.parametrize(("corpus", "shard_size"), [([], 10), (CORPUS, 0)])
def test_nothing_to_index_is_refused(tmp_path: Path, corpus: list[Passage], shard_size: int) -> None:
    with pytest.raises(SearchIndexError, match="nothing to index"):
        build_dense(corpus, tmp_path, ENCODER, kind="flat", shard_size=shard_size)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:cuda"])
def test_device_that_has_no_meaning_is_refused(tmp_path: Path, device: str) -> None:
    built(tmp_path)
    with pytest.raises(SettingsError, match="cuda:N"):
        load_dense(tmp_path, ENCODER, device=device)


def test_gpu_without_its_faiss_is_named(tmp_path: Path) -> None:
    import faiss

    if hasattr(faiss, "index_cpu_to_gpu") and faiss.get_num_gpus() > 0:
        pytest.skip("FAISS finds a GPU")
    built(tmp_path)
    with pytest.raises(SettingsError, match="faiss-gpu"):
        load_dense(tmp_path, ENCODER, device="cuda")


def test_gpu_finds_what_the_cpu_finds(tmp_path: Path) -> None:
    faiss = pytest.importorskip("faiss")
    if not hasattr(faiss, "index_cpu_to_gpu") or faiss.get_num_gpus() == 0:
        pytest.skip("FAISS finds no GPU")
    corpus, encoder = random_corpus(2000, 64), NumberEncoder(64)
    queries = [passage.contents for passage in random_corpus(20, 64, seed=1)]
    ranker = built(tmp_path, corpus, encoder, shard_size=700)
    assert load_dense(tmp_path, encoder, device="cuda").rank(queries, 5) == ranker.rank(queries, 5)


def test_shard_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "vectors" / "shard-00000.faiss.partial").mkdir(parents=True)
    with pytest.raises(SearchIndexError, match="cannot be written"):
        build_dense(CORPUS, tmp_path, ENCODER, kind="flat", shard_size=10)


@pytest.mark.skipif(not XQUAD.is_dir(), reason=f"the data set is not at {XQUAD}")
@pytest.mark.parametrize("kind", KINDS)
def test_weight_free_vectors_find_the_passages_of_real_questions(tmp_path: Path, kind: DenseKind) -> None:
    corpus = [Passage(row["id"], row["contents"]) for row in read_rows(XQUAD / "corpus.jsonl")]
    questions = read_rows(XQUAD / "questions.jsonl")
    ranker = built(tmp_path, corpus, HashingEncoder(), kind=kind, shard_size=100)
    rankings = ranker.rank([row["question"] for row in questions], 3)
    found = [
        row["passage_id"] in {corpus[number].id for number in rows(ranking)}
        for row, ranking in zip(questions, rankings, strict=True)
    ]
    assert sum(found) / len(found) >= 0.95


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_plan_says_what_the_vectors_are(tmp_path: Path) -> None:
    built(tmp_path, kind="hnsw")
    plan = json.loads((tmp_path / "vectors" / "build.json").read_bytes())
    assert plan == {
        "encoder": ENCODER.fingerprint,
        "dimension": 128,
        "kind": "hnsw",
        "shard_size": 10,
        "passages": len(CORPUS),
    }
    assert not list((tmp_path / "vectors").glob("*.partial"))
