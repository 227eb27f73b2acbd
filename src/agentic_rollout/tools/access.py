"""The tool that opens a page: of a local corpus, of a server, or of the web."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from cachetools import TTLCache
from pydantic import Field, StrictInt

from agentic_rollout.config import Settings
from agentic_rollout.errors import ToolError
from agentic_rollout.retrieval.corpus import open_corpus
from agentic_rollout.search.build import read_secret
from agentic_rollout.search.http import HttpClient, HttpSettings, split_url
from agentic_rollout.search.pages import CorpusPages, Page, PageStore, RemotePages
from agentic_rollout.search.web import WebPages, WebSettings
from agentic_rollout.tools.base import BaseTool, ToolContext
from agentic_rollout.tools.schemas import signature_schema


class AccessSettings(Settings):
    """Settings of a tool of type `access`."""

    type: Literal["access"] = "access"
    source: str = Field(description="`web`, the http:// address of a server with /access, or the path of a corpus")
    max_chars: int = Field(default=8000, ge=1, description="characters of a page shown by one call")
    timeout_s: float = Field(default=30.0, gt=0, description="one call; keep it above the limits of `web` and `http`")
    cache_chars: int = Field(default=64_000_000, ge=0, description="characters of fetched pages kept in memory")
    cache_ttl_s: float = Field(default=600.0, gt=0, description="how long a page is kept")
    token_env: str | None = Field(default=None, description="environment variable that holds the server's token")
    web: WebSettings = Field(default=WebSettings(), description="limits of the source `web`")
    http: HttpSettings = Field(default=HttpSettings(), description="how a server is asked")


def _access(
    url: Annotated[str, Field(description="address of the page")],
    page: Annotated[StrictInt | str | None, Field(description="which part of a long page, counted from 1")] = None,
) -> None:
    """Opens a page and shows its text, long ones in parts."""


class AccessTool(BaseTool):
    """Shows a page, in parts of `max_chars` characters: arguments `url` and, from the second part on, `page`."""

    schema = signature_schema(_access)

    def __init__(self, pages: PageStore, settings: AccessSettings) -> None:
        self.timeout_s = settings.timeout_s
        self._pages = pages
        self._max_chars = settings.max_chars
        self._cache: TTLCache[str, Page] = TTLCache(
            settings.cache_chars, settings.cache_ttl_s, getsizeof=lambda page: len(page.text)
        )

    @classmethod
    def from_settings(cls, settings: AccessSettings, *, key: str) -> AccessTool:
        """Opens the source.

        Args:
            settings: validated.
            key: the settings' own name, for error messages.

        Raises:
            SettingsError: the source cannot be used as it is set.
            CorpusError: it is a corpus that is missing or malformed, or has no addresses.
        """
        return cls(_open_source(settings, key), settings)

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        url = arguments.get("url")
        if not isinstance(url, str) or not url.strip():
            raise ToolError("access needs a text `url`", "bad_arguments")
        number = _part_number(arguments.get("page"))
        return render_page(await self._fetch(url.strip()), number=number, max_chars=self._max_chars)

    async def aclose(self) -> None:
        await self._pages.aclose()

    async def _fetch(self, url: str) -> Page:
        page = self._cache.get(url)
        if page is None:
            page = await self._pages.fetch(url)
            if len(page.text) <= self._cache.maxsize:
                self._cache[url] = page
        return page


def render_page(page: Page, *, number: int, max_chars: int) -> str:
    """One part of a page, under its title; where there are several, which one it is.

    Raises:
        ToolError: `bad_arguments`, if the page has no such part.
    """
    parts = max(1, -(-len(page.text) // max_chars))
    if number > parts:
        raise ToolError(f"this page has {parts} part{'s' * (parts > 1)}; there is no part {number}", "bad_arguments")
    text = page.text[(number - 1) * max_chars : number * max_chars]
    title = f"Title: {page.title}\n" if page.title else ""
    footer = f"\n(part {number} of {parts})" if parts > 1 else ""
    return f"{title}{text}{footer}"


def _part_number(value: object) -> int:
    """Counted from 1; formats that know only text give it as text."""
    if value is None or value == "":
        return 1
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 10:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ToolError("`page` must be a whole number from 1 on", "bad_arguments")
    return value


def _open_source(settings: AccessSettings, key: str) -> PageStore:
    if settings.source == "web":
        return WebPages(settings.web)
    if settings.source.startswith(("http://", "https://")):
        url = split_url(settings.source, f"{key}.source").geturl()
        return RemotePages(HttpClient("the page server", url, settings.http, headers=_headers(settings, key)))
    return CorpusPages(open_corpus(settings.source))


def _headers(settings: AccessSettings, key: str) -> dict[str, str]:
    if settings.token_env is None:
        return {}
    return {"Authorization": f"Bearer {read_secret(settings.token_env, f'{key}.token_env')}"}
