"""A service as an aiohttp application."""

from __future__ import annotations

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from agentic_rollout.server.replies import RefusedError, bad_body
from agentic_rollout.server.routing import RoutedService

SERVICE: web.AppKey[RoutedService] = web.AppKey("service", RoutedService)


def build_app(service: RoutedService) -> web.Application:
    """The application, which starts the service with itself, and closes it.

    To be called on the event loop that serves it, or before there is one.
    """
    app = web.Application(client_max_size=service.settings.max_body_bytes)
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

    async def start(app: web.Application) -> None:
        await service.start()

    async def close(app: web.Application) -> None:
        await service.aclose()

    app.router.add_route("*", "/{path:.*}", handle)
    app.on_startup.append(start)
    app.on_cleanup.append(close)
    return app


async def _read(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise RefusedError(413, "too_large", f"a body may have at most {request.client_max_size} bytes") from error
    except (ClientPayloadError, ConnectionError, HttpProcessingError, web.RequestPayloadError):
        raise bad_body("the body cannot be read: it ends too early, or its encoding is damaged") from None
