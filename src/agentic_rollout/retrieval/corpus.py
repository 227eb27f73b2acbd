"""A corpus of passages: JSON lines that stay on disk."""

from __future__ import annotations

import gzip
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, overload

import numpy as np
import orjson
from numpy.typing import NDArray

from agentic_rollout.errors import CorpusError

OnBadLine = Literal["refuse", "skip"]
Advance = Callable[[int], object]
"""Is told how much more has been done, for a progress bar."""

_LINES_PER_ADVANCE = 10_000


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage.

    Attributes:
        id: unique in its corpus.
        contents: the quoted title, a newline, then the text: the layout of Search-R1's corpora.
        url: where the passage comes from; empty if that is not known.
    """

    id: str
    contents: str
    url: str = ""

    @property
    def title(self) -> str:
        return self.contents.partition("\n")[0].strip().strip('"')

    @property
    def text(self) -> str:
        return self.contents.partition("\n")[2].strip()


@dataclass(frozen=True, slots=True)
class Scan:
    """Where the passages of a file of JSON lines start.

    Attributes:
        offsets: (passages,) int64, in bytes from the beginning of the file.
        skipped: lines left out because they are no passage.
        first_skipped: what was wrong with the first of them.
    """

    offsets: NDArray[np.int64]
    skipped: int = 0
    first_skipped: str = ""


class Corpus(Sequence[Passage]):
    """Passages by row, read from a mapped file when they are asked for. Thread-safe.

    Memory holds eight bytes a passage (none, if the offsets are mapped too); the text stays on disk.
    """

    def __init__(self, path: Path, offsets: NDArray[np.int64]) -> None:
        self.path = path
        self.offsets = offsets
        with _open(path) as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, row: int) -> Passage: ...
    @overload
    def __getitem__(self, row: slice) -> list[Passage]: ...
    def __getitem__(self, row: int | slice) -> Passage | list[Passage]:
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        start = int(self.offsets[row])
        end = self._map.find(b"\n", start)
        passage = parse_passage(self._map[start : end if end >= 0 else len(self._map)])
        if isinstance(passage, str):
            raise CorpusError(f"{self.path}: row {row} has changed since it was indexed ({passage}). Index it again.")
        return passage


def open_corpus(path: str | Path, *, on_bad_line: OnBadLine = "refuse") -> Corpus:
    """A corpus of any of the formats that `convert_corpus` reads, ready to be read.

    What is no file of JSON lines is written to a temporary one, which lives as long as the corpus.

    Raises:
        CorpusError: see `scan_lines`.
    """
    path = Path(path)
    if is_json_lines(path):
        return Corpus(path, scan_lines(path, on_bad_line=on_bad_line).offsets)
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "corpus.jsonl"
        convert_corpus(path, lines)
        return Corpus(lines, scan_lines(lines, on_bad_line=on_bad_line).offsets)  # the mapping outlives the file's name


def is_json_lines(path: Path) -> bool:
    """Whether `path` can be read in place; Parquet, `datasets` and compressed files are to be converted."""
    return not path.is_dir() and path.suffix not in (".parquet", ".gz")


def scan_lines(path: Path, *, on_bad_line: OnBadLine = "refuse", advance: Advance | None = None) -> Scan:
    """Finds and checks every passage of a file of JSON lines. Blank lines do not count.

    Args:
        advance: is told the bytes that have been read.

    Raises:
        CorpusError: the file is missing or has no passage, or a line is not one and `on_bad_line` is "refuse"; the
            line is named by its number.
    """
    starts = _Growing()
    offset = told = skipped = 0
    first_skipped = ""
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            problem = parse_passage(line) if line.strip() else None
            if isinstance(problem, str):
                message = f"{path}, line {number}: {problem}: {_excerpt(line)}."
                if on_bad_line == "refuse":
                    raise CorpusError(f"{message} Mend or remove it, or have such lines skipped.")
                skipped += 1
                first_skipped = first_skipped or message
            elif problem is not None:
                starts.append(offset)
            offset += len(line)
            if advance is not None and number % _LINES_PER_ADVANCE == 0:
                advance(offset - told)
                told = offset
    if advance is not None:
        advance(offset - told)
    if not starts.size:
        reason = f" All {skipped} lines were skipped; the first: {first_skipped}" if skipped else ""
        raise CorpusError(
            f"corpus {path} has no passage. Expected one JSON object a line with id and contents.{reason}"
        )
    return Scan(starts.array(), skipped, first_skipped)


def parse_passage(line: bytes) -> Passage | str:
    """The passage of one line, or what is wrong with the line.

    A passage has `contents`, or `text` with or without a `title`; it has an `id`, and may have a `url`.
    """
    try:
        row: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return f"not JSON ({error})"
    if not isinstance(row, dict) or row.get("id") is None:
        return 'expected {"id": …, "contents": "…"}'
    contents = row.get("contents")
    if not isinstance(contents, str):
        contents = _contents(row)
        if contents is None:
            return 'expected {"id": …, "contents": "…"} or {"id": …, "title": "…", "text": "…"}'
    url = row.get("url")
    return Passage(str(row["id"]), contents, url if isinstance(url, str) else "")


def convert_corpus(source: Path, target: Path, *, advance: Advance | None = None) -> None:
    """Writes Parquet, a `datasets` folder or compressed JSON lines as a file of JSON lines, whole or not at all.

    A row without an `id` gets its number.

    Args:
        advance: is told the rows that have been written.

    Raises:
        CorpusError: the source is missing or cannot be read, or has no column of text.
    """
    partial = target.with_name(target.name + ".partial")
    with partial.open("wb") as file:
        for number, line in enumerate(_lines(source), start=1):
            file.write(line)
            if advance is not None and number % _LINES_PER_ADVANCE == 0:
                advance(_LINES_PER_ADVANCE)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)


def _lines(source: Path) -> Iterator[bytes]:
    if source.suffix == ".gz":
        yield from _decompressed(source)
        return
    rows = _parquet_rows(source) if _is_parquet(source) else _dataset_rows(source)
    for number, row in enumerate(rows):
        if number == 0 and not isinstance(row.get("contents"), str) and _contents(row) is None:
            columns = ", ".join(row)
            raise CorpusError(f"{source} has the columns {columns}; expected contents, or title and text. Rename them.")
        kept = {name: row[name] for name in ("id", "contents", "title", "text", "url") if row.get(name) is not None}
        kept.setdefault("id", number)
        yield orjson.dumps(kept) + b"\n"


def _decompressed(source: Path) -> Iterator[bytes]:
    try:
        with gzip.open(source) as file:
            yield from file
    except (OSError, EOFError) as error:
        raise CorpusError(f"corpus {source} cannot be decompressed ({error}). Fetch it again.") from error


def _is_parquet(source: Path) -> bool:
    return source.suffix == ".parquet" or (source.is_dir() and any(source.glob("*.parquet")))


def _parquet_rows(source: Path) -> Iterator[Mapping[str, Any]]:
    parquet = _imported("pyarrow.parquet")
    files = sorted(source.glob("*.parquet")) if source.is_dir() else [source]
    for path in files:
        try:
            for batch in parquet.ParquetFile(path).iter_batches():
                yield from batch.to_pylist()
        except (OSError, ValueError) as error:
            raise CorpusError(f"corpus {path} cannot be read as Parquet ({error}).") from error


def _dataset_rows(source: Path) -> Iterator[Mapping[str, Any]]:
    datasets = _imported("datasets")
    try:
        loaded = datasets.load_from_disk(str(source))
    except (OSError, ValueError) as error:
        raise CorpusError(
            f"corpus {source} is neither JSON lines nor Parquet, nor was it saved by `datasets` ({error})."
        ) from error
    parts = loaded.values() if hasattr(loaded, "values") else [loaded]  # a DatasetDict has several splits
    for part in parts:
        yield from part


def _imported(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CorpusError(f'reading this corpus needs {module}: pip install "agentic-rollout[search]"') from error


def _contents(row: Mapping[str, Any]) -> str | None:
    """`contents` made of title and text, as Search-R1 lays it out."""
    title, text = row.get("title"), row.get("text")
    if not isinstance(text, str):
        return None
    return f'"{title if isinstance(title, str) else ""}"\n{text}'


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise CorpusError(
            f"corpus {path} cannot be read ({error.strerror}). Give the path of a file of JSON lines that every worker "
            "can see; a relative path starts at the worker's working directory, so prefer an absolute one."
        ) from error


def _excerpt(line: bytes, width: int = 80) -> str:
    text = line.decode(errors="replace").rstrip("\n")
    return repr(text if len(text) <= width else text[:width] + "…")


@dataclass
class _Growing:
    """An int64 array that grows by doubling: a list of 21 million integers takes ten times its room."""

    size: int = 0
    _values: NDArray[np.int64] = field(default_factory=lambda: np.empty(1024, dtype=np.int64))

    def append(self, value: int) -> None:
        if self.size == len(self._values):
            self._values = np.concatenate([self._values, np.empty_like(self._values)])
        self._values[self.size] = value
        self.size += 1

    def array(self) -> NDArray[np.int64]:
        return self._values[: self.size].copy()
