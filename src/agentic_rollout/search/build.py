"""From one setting to a backend: an index in this process, a search server, or an online service."""

from __future__ import annotations

import os
import re
from typing import Any

from pydantic import Field

from agentic_rollout.config import Settings
from agentic_rollout.errors import SettingsError
from agentic_rollout.retrieval.open import open_index
from agentic_rollout.search.backend import LocalBackend, SearchBackend
from agentic_rollout.search.http import HttpSettings, split_url
from agentic_rollout.search.online import GoogleBackend, SerpAPIBackend, SerperBackend
from agentic_rollout.search.remote import RemoteBackend

_API_KEY_ENV = {"serper": "SERPER_API_KEY", "serpapi": "SERPAPI_API_KEY", "google": "GOOGLE_API_KEY"}

ONLINE = tuple(_API_KEY_ENV)
"""The sources that are online services."""


class BackendSettings(Settings):
    """How a source is searched. Secrets are never settings: those name the environment variables that hold them."""

    threads: int = Field(default=1, ge=1, description="of an index in this process")
    device: str = Field(default="cpu", description="where a dense index compares vectors: cpu or cuda")
    ef_search: int | None = Field(default=None, ge=1, description="candidates of an HNSW index; more find more, slower")
    max_batch: int | None = Field(
        default=None, ge=1, description="queries of one request; null: 512 to an index, 64 to a server"
    )
    http: HttpSettings = Field(default_factory=HttpSettings, description="how a server or service is asked")
    token_env: str | None = Field(default=None, description="variable with a search server's token")
    api_key_env: str | None = Field(default=None, description="variable with an online service's key")
    engine_id_env: str = Field(default="GOOGLE_CX", description="variable with the id (cx) of Google's engine")
    engine: str = Field(default="google", min_length=1, description="the search engine behind SerpAPI")
    base_url: str | None = Field(default=None, description="of an online service, in place of its own")


def is_remote(source: str) -> bool:
    """Whether a source is reached over the network."""
    return source in ONLINE or source.startswith(("http://", "https://"))


def build_backend(source: str, settings: BackendSettings, *, key: str) -> SearchBackend:
    """The backend of a source.

    Args:
        source: URL of a search server; `serper`, `serpapi` or `google`; or the path of a corpus or an index.
        key: name of the mapping that the settings came from, for error messages.

    Raises:
        SettingsError: a URL cannot be used, or an environment variable is missing.
        CorpusError: the corpus is missing or malformed.
        SearchIndexError: the index is.
    """
    if source in ONLINE:
        return _build_online(source, settings, key)
    if is_remote(source):
        token = None if settings.token_env is None else read_secret(settings.token_env, f"{key}.token_env")
        return RemoteBackend(
            source, settings.http, token=token, max_batch=settings.max_batch or 64, key=f"{key}.source"
        )
    index = open_index(source, ef_search=settings.ef_search, device=settings.device)
    return LocalBackend(index, threads=settings.threads, max_batch=settings.max_batch or 512)


def _build_online(source: str, settings: BackendSettings, key: str) -> SearchBackend:
    api_key = read_secret(settings.api_key_env or _API_KEY_ENV[source], f"{key}.api_key_env")
    options: dict[str, Any] = {}
    if settings.base_url is not None:
        options["base_url"] = split_url(settings.base_url, f"{key}.base_url").geturl()
    match source:
        case "serper":
            return SerperBackend(settings.http, api_key=api_key, **options)
        case "serpapi":
            return SerpAPIBackend(settings.http, api_key=api_key, engine=settings.engine, **options)
        case _:
            engine_id = read_secret(settings.engine_id_env, f"{key}.engine_id_env")
            return GoogleBackend(settings.http, api_key=api_key, engine_id=engine_id, **options)


def read_secret(variable: str, key: str) -> str:
    """The content of an environment variable.

    Raises:
        SettingsError: it is empty or missing, or its name looks like the secret itself, which is then not repeated.
    """
    expected = "the name of an environment variable"
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", variable):
        raise SettingsError(key, "…", f"{expected}, in capitals", "Export the secret, and give the variable's name.")
    secret = os.environ.get(variable, "").strip()
    if not secret:
        raise SettingsError(key, variable, f"{expected} that is set", f"Export {variable} in every worker.")
    if not secret.isascii() or not secret.isprintable():
        raise SettingsError(key, variable, "a variable that holds printable ASCII", f"Check what {variable} holds.")
    return secret
