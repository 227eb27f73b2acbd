"""The search server on Ray Serve: a corpus in shards, each with replicas, behind one route.

Every shard is a deployment of its own; the ingress asks all of them and merges their hits by score. Requests, replies
and limits are those of `server.service`. Scores merge fairly where the shards' statistics are alike (BM25) or play no
part (dense), so distribute passages at random, not by topic.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationInfo, field_validator

from agentic_rollout.config import Settings, build_settings
from agentic_rollout.errors import SettingsError, ToolError
from agentic_rollout.retrieval.index import Hit
from agentic_rollout.retrieval.rerank import build_reranker
from agentic_rollout.search.build import BackendSettings, is_remote
from agentic_rollout.search.web import WebSettings
from agentic_rollout.server.batches import JoinedSearches
from agentic_rollout.server.build import open_backend, open_pages
from agentic_rollout.server.service import SearchService
from agentic_rollout.server.settings import ServerSettings

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_APPLICATION = "agentic-search"
_SEARCHES_PER_REPLICA = 32  # in flight, before another replica is started


class RaySettings(Settings):
    """How much of a cluster is used."""

    replicas: int = Field(
        default=1, ge=1, description="of each shard, and of the ingress; the least, with max_replicas"
    )
    max_replicas: int | None = Field(default=None, ge=1, description="the most, started and stopped by load")
    cpus: float = Field(default=1.0, ge=0, description="that Ray sets aside for one replica")
    threads: int = Field(default=1, ge=1, description="that search in one replica")
    rerank: str | None = Field(default=None, description="folder of a cross-encoder on every node, or `lexical`")
    pages: tuple[str, ...] = Field(default=(), description="corpora on every node, or `web`")

    @field_validator("max_replicas")
    @classmethod
    def _no_fewer_than_replicas(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < info.data.get("replicas", 1):
            raise ValueError(f"at least replicas, which is {info.data['replicas']}")
        return value


class ShardReplica:
    """One replica of one shard: an index in a process of its own. Searches that arrive together are one."""

    def __init__(self, source: str, threads: int) -> None:
        self._searches = JoinedSearches(open_backend([source], BackendSettings(threads=threads)))

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return await self._searches.search(queries, topk)


class ShardedBackend:
    """Asks every shard, and keeps the best of what they find.

    Args:
        shards: handles of deployments of `ShardReplica`.
    """

    name = "shards"
    max_batch = 1  # each shard joins searches itself, and several of its replicas may be at work

    def __init__(self, shards: Sequence[Any]) -> None:
        self._shards = shards

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """As every backend; a shard that fails fails the search, as hits could be missing."""
        found = await asyncio.gather(*(self._ask(shard, queries, topk) for shard in self._shards))
        return [merge([hits[place] for hits in found], topk) for place in range(len(queries))]

    async def aclose(self) -> None:
        return None

    async def _ask(self, shard: Any, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import RayServeException

        try:
            hits: list[list[Hit]] = await shard.search.remote(list(queries), topk)
        except ToolError:
            raise
        except RayTaskError as error:
            raise ToolError(f"a shard failed ({type(error.cause).__name__})") from error
        except (RayError, RayServeException) as error:
            raise ToolError(f"a shard is gone ({type(error).__name__})", "unavailable") from error
        return hits


def merge(results: Sequence[Sequence[Hit]], topk: int) -> list[Hit]:
    """The best of several lists, each best first. Equal scores: the earlier list first."""
    merged = heapq.merge(*results, key=lambda hit: -hit.score)
    return [hit for hit, _ in zip(merged, range(topk), strict=False)]


class Ingress:
    """One replica of what clients talk to."""

    def __init__(self, shards: Sequence[Any], settings: ServerSettings, ray_settings: RaySettings) -> None:
        reranker = None if ray_settings.rerank is None else build_reranker(ray_settings.rerank)
        pages = open_pages(ray_settings.pages, WebSettings())
        self._service = SearchService(ShardedBackend(shards), settings, reranker=reranker, pages=pages)

    async def __call__(self, request: Request) -> Response:
        from starlette.responses import Response

        reply = await self._service.answer(
            request.method, request.url.path, request.headers.get("authorization"), request.body
        )
        headers = {"Content-Type": reply.content_type, **reply.headers}
        return Response(reply.body, reply.status, headers=headers)


def build_application(sources: Sequence[str], settings: ServerSettings, ray_settings: RaySettings) -> Any:
    """The Ray Serve application of a corpus in shards: what `serve.run` takes.

    Args:
        sources: index folder or corpus of each shard, at the same path on every node.
        settings: of each replica of the ingress. A token's variable must be set on every node.

    Raises:
        SettingsError: a source is an online one, or Ray Serve is not installed.
    """
    try:
        from ray import serve
    except ImportError:
        remedy = 'Run `pip install "ray[serve]"`.'
        raise SettingsError("serve-search --ray", None, "Ray Serve to be installed", remedy) from None
    for source in sources:
        if is_remote(source):
            raise SettingsError("serve-search", source, "folders", "Serve an online source without --ray.")
    scale = _scale(ray_settings)
    shards = [
        serve.deployment(ShardReplica, name=f"shard-{number}", max_ongoing_requests=256, **scale).bind(
            source, ray_settings.threads
        )
        for number, source in enumerate(sources)
    ]
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        max_ongoing_requests=settings.max_queue,
        graceful_shutdown_timeout_s=settings.drain_s,
        **scale,
    )
    return ingress.bind(shards, settings, ray_settings)


def _scale(settings: RaySettings) -> dict[str, Any]:
    resources = {"ray_actor_options": {"num_cpus": settings.cpus}}
    if settings.max_replicas is None:
        return {"num_replicas": settings.replicas, **resources}
    scaling = {
        "min_replicas": settings.replicas,
        "max_replicas": settings.max_replicas,
        "target_ongoing_requests": _SEARCHES_PER_REPLICA,
    }
    return {"autoscaling_config": scaling, **resources}


def serve_on_ray(
    sources: Sequence[str], settings: ServerSettings, options: argparse.Namespace, *, announce: Callable[[str], None]
) -> None:
    """Deploys, and removes the deployment at SIGTERM or SIGINT.

    Joins the cluster that `RAY_ADDRESS` names, or starts Ray on this machine. The port is that of Ray's HTTP proxy,
    which a cluster has only one of.

    Args:
        options: `host`, `port`, `replicas`, `max_replicas`, `threads`, `rerank` and `pages` are read.
        announce: is told the address, once requests are answered.

    Raises:
        SettingsError: an option does not go with Ray, or Ray not with the protobuf that is installed.
    """
    values = {name: getattr(options, name) for name in ("replicas", "max_replicas", "cpus", "threads", "rerank")}
    ray_settings = build_settings(RaySettings, {**values, "pages": tuple(options.pages)}, key="serve-search")
    if options.port == 0:
        raise SettingsError("--port", 0, "a port", "Ray's proxy takes a fixed port: choose one.")
    application = build_application(sources, settings, ray_settings)
    import ray
    from ray import serve

    ray.init(ignore_reinit_error=True, log_to_driver=False)
    serve.start(http_options={"host": options.host, "port": options.port})
    try:
        _deploy(application)
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):  # only now: Ray has set handlers of its own
            signal.signal(number, lambda *_: stop.set())
        announce(f"http://{options.host}:{options.port}")
        stop.wait()
    finally:
        serve.delete(_APPLICATION)
        ray.shutdown()


def _deploy(application: Any) -> None:
    from ray import serve

    try:
        serve.run(application, name=_APPLICATION, route_prefix="/")
    except AttributeError as error:
        if "'label'" not in str(error):
            raise
        remedy = 'Run `pip install "protobuf<7"`.'
        raise SettingsError("serve-search --ray", None, "a protobuf that this Ray knows", remedy) from None
