"""Dense vectors in FAISS: exact search (`flat`) and an approximate graph (`hnsw`), built and kept in shards.

    DIR/vectors/build.json         what the shards are built with; written first
    DIR/vectors/shard-00000.faiss  an index of FAISS over consecutive rows of the corpus

A shard gets its name when it is complete, so a build that was interrupted goes on behind the last one. Shards are
mapped, not read: processes on one machine share them.

FAISS computes outside the interpreter's lock, and splits a batch of queries over OpenMP threads. Their number is left
to OMP_NUM_THREADS (`faiss.omp_set_num_threads` holds for the calling thread alone): where several threads search, or
several processes, 1 is best.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from agentic_rollout.errors import SearchIndexError, SettingsError
from agentic_rollout.retrieval.corpus import Advance, Passage
from agentic_rollout.retrieval.encoders import Encoder, Vectors
from agentic_rollout.retrieval.index import Ranking

DenseKind = Literal["flat", "hnsw"]
Rows = NDArray[np.int64]
Candidates = tuple[Vectors, Rows]
"""Scores and rows of one query."""

EF_SEARCH = 128  # FAISS's own 16 misses three of ten neighbours in hard data
_LINKS, _EF_CONSTRUCTION = 64, 200
_ENCODED_AT_ONCE = 1024  # passages


def build_dense(
    corpus: Sequence[Passage],
    folder: Path,
    encoder: Encoder,
    *,
    kind: DenseKind,
    shard_size: int,
    progress: Advance = lambda passages: None,
) -> None:
    """Encodes a corpus into `folder/vectors`, or goes on with it.

    Memory is bounded by about twice one shard's vectors, beside the encoder's own.

    Args:
        corpus: is read in order, each shard's passages once.
        folder: the index's own; `vectors` in it is made.
        kind: `hnsw` depends on the order in which threads add vectors, so two builds may differ a little.
        shard_size: passages of a shard, all but the last.
        progress: is told how many further passages are done, those of finished shards included.

    Raises:
        SearchIndexError: the folder was begun with other settings, the corpus is empty, the encoder returned something
            other than finite vectors, or FAISS is not installed.
    """
    if len(corpus) == 0 or shard_size < 1:
        raise SearchIndexError(f"nothing to index: {len(corpus)} passages in shards of {shard_size}.")
    vectors = folder / "vectors"
    vectors.mkdir(parents=True, exist_ok=True)
    _begin(vectors / "build.json", _plan(encoder, kind=kind, shard_size=shard_size, passages=len(corpus)))
    for path, rows in _shards(vectors, shard_size, len(corpus)):
        if path.exists():
            progress(len(rows))
            continue
        index = _empty_index(kind, encoder.dimension)
        for start in range(rows.start, rows.stop, _ENCODED_AT_ONCE):
            batch = range(start, min(start + _ENCODED_AT_ONCE, rows.stop))
            index.add(_checked(encoder.encode_passages(corpus[batch.start : batch.stop]), encoder, batch))
            progress(len(batch))
        _write_index(index, path)


def load_dense(folder: Path, encoder: Encoder, *, ef_search: int | None = None, device: str = "cpu") -> DenseRanker:
    """The vectors that `build_dense` wrote.

    Args:
        folder: as `build_dense` had it.
        encoder: for the queries; must be the one that encoded the passages.
        ef_search: how many candidates an `hnsw` graph keeps while it searches: more are slower and find more.
            `EF_SEARCH` unless told.
        device: `cpu`; `cuda` spreads the shards of a `flat` index over all GPUs, `cuda:N` uses one. They keep half
            precision there, and the hits' scores are summed in full.

    Raises:
        SearchIndexError: the index is missing, incomplete or damaged, or is another encoder's.
        SettingsError: the device cannot be used.
    """
    vectors = folder / "vectors"
    plan = _read_plan(vectors / "build.json")
    for name, value in (("encoder", encoder.fingerprint), ("dimension", encoder.dimension)):
        if plan[name] != value:
            raise SearchIndexError(
                f"{folder} was encoded with another encoder ({name} {plan[name]}, now {value}). Use the model, passage "
                "prefix, pooling and max_tokens that it was built with, or build it again."
            )
    place = _placement(device, plan["kind"])
    paths = [path for path, _ in _shards(vectors, plan["shard_size"], plan["passages"])]
    shards = [place(number, _read_index(path, ef_search)) for number, path in enumerate(paths)]
    ranker = DenseRanker(shards, encoder)
    if len(ranker) != plan["passages"]:
        raise SearchIndexError(
            f"{vectors} holds {len(ranker)} vectors for {plan['passages']} passages. Build it again."
        )
    return ranker


def open_faiss(path: str | Path, encoder: Encoder, *, ef_search: int | None = None, device: str = "cpu") -> DenseRanker:
    """A single file of FAISS, such as Search-R1's `e5_Flat.index` of wiki-18; its rows are the corpus's.

    Args:
        path: the file, which does not say with which model it was made.
        encoder: that model.
        ef_search: see `load_dense`.
        device: see `load_dense`.

    Raises:
        SearchIndexError: the file is missing or no index, or its vectors are not such as the encoder makes.
        SettingsError: the device cannot be used.
    """
    faiss = _import_faiss()
    index = _read_index(Path(path), ef_search)
    if not isinstance(index, faiss.IndexFlat | faiss.IndexHNSW):
        raise SearchIndexError(f"{path} holds a {type(index).__name__}; flat and HNSW indexes can be opened.")
    if index.d != encoder.dimension or index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise SearchIndexError(
            f"{path} holds vectors of {index.d} numbers, the encoder makes {encoder.dimension}, and they must be "
            "compared by inner product. Give the encoder that the index was made with."
        )
    kind = "flat" if isinstance(index, faiss.IndexFlat) else "hnsw"
    return DenseRanker([_placement(device, kind)(0, index)], encoder)


class DenseRanker:
    """Ranks passages by the inner product of their vectors with the query's.

    A passage whose score is not above zero has nothing in common with the query, and is no hit. The hits' scores are
    summed anew, because FAISS's own depend, in their last digits, on the batch that a query came in.
    """

    def __init__(self, shards: Sequence[_Shard], encoder: Encoder) -> None:
        self._shards = shards
        self._encoder = encoder
        self._starts = np.cumsum([0, *(len(shard) for shard in shards)])

    def __len__(self) -> int:
        """Number of vectors."""
        return int(self._starts[-1])

    def rank(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        """See `Ranker`. A blank query finds nothing.

        Raises:
            SearchIndexError: the encoder returned something other than finite vectors.
        """
        rankings: list[Ranking] = [[] for _ in queries]
        asked = [position for position, query in enumerate(queries) if query.strip()]
        if not asked or topk < 1:
            return rankings
        vectors = _checked(
            self._encoder.encode_queries([queries[position] for position in asked]), self._encoder, asked
        )
        meaningful = np.flatnonzero(vectors.any(axis=1))
        for position, ranking in zip(meaningful, self._rank(vectors[meaningful], topk), strict=True):
            rankings[asked[position]] = ranking
        return rankings

    def _rank(self, vectors: Vectors, topk: int) -> list[Ranking]:
        found = [_candidates(shard, vectors, topk) for shard in self._shards]
        return [self._merge(vector, [each[query] for each in found], topk) for query, vector in enumerate(vectors)]

    def _merge(self, vector: Vectors, found: Sequence[Candidates], topk: int) -> Ranking:
        scores = np.concatenate([scores for scores, _ in found])
        rows = np.concatenate([start + rows for start, (_, rows) in zip(self._starts, found, strict=False)])
        if len(scores) > topk:
            uncertain = 2 * max(shard.precision for shard in self._shards)
            rows = rows[scores >= np.partition(scores, -topk)[-topk] - uncertain]
        rows = np.sort(rows)
        scores = (self._vectors(rows) * vector).sum(axis=1)
        best = np.argsort(-scores, kind="stable")[:topk]
        return [(int(rows[position]), float(scores[position])) for position in best if scores[position] > 0]

    def _vectors(self, rows: Rows) -> Vectors:
        """Vectors of rows of the corpus, which are sorted."""
        shares = np.split(rows, np.searchsorted(rows, self._starts[1:-1]))
        parts = zip(self._shards, self._starts, shares, strict=False)
        return np.concatenate([shard.vectors(share - start) for shard, start, share in parts])


_SPARE, _MOST_CANDIDATES = 8, 1024


def _candidates(shard: _Shard, vectors: Vectors, topk: int, depth: int = 0) -> list[Candidates]:
    """For each query the rows that hold its best `topk`, whichever of equal ones FAISS prefers.

    Where the last candidate is as good as the last one needed, more are asked for, within reason.
    """
    most = min(len(shard), max(topk + _SPARE, _MOST_CANDIDATES))
    depth = min(max(depth, topk + _SPARE), most)
    scores, rows = shard.search(vectors, depth)
    found = [(score[row >= 0], row[row >= 0]) for score, row in zip(scores, rows, strict=True)]
    if depth < most:
        needed = scores[:, topk - 1]
        tied = np.flatnonzero((needed > 0) & (scores[:, -1] >= needed - 2 * shard.precision))
        if len(tied) > 0:
            deeper = _candidates(shard, vectors[tied], topk, 2 * depth)
            for query, candidates in zip(tied, deeper, strict=True):
                found[query] = candidates
    return found


class _Shard:
    """An index of FAISS on the CPU. Thread-safe.

    Attributes:
        precision: by how much a score that `search` returns may be wrong.
    """

    precision = 1e-5

    def __init__(self, index: Any) -> None:
        self.index = index

    def __len__(self) -> int:
        return int(self.index.ntotal)

    def search(self, queries: Vectors, k: int) -> tuple[Vectors, Rows]:
        """Scores and rows, each (queries, k), best first; row -1 where there is none."""
        found: tuple[Vectors, Rows] = self.index.search(queries, k)
        return found

    def vectors(self, rows: Rows) -> Vectors:
        """(rows, dimension)"""
        vectors: Vectors = self.index.reconstruct_batch(rows)
        return vectors


class _GpuShard(_Shard):
    """Searched on a GPU, in half precision."""

    precision = 5e-4

    def __init__(self, index: Any, gpu: int) -> None:
        super().__init__(index)
        faiss = _import_faiss()
        options = faiss.GpuClonerOptions()
        options.useFloat16 = True
        self._resources = faiss.StandardGpuResources()
        self._copy = faiss.index_cpu_to_gpu(self._resources, gpu, index, options)
        self._turn = threading.Lock()  # FAISS's GPU resources serve one thread at a time

    def search(self, queries: Vectors, k: int) -> tuple[Vectors, Rows]:
        with self._turn:
            found: tuple[Vectors, Rows] = self._copy.search(queries, k)
        return found


def _placement(device: str, kind: str) -> Callable[[int, Any], _Shard]:
    """What makes a shard, from its number and its index, where it is to be searched."""
    if device == "cpu":
        return lambda number, index: _Shard(index)
    faiss = _import_faiss()
    name, _, gpu = device.partition(":")
    if name != "cuda" or not (gpu.isdecimal() or device == "cuda"):
        raise SettingsError("device", device, "cpu, cuda or cuda:N", "Correct this setting.")
    if not hasattr(faiss, "index_cpu_to_gpu") or faiss.get_num_gpus() == 0:
        remedy = "Install a GPU build (`faiss-gpu-cu12` in place of `faiss-cpu`), or set cpu."
        raise SettingsError("device", device, "a FAISS that finds a GPU", remedy)
    if kind != "flat":
        raise SettingsError("device", device, f"cpu for an index of kind {kind}", "A GPU searches `flat` ones only.")
    if gpu and int(gpu) >= faiss.get_num_gpus():
        raise SettingsError("device", device, f"one of {faiss.get_num_gpus()} GPUs", "Choose another.")
    return lambda number, index: _GpuShard(index, int(gpu) if gpu else number % faiss.get_num_gpus())


def _empty_index(kind: DenseKind, dimension: int) -> Any:
    faiss = _import_faiss()
    if kind == "flat":
        return faiss.IndexFlatIP(dimension)
    index = faiss.IndexHNSWFlat(dimension, _LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = _EF_CONSTRUCTION
    return index


def _write_index(index: Any, path: Path) -> None:
    """Whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        _import_faiss().write_index(index, str(partial))
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        reason = str(error).rpartition("Error: ")[2]
        raise SearchIndexError(f"{path} cannot be written ({reason}). Is the disk full?") from error


def _read_index(path: Path, ef_search: int | None) -> Any:
    faiss = _import_faiss()
    try:
        index = faiss.read_index(str(path), getattr(faiss, "IO_FLAG_MMAP_IFC", 0))
    except RuntimeError as error:
        reason = str(error).rpartition("Error: ")[2]
        raise SearchIndexError(f"{path} cannot be read ({reason}). Build the index again.") from error
    if hasattr(index, "hnsw"):
        index.hnsw.efSearch = ef_search or EF_SEARCH
    return index


def _checked(vectors: Vectors, encoder: Encoder, texts: Sequence[int]) -> Vectors:
    """Finite float32 vectors of the right shape: FAISS takes others, and finds nonsense."""
    if vectors.shape != (len(texts), encoder.dimension):
        raise SearchIndexError(
            f"the encoder returned an array of shape {vectors.shape}, expected {(len(texts), encoder.dimension)}."
        )
    if not np.isfinite(vectors).all():
        broken = texts[int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])]
        raise SearchIndexError(
            f"the encoder returned NaN or infinity for text {broken}. If its weights are in half precision, set "
            "fp16: false; otherwise they are damaged."
        )
    return np.ascontiguousarray(vectors, dtype=np.float32)


def _plan(encoder: Encoder, **settings: object) -> dict[str, Any]:
    return {"encoder": encoder.fingerprint, "dimension": encoder.dimension, **settings}


def _begin(path: Path, plan: dict[str, Any]) -> None:
    """Writes down what the shards are built with, or sees that those there were built with the same."""
    if not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(orjson.dumps(plan, option=orjson.OPT_INDENT_2))
        os.replace(partial, path)
        return
    begun = _read_plan(path)
    changed = [f"{name} {begun[name]} (now {value})" for name, value in plan.items() if begun[name] != value]
    if changed:
        raise SearchIndexError(
            f"{path.parent} was begun with {', '.join(changed)}. Go on with the same settings, or remove it."
        )


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        plan = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise SearchIndexError(f"{path} cannot be read ({error}): no dense index is there. Build it.") from error
    if not isinstance(plan, dict) or {"encoder", "dimension", "kind", "shard_size", "passages"} - plan.keys():
        raise SearchIndexError(f"{path} does not describe a dense index. Build it again.")
    return plan


def _shards(vectors: Path, shard_size: int, passages: int) -> list[tuple[Path, range]]:
    """Every shard's file and rows."""
    rows = range(passages)
    return [
        (vectors / f"shard-{number:05d}.faiss", rows[start : start + shard_size])
        for number, start in enumerate(range(0, passages, shard_size))
    ]


def _import_faiss() -> ModuleType:
    try:
        import faiss
    except ImportError as error:
        raise SearchIndexError(
            f'dense indexes need FAISS ({error}). Install it: pip install "agentic-rollout[search]".'
        ) from None
    module: ModuleType = faiss
    return module
