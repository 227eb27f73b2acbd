"""Whole pages by their address: from a corpus, from a server, from whichever of several has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from agentic_rollout.errors import CorpusError, ToolError
from agentic_rollout.retrieval.corpus import Passage
from agentic_rollout.search.http import HttpClient
from agentic_rollout.types import ToolStatus


@dataclass(frozen=True, slots=True)
class Page:
    """A page as text."""

    url: str
    title: str
    text: str


class PageStore(Protocol):
    """Opens pages."""

    async def fetch(self, url: str) -> Page:
        """The page at an address.

        Raises:
            ToolError: there is no such page, or it could not be had; the status says which.
        """
        ...

    async def aclose(self) -> None:
        """Releases connections and threads."""
        ...


class NoSuchPageError(ToolError):
    """A store of fixed pages has none at this address: the model's mistake, no failure of the store."""

    def __init__(self) -> None:
        super().__init__("there is no page at this address", ToolStatus.BAD_ARGUMENTS)


class CorpusPages:
    """The pages of a corpus: its passages that share a `url`, joined in their order.

    Addresses are looked up by a sorted array of 64-bit hashes, 16 bytes a passage, and compared in full where hashes
    agree. Reading all addresses takes one pass over the corpus. A fragment (`#section`) is ignored if the address is
    not found with it.

    Raises:
        CorpusError: no passage has a `url`.
    """

    def __init__(self, corpus: Sequence[Passage]) -> None:
        self._corpus = corpus
        hashes = np.fromiter((hash(passage.url) for passage in corpus), np.int64, len(corpus))
        rows = np.flatnonzero(hashes != hash(""))
        if not len(rows):
            raise CorpusError("none of the passages has a `url`, so there is no page to open. Add one to the corpus.")
        self._rows = rows[np.argsort(hashes[rows], kind="stable")]  # (passages with a url,)
        self._hashes = hashes[self._rows]

    async def fetch(self, url: str) -> Page:
        url = url.strip()
        passages = self._passages(url) or self._passages(url.partition("#")[0])
        if not passages:
            raise NoSuchPageError
        return Page(passages[0].url, passages[0].title, "\n".join(passage.text for passage in passages))

    async def aclose(self) -> None:
        return None

    def _passages(self, url: str) -> list[Passage]:
        if not url:
            return []
        first = np.searchsorted(self._hashes, hash(url), side="left")
        last = np.searchsorted(self._hashes, hash(url), side="right")
        alike = (self._corpus[int(row)] for row in self._rows[first:last])
        return [passage for passage in alike if passage.url == url]


class FirstOf:
    """Asks stores in turn until one has the page: local pages before the web."""

    def __init__(self, stores: Sequence[PageStore]) -> None:
        self._stores = stores

    async def fetch(self, url: str) -> Page:
        for store in self._stores:
            try:
                return await store.fetch(url)
            except NoSuchPageError:
                continue
        raise NoSuchPageError

    async def aclose(self) -> None:
        for store in self._stores:
            await store.aclose()


class RemotePages:
    """The pages of a server that answers `POST /access`: this package's, or ASearcher's."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def fetch(self, url: str) -> Page:
        outcome = await self._client.request_json("POST", "/access", json={"urls": [url]}, parse=_parse_only_page)
        if isinstance(outcome, ToolError):  # the server's answer, not a failure of the server: asked once
            raise outcome
        return outcome

    async def aclose(self) -> None:
        await self._client.aclose()


def page_json(page: Page) -> dict[str, str]:
    """A page with every field that some client reads; `contents` is laid out as a passage's is."""
    contents = f'"{page.title}"\n{page.text}'
    return {"url": page.url, "title": page.title, "text": page.text, "contents": contents}


def _parse_only_page(reply: Any) -> Page | ToolError:
    """The page of a reply to one address, or why there is none.

    `errors` stands beside `result` in the replies of this package's server; others only say null.

    Raises:
        ToolError: `bad_reply`.
    """
    pages = reply.get("result") if isinstance(reply, Mapping) else None
    if not isinstance(pages, list) or len(pages) != 1:
        raise ToolError("the reply to one address does not hold one result", ToolStatus.BAD_REPLY)
    if pages[0] is None:
        return _failure(reply.get("errors"))
    if not isinstance(pages[0], Mapping):
        raise ToolError("a page is no object", ToolStatus.BAD_REPLY)
    page = pages[0]
    title, text = page.get("title") or "", page.get("text")
    if not isinstance(text, str):
        text = page.get("contents")
    if not isinstance(text, str):
        raise ToolError("a page has neither `text` nor `contents`", ToolStatus.BAD_REPLY)
    return Page(str(page.get("url") or ""), str(title), text)


def _failure(errors: Any) -> ToolError:
    error = errors[0] if isinstance(errors, list) and len(errors) == 1 else None
    if not isinstance(error, Mapping) or error.get("error") not in set(ToolStatus):
        return NoSuchPageError()
    return ToolError(str(error.get("detail") or "the page could not be opened"), error["error"])
