"""The search server as an aiohttp application."""

from __future__ import annotations

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from agentic_rollout.retrieval.rerank import Reranker
from agentic_rollout.search.backend import SearchBackend
from agentic_rollout.search.pages import PageStore
from agentic_rollout.server.replies import RefusedError, bad_body
from agentic_rollout.server.service import SearchService
from agentic_rollout.server.settings import ServerSettings

SERVICE: web.AppKey[SearchService] = web.AppKey("service", SearchService)


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
    service = SearchService(backend, settings, reranker=reranker, pages=pages)
    app = web.Application(client_max_size=settings.max_body_bytes)
    app[SERVICE] = service

    async def handle(request: web.Request) -> web.Response:
        reply = await service.answer(
            request.method, request.path, request.headers.get("Authorization"), lambda: _read(request)
        )
        response = web.Response(
            body=reply.body, status=reply.status, headers={"Content-Type": reply.content_type, **reply.headers}
        )
        if service.draining:
            response.force_close()
        return response

    async def close(app: web.Application) -> None:
        await service.aclose()

    app.router.add_route("*", "/{path:.*}", handle)
    app.on_cleanup.append(close)
    return app


async def _read(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise RefusedError(413, "too_large", f"a body may have at most {request.client_max_size} bytes") from error
    except (ClientPayloadError, ConnectionError, HttpProcessingError, web.RequestPayloadError):
        raise bad_body("the body cannot be read: it ends too early, or its encoding is damaged") from None
