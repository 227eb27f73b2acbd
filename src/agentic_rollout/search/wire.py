"""The JSON of `POST /retrieve`, as Search-R1's, ASearcher's and AReaL's clients and servers write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentic_rollout.errors import ToolError
from agentic_rollout.retrieval.corpus import Passage
from agentic_rollout.retrieval.index import Hit

Json = dict[str, Any]


def passage_json(passage: Passage) -> Json:
    """A document with every field that some client reads.

    Search-R1 reads `contents`; ASearcher `wikipedia_title`, `contents` and `url`; others `title` and `text`.
    """
    return {
        "id": passage.id,
        "contents": passage.contents,
        "title": passage.title,
        "text": passage.text,
        "url": passage.url,
        "wikipedia_title": passage.title,
    }


def hits_json(hits: Sequence[Hit], *, return_scores: bool) -> list[Json]:
    """One query's entry of `result`."""
    if return_scores:
        return [{"document": passage_json(hit.passage), "score": hit.score} for hit in hits]
    return [passage_json(hit.passage) for hit in hits]


def parse_passage(document: object) -> Passage:
    """A document of any of the servers named above.

    Raises:
        ToolError: `bad_reply`, if it has neither `contents` nor `text`.
    """
    if not isinstance(document, Mapping):
        raise ToolError(f"a document is no object but {type(document).__name__}", "bad_reply")
    title = document.get("title") or document.get("wikipedia_title") or ""
    contents = document.get("contents")
    if not isinstance(contents, str):
        text = document.get("text")
        if not isinstance(text, str):
            raise ToolError("a document has neither `contents` nor `text`", "bad_reply")
        contents = f'"{title}"\n{text}'
    url = document.get("url") or ""
    return Passage(str(document.get("id", url)), contents, str(url))


def parse_hits(entry: object) -> list[Hit]:
    """One query's entry of `result`, with scores or without them (their score is then 0.0).

    Raises:
        ToolError: `bad_reply`, if it is not a list of documents.
    """
    if not isinstance(entry, list):
        raise ToolError(f"a result is no list but {type(entry).__name__}", "bad_reply")
    hits = []
    for item in entry:
        scored = isinstance(item, Mapping) and "document" in item
        score = item.get("score", 0.0) if scored else 0.0
        if not isinstance(score, int | float):
            raise ToolError("a score is no number", "bad_reply")
        hits.append(Hit(parse_passage(item["document"] if scored else item), float(score)))
    return hits
