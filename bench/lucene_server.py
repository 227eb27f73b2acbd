"""The usual arrangement, to compare with: FastAPI over Lucene, one query after another. Needs pyserini and FastAPI.

python bench/lucene_server.py INDEX PORT
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from pyserini.search.lucene import LuceneSearcher

app = FastAPI()
searcher = LuceneSearcher(sys.argv[1])
one_at_a_time = threading.Lock()  # FastAPI calls from a pool of threads, in which pyserini's bridge to Java crashes


class Query(BaseModel):
    """Body of `/retrieve`."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


@app.post("/retrieve")
def retrieve(query: Query) -> dict[str, Any]:
    """Searches for each query in turn."""
    with one_at_a_time:
        return {"result": [search(text, query.topk or 3) for text in query.queries]}


def search(text: str, topk: int) -> list[dict[str, Any]]:
    """One query's documents with their scores."""
    hits = searcher.search(text, topk)
    return [{"document": json.loads(searcher.doc(hit.docid).raw()), "score": hit.score} for hit in hits]


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
