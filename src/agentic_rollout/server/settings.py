"""Settings of the servers."""

from __future__ import annotations

import os

from pydantic import Field, ValidationInfo, field_validator

from agentic_rollout.config import Settings
from agentic_rollout.errors import SettingsError
from agentic_rollout.search.cache import CacheSettings


class ServiceSettings(Settings):
    """What any server accepts. Times are in seconds."""

    max_queue: int = Field(
        default=8192, ge=1, description="queries, or programs, accepted and not yet answered; 503 beyond"
    )
    max_body_bytes: int = Field(default=16 << 20, ge=1, description="body of a request, decompressed")
    retry_after_s: int = Field(default=1, ge=0, description="what `Retry-After` says in a 503")
    deadline_s: float = Field(default=60.0, gt=0, description="one request; 504 beyond")
    drain_s: float = Field(default=60.0, ge=0, description="how long a stop waits for what was accepted")
    token_env: str | None = Field(default=None, description="environment variable that holds the bearer token")

    def read_token(self) -> bytes | None:
        """The token that requests must bear; None if none is asked for.

        Raises:
            SettingsError: the variable is unset or empty.
        """
        if self.token_env is None:
            return None
        token = os.environ.get(self.token_env, "").strip()
        if not token:
            expected = "the name of an environment variable that holds the token"
            raise SettingsError("token_env", self.token_env, expected, "Set the variable, or leave the setting out.")
        return token.encode()


class ServerSettings(ServiceSettings):
    """What the search server accepts, and how much of it at a time. Times are in seconds."""

    max_topk: int = Field(default=100, ge=1, description="a request for more is refused, not cut short unseen")
    topk: int = Field(
        default=3, ge=1, validate_default=True, description="hits per query where a request gives null, 0 or nothing"
    )
    rerank_candidates: int = Field(
        default=10, ge=1, validate_default=True, description="hits found for the reranker to choose from"
    )
    max_queries: int = Field(default=4096, ge=1, validate_default=True, description="queries of one request")
    max_query_chars: int = Field(default=32_768, ge=1, description="characters of one query")
    max_documents: int = Field(default=4096, ge=1, description="documents of one request to /rerank")
    max_urls: int = Field(default=64, ge=1, description="addresses of one request to /access")
    batch_window_s: float = Field(default=0.0, ge=0, description="how long the first query of a batch waits for others")
    cache: CacheSettings = Field(default=CacheSettings(), description="answers kept")

    @field_validator("topk", "rerank_candidates")
    @classmethod
    def _within_max_topk(cls, value: int, info: ValidationInfo) -> int:
        return _at_most(value, info, "max_topk")

    @field_validator("max_queries")
    @classmethod
    def _within_max_queue(cls, value: int, info: ValidationInfo) -> int:
        return _at_most(value, info, "max_queue")  # or a full request could never be accepted


def _at_most(value: int, info: ValidationInfo, limit: str) -> int:
    if limit in info.data and value > info.data[limit]:
        raise ValueError(f"at most {limit}, which is {info.data[limit]}")
    return value
