"""Reading a corpus of passages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from agentic_rollout.errors import CorpusError


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


def load_corpus(path: str | Path) -> list[Passage]:
    """Reads JSON lines with `id` and `contents`.

    Raises:
        CorpusError: the file is missing or empty, or a line is not a passage; the line is named by its number.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CorpusError(
            f"corpus {path} cannot be read ({error.strerror}). Give the path of a file of JSON lines that every worker "
            "can see; a relative path starts at the worker's working directory, so prefer an absolute one."
        ) from error
    passages = [_passage(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not passages:
        raise CorpusError(f"corpus {path} has no passage. Expected one JSON object a line with id and contents.")
    return passages


def _passage(line: bytes, path: Path, number: int) -> Passage:
    try:
        row: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise CorpusError(f"{path}, line {number}: not JSON ({error}): {_excerpt(line)}. Mend or remove it.") from None
    if not isinstance(row, dict) or not isinstance(row.get("contents"), str) or "id" not in row:
        raise CorpusError(
            f'{path}, line {number}: expected {{"id": …, "contents": "…"}}, got {_excerpt(line)}. Mend or remove it.'
        )
    return Passage(str(row["id"]), row["contents"])


def _excerpt(line: bytes, width: int = 80) -> str:
    text = line.decode(errors="replace")
    return repr(text if len(text) <= width else text[:width] + "…")
