"""Pages of the web, fetched within limits and turned into text."""

from __future__ import annotations

import asyncio
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import aiohttp
from aiohttp.abc import AbstractResolver
from pydantic import Field
from yarl import URL

from agentic_rollout.errors import SettingsError, ToolError
from agentic_rollout.search.addresses import AddressSettings, PublicResolver, parse_url
from agentic_rollout.search.pages import Page
from agentic_rollout.types import ToolStatus

_HTML = ("text/html", "application/xhtml+xml")
_PLAIN = ("text/plain", "text/markdown", "application/json")
_REDIRECTS = (301, 302, 303, 307, 308)
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset=[\"']?([\w.:-]{1,40})", re.IGNORECASE)
_CHUNK_BYTES = 1 << 16


class WebSettings(AddressSettings):
    """Limits of fetching one page."""

    timeout_s: float = Field(default=20.0, gt=0, description="one page: redirects, download and parsing")
    max_bytes: int = Field(default=4 << 20, ge=1, description="largest page, both as sent and decompressed")
    max_redirects: int = Field(default=5, ge=0)
    max_concurrency: int = Field(default=32, ge=1, description="pages fetched at a time")
    parser_threads: int = Field(default=2, ge=1, description="pages turned into text at a time")
    user_agent: str = "Mozilla/5.0 (compatible; agentic-rollout)"


@dataclass(frozen=True, slots=True)
class _Download:
    url: URL
    content_type: str
    charset: str | None
    body: bytes


@dataclass(frozen=True, slots=True)
class _Connections:
    """What belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    session: aiohttp.ClientSession
    slots: asyncio.Semaphore


class WebPages:
    """Fetches pages and keeps the article's text.

    Every hop of a redirect is checked as the first address is. No cookies are kept, no proxy of the environment is
    used (behind one, the addresses connected to could not be checked), and compressed pages are decompressed here,
    so that the limit of size holds for what comes out as well.

    Args:
        settings: limits.
        resolver: resolves names instead of the operating system.

    Raises:
        SettingsError: trafilatura is not installed.
    """

    def __init__(self, settings: WebSettings | None = None, *, resolver: AbstractResolver | None = None) -> None:
        try:
            import trafilatura  # noqa: F401
        except ImportError:
            remedy = 'Run `pip install "agentic-rollout[search]"`.'
            raise SettingsError("source", "web", "trafilatura to be installed", remedy) from None
        self.settings = settings or WebSettings()
        self._resolver = resolver
        self._connections: _Connections | None = None
        self._parsers = ThreadPoolExecutor(self.settings.parser_threads, thread_name_prefix="page")

    async def fetch(self, url: str) -> Page:
        first = parse_url(url, self.settings)
        try:
            connections = self._connected()
            async with asyncio.timeout(self.settings.timeout_s), connections.slots:
                download = await self._follow(connections.session, first)
                return await asyncio.get_running_loop().run_in_executor(self._parsers, _read, download)
        except ToolError:
            raise
        except Exception as error:  # what aiohttp raises has many bases
            raise _failure_of(error, self.settings) from None

    async def aclose(self) -> None:
        connections, self._connections = self._connections, None
        if connections is not None and connections.loop is asyncio.get_running_loop():
            await connections.session.close()
        self._parsers.shutdown(wait=False, cancel_futures=True)

    async def _follow(self, session: aiohttp.ClientSession, url: URL) -> _Download:
        for _ in range(self.settings.max_redirects + 1):
            outcome = await self._get(session, url)
            if isinstance(outcome, _Download):
                return outcome
            url = outcome
        raise ToolError(f"the page redirects more than {self.settings.max_redirects} times", ToolStatus.BAD_REPLY)

    async def _get(self, session: aiohttp.ClientSession, url: URL) -> _Download | URL:
        """The page, or where it has moved."""
        async with session.get(url, allow_redirects=False) as response:
            location = response.headers.get("Location")
            if response.status in _REDIRECTS and location:
                return parse_url(str(url.join(URL(location))), self.settings)
            _check_status(response.status)
            if response.content_type not in (*_HTML, *_PLAIN):
                raise ToolError(f"the page is no text but {response.content_type[:60]}", ToolStatus.BAD_REPLY)
            body = await self._body(response)
            return _Download(url, response.content_type, response.charset, body)

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        limit = self.settings.max_bytes
        body = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            body += chunk
            if len(body) > limit:
                raise _too_large(limit)
        return _decompress(bytes(body), response.headers.get("Content-Encoding", "identity").strip().lower(), limit)

    def _connected(self) -> _Connections:
        """What belongs to the running event loop; what belonged to one that has ended is dropped."""
        loop = asyncio.get_running_loop()
        if self._connections is not None and self._connections.loop is not loop:
            self._connections.session.detach()
            self._connections = None
        if self._connections is None:
            slots = asyncio.Semaphore(self.settings.max_concurrency)
            self._connections = _Connections(loop, self._session(), slots)
        return self._connections

    def _session(self) -> aiohttp.ClientSession:
        resolver = self._resolver
        if not self.settings.allow_private_addresses:
            resolver = PublicResolver(resolver)
        return aiohttp.ClientSession(
            # Connections are not kept: the next page is mostly another host's.
            connector=aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"User-Agent": self.settings.user_agent, "Accept-Encoding": "gzip, deflate"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )


def _check_status(code: int) -> None:
    if 200 <= code < 300:
        return
    status = ToolStatus.BAD_REPLY if code < 400 else ToolStatus.HTTP_4XX if code < 500 else ToolStatus.HTTP_5XX
    raise ToolError(f"the page answered HTTP {code}", ToolStatus.RATE_LIMITED if code == 429 else status)


def _too_large(limit: int) -> ToolError:
    return ToolError(f"the page is larger than {limit} bytes", ToolStatus.BAD_REPLY)


def _failure_of(error: Exception, settings: WebSettings) -> ToolError:
    match error:
        case TimeoutError():
            return ToolError(f"the page did not come within {settings.timeout_s:g} s", ToolStatus.TIMEOUT)
        case aiohttp.InvalidURL() | UnicodeError():  # also a host whose name cannot be encoded
            return ToolError("this is no valid web address", ToolStatus.BAD_ARGUMENTS)
        case aiohttp.ClientConnectorError() | aiohttp.ClientSSLError():
            return ToolError("the page's host could not be connected to", ToolStatus.REFUSED)
        case aiohttp.ClientResponseError():
            return ToolError("the page's host sent no HTTP reply", ToolStatus.BAD_REPLY)
        case aiohttp.ClientError() | OSError():
            return ToolError("the connection broke before the whole page was there", ToolStatus.DISCONNECTED)
        case _:
            return ToolError(f"the page could not be read ({type(error).__name__})", ToolStatus.BAD_REPLY)


def _decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Undoes `Content-Encoding`, and stops as soon as more than `limit` bytes come out."""
    if encoding in ("identity", ""):
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ToolError("the page is compressed in a way that was not asked for", ToolStatus.BAD_REPLY)
    try:
        return _inflate(body, zlib.MAX_WBITS | 32, limit)  # gzip or zlib, whichever the first bytes say
    except zlib.error:
        pass
    try:
        return _inflate(body, -zlib.MAX_WBITS, limit)  # some servers send `deflate` without zlib's header
    except zlib.error:
        raise ToolError("the page's compression is damaged", ToolStatus.BAD_REPLY) from None


def _inflate(body: bytes, wbits: int, limit: int) -> bytes:
    inflater = zlib.decompressobj(wbits)
    text = inflater.decompress(body, limit + 1)
    if len(text) > limit:
        raise _too_large(limit)
    if not inflater.eof:
        raise ToolError("the page ends too early", ToolStatus.DISCONNECTED)
    return text


def _read(download: _Download) -> Page:
    """Runs in a thread: parsing takes from milliseconds to seconds."""
    text = _decode(download)
    title = ""
    if download.content_type in _HTML:
        title, text = _article(text)
    text = text.strip()
    if not text:
        raise ToolError("the page holds no text", ToolStatus.BAD_REPLY)
    return Page(str(download.url), _encodable(title), _encodable(text))


def _article(html: str) -> tuple[str, str]:
    """Title and text of the article; of the whole page, if no article is found in it."""
    import trafilatura

    document = trafilatura.bare_extraction(html, include_comments=False, with_metadata=True)
    title = getattr(document, "title", None) or ""
    text = getattr(document, "text", None) or trafilatura.html2txt(html)
    return title, text


def _decode(download: _Download) -> str:
    """By the reply's charset, else by what the page says of itself, else as UTF-8; never fails."""
    named = _META_CHARSET.search(download.body, 0, 4096)
    for charset in (download.charset, named and named[1].decode("ascii")):
        try:
            if charset:
                return download.body.decode(charset, errors="replace")
        except (LookupError, ValueError):  # an unknown charset, or one that cannot replace what it cannot decode
            continue
    return download.body.decode("utf-8-sig", errors="replace")


def _encodable(text: str) -> str:
    """`text` without lone surrogates, which character references can smuggle in and JSON cannot carry."""
    return text.encode(errors="replace").decode()
