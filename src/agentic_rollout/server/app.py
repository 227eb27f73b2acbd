"""The search server as an aiohttp application."""

from __future__ import annotations

from aiohttp import web

from agentic_rollout.retrieval.rerank import Reranker
from agentic_rollout.search.backend import SearchBackend
from agentic_rollout.search.pages import PageStore
from agentic_rollout.server.aiohttp_app import build_app
from agentic_rollout.server.service import SearchService
from agentic_rollout.server.settings import ServerSettings


def create_app(
    backend: SearchBackend,
    settings: ServerSettings,
    *,
    reranker: Reranker | None = None,
    pages: PageStore | None = None,
) -> web.Application:
    """The application: `/retrieve`, `/rerank`, `/access`, `/health`, `/metrics`.

    It closes `backend` and `pages` when it is cleaned up. To be called on the event loop that serves it, or before
    there is one.

    Raises:
        SettingsError: see `SearchService`.
    """
    return build_app(SearchService(backend, settings, reranker=reranker, pages=pages))
