"""From paths and names to what a server serves."""

from __future__ import annotations

from collections.abc import Sequence

from agentic_rollout.errors import SettingsError
from agentic_rollout.retrieval.corpus import open_corpus
from agentic_rollout.retrieval.fusion import FusedIndex
from agentic_rollout.retrieval.open import open_index
from agentic_rollout.search.backend import LocalBackend, SearchBackend
from agentic_rollout.search.build import BackendSettings, build_backend, is_remote
from agentic_rollout.search.pages import CorpusPages, FirstOf, PageStore
from agentic_rollout.search.web import WebPages, WebSettings

WEB = "web"


def open_backend(sources: Sequence[str], settings: BackendSettings, *, key: str = "serve-search") -> SearchBackend:
    """The backend of one source, or of several indexes of the same passages, fused by reciprocal rank.

    The first search of an index compiles code and touches its files, so it is made here, before a client waits for it.

    Raises:
        SettingsError: a source cannot be used, or an online one is to be fused.
        CorpusError: a corpus is missing or malformed.
        SearchIndexError: an index is.
    """
    if len(sources) == 1:
        backend = build_backend(sources[0], settings, key=key)
    elif any(map(is_remote, sources)):
        raise SettingsError(key, " ".join(sources), "one source, or several folders", "Serve an online source alone.")
    else:
        index = FusedIndex([open_index(source) for source in sources])
        backend = LocalBackend(index, threads=settings.threads, max_batch=settings.max_batch or 512)
    if isinstance(backend, LocalBackend):
        backend.index.search(["warm-up"], 1)
    return backend


def open_pages(sources: Sequence[str], web: WebSettings) -> PageStore | None:
    """The pages of corpora and, where `web` is among the sources, of the web; the first that has a page gives it.

    Raises:
        SettingsError: `web` without trafilatura.
        CorpusError: a corpus is missing or malformed, or has no addresses.
    """
    stores = [WebPages(web) if source == WEB else CorpusPages(open_corpus(source)) for source in sources]
    return FirstOf(stores) if stores else None
