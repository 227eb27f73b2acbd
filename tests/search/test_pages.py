from __future__ import annotations

import asyncio
import gzip
import os
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from agentic_rollout.errors import CorpusError, ToolError
from agentic_rollout.retrieval.corpus import Passage
from agentic_rollout.search import addresses
from agentic_rollout.search.http import HttpClient, HttpSettings
from agentic_rollout.search.pages import CorpusPages, FirstOf, Page, RemotePages, page_json
from agentic_rollout.search.web import WebPages, WebSettings

PASSAGES = [
    Passage("0", '"Zomel"\nThe river of Zomel', "https://a.test/zomel"),
    Passage("1", '"Havel"\nHavel.', "https://a.test/havel"),
    Passage("2", '"Zomel"\nis R0.', "https://a.test/zomel"),
    Passage("3", '"Nowhere"\nNo address.'),
]
HTML = (
    "<html><head><title>Rivers</title><meta charset='utf-8'></head><body><nav>menu menu</nav><article><h1>Rivers</h1>"
    "<p>The river of Zomel is R0, and it is a long river that runs through the whole of the land.</p>"
    "<p>The river of Havel is R1; it is short, and its water is cold, as everyone there will tell you.</p>"
    "</article></body></html>"
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# A corpus


def fetch(store: Any, url: str) -> Page:
    async def main() -> Page:
        try:
            page: Page = await store.fetch(url)
            return page
        finally:
            await store.aclose()

    return asyncio.run(main())


def failure(store: Any, url: str) -> ToolError:
    with pytest.raises(ToolError) as caught:
        fetch(store, url)
    return caught.value


def test_page_is_its_passages_in_their_order() -> None:
    page = fetch(CorpusPages(PASSAGES), " https://a.test/zomel ")
    assert page == Page("https://a.test/zomel", "Zomel", "The river of Zomel\nis R0.")


def test_fragment_does_not_matter() -> None:
    assert fetch(CorpusPages(PASSAGES), "https://a.test/havel#top").title == "Havel"


@pytest.mark.parametrize("url", ["https://a.test/zome", "", " ", "#", "zomel"])
def test_page_that_is_not_there_is_the_models_mistake(url: str) -> None:
    assert failure(CorpusPages(PASSAGES), url).status == "bad_arguments"


def test_corpus_without_addresses_has_no_pages() -> None:
    with pytest.raises(CorpusError, match="url"):
        CorpusPages(PASSAGES[3:])


def test_stores_are_asked_in_turn() -> None:
    stores = FirstOf([CorpusPages(PASSAGES[:1]), CorpusPages(PASSAGES[1:])])
    assert fetch(stores, "https://a.test/zomel").text == "The river of Zomel"
    assert fetch(stores, "https://a.test/havel").text == "Havel."
    assert failure(stores, "https://a.test/").status == "bad_arguments"


# A site on a real socket


class Names(AbstractResolver):
    """Resolves names to what it is told, one answer after the other, the last one for ever."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked.append(host)
        address = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [ResolveResult(hostname=host, host=address, port=port, family=socket.AF_INET, proto=0, flags=0)]

    async def close(self) -> None:
        return None


@asynccontextmanager
async def site(handler: Handler) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def visit(handler: Handler, path: str = "/", *, host: str = "127.0.0.1", **settings: Any) -> Page:
    """Opens a page of a site on this machine, which the settings allow unless told otherwise."""
    limits = WebSettings(**{"allow_private_addresses": True, "ports": (), **settings})

    async def main() -> Page:
        async with site(handler) as port:
            pages = WebPages(limits)
            try:
                return await pages.fetch(f"http://{host}:{port}{path}")
            finally:
                await pages.aclose()

    return asyncio.run(main())


def refusal(handler: Handler, path: str = "/", **settings: Any) -> ToolError:
    with pytest.raises(ToolError) as caught:
        visit(handler, path, **settings)
    return caught.value


def replying(**options: Any) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(**options)

    return handler


def test_page_becomes_title_and_text_without_its_menu() -> None:
    page = visit(replying(text=HTML, content_type="text/html"), "/rivers#top")
    assert page.title == "Rivers"
    assert "The river of Havel is R1" in page.text
    assert "menu" not in page.text
    assert "<" not in page.text
    assert page.url.endswith("/rivers")


def test_page_without_an_article_is_still_read() -> None:
    assert "one" in visit(replying(text="<html><body><p>one</p></body></html>", content_type="text/html")).text


@pytest.mark.parametrize("content_type", ["text/plain", "application/json"])
def test_plain_text_is_kept_as_it_is(content_type: str) -> None:
    assert visit(replying(text='{"a": "é"}', content_type=content_type)).text == '{"a": "é"}'


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ("é".encode("latin-1"), "text/plain; charset=latin-1"),
        ("é".encode(), "text/plain; charset=no-such-charset"),
        ("é".encode(), "text/plain; charset=hex"),
        ("\ufeffé".encode(), "text/plain"),
        ("é".encode(), "text/plain"),
    ],
)
def test_charset_is_followed_where_it_makes_sense(body: bytes, content_type: str) -> None:
    assert visit(replying(body=body, headers={"Content-Type": content_type})).text == "é"


def test_charset_that_a_page_gives_itself_is_followed() -> None:
    html = HTML.replace("utf-8", "cp1251").replace("Zomel", "Зомель")
    assert "Зомель" in visit(replying(body=html.encode("cp1251"), headers={"Content-Type": "text/html"})).text


def test_bytes_that_are_no_text_and_lone_surrogates_can_be_encoded() -> None:
    page = visit(
        replying(body=b"<html><body><p>\xff &#xD800; one two</p></body></html>", headers={"Content-Type": "text/html"})
    )
    assert "one two" in page.text
    page.text.encode()


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw deflate"])
def test_compressed_page_is_read(encoding: str) -> None:
    raw = zlib.compressobj(wbits=-15)
    bodies = {
        "gzip": gzip.compress(HTML.encode()),
        "deflate": zlib.compress(HTML.encode()),
        "raw deflate": raw.compress(HTML.encode()) + raw.flush(),
    }
    headers = {"Content-Type": "text/html", "Content-Encoding": encoding.split()[-1]}
    assert visit(replying(body=bodies[encoding], headers=headers)).title == "Rivers"


def test_decompression_bomb_is_not_unpacked() -> None:
    bomb = gzip.compress(b"a" * 200_000_000)
    assert len(bomb) < 500_000
    headers = {"Content-Type": "text/plain", "Content-Encoding": "gzip"}
    error = refusal(replying(body=bomb, headers=headers), max_bytes=1_000_000)
    assert (error.status, str(error)) == ("bad_reply", "the page is larger than 1000000 bytes")


@pytest.mark.parametrize(
    ("body", "encoding"), [(b"no gzip", "gzip"), (b"a", "br"), (gzip.compress(os.urandom(99))[:50], "gzip")]
)
def test_compression_that_cannot_be_undone_is_a_failure(body: bytes, encoding: str) -> None:
    headers = {"Content-Type": "text/plain", "Content-Encoding": encoding}
    assert refusal(replying(body=body, headers=headers)).status in ("bad_reply", "disconnected")


def test_endless_page_is_left() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        while True:
            await response.write(b"a" * 65536)

    error = refusal(endless, max_bytes=1_000_000)
    assert (error.status, "larger" in str(error)) == ("bad_reply", True)


def test_page_that_trickles_ends_with_the_deadline() -> None:
    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        while True:
            await response.write(b"a")
            await asyncio.sleep(0.05)

    assert refusal(trickle, timeout_s=0.3).status == "timeout"


@pytest.mark.parametrize("content_type", ["application/pdf", "image/png", "application/octet-stream", "video/mp4"])
def test_what_is_no_text_is_not_downloaded(content_type: str) -> None:
    error = refusal(replying(body=b"x", content_type=content_type))
    assert (error.status, content_type in str(error)) == ("bad_reply", True)


@pytest.mark.parametrize("text", ["", "<html><body></body></html>"])
def test_page_without_text_is_a_failure(text: str) -> None:
    assert refusal(replying(text=text, content_type="text/html")).status == "bad_reply"


@pytest.mark.parametrize(
    ("code", "status"),
    [(404, "http_4xx"), (403, "http_4xx"), (429, "rate_limited"), (500, "http_5xx"), (304, "bad_reply")],
)
def test_refusal_by_the_site_is_told_by_its_code(code: int, status: str) -> None:
    error = refusal(replying(status=code))
    assert (error.status, str(code) in str(error)) == (status, True)


def test_broken_connection_is_a_failure() -> None:
    async def drop(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/plain", "Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.abort()
        return response

    assert refusal(drop).status == "disconnected"


def test_site_that_is_not_there_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    settings = WebSettings(allow_private_addresses=True, ports=())
    assert failure(WebPages(settings), f"http://127.0.0.1:{port}/").status == "refused"


def test_store_outlives_an_event_loop() -> None:
    pages = WebPages(WebSettings(allow_private_addresses=True, ports=(), max_concurrency=1))

    async def main(last: bool) -> list[str]:
        async with site(replying(text="text")) as port:
            found = await asyncio.gather(*(pages.fetch(f"http://localhost:{port}/{number}") for number in range(3)))
            if last:
                await pages.aclose()
            return [page.text for page in found]

    assert [asyncio.run(main(last)) for last in (False, True)] == [["text"] * 3] * 2


def test_redirects_are_followed_to_a_limit() -> None:
    async def hops(request: web.Request) -> web.Response:
        left = int(request.path.strip("/"))
        if left:
            return web.Response(status=302, headers={"Location": f"/{left - 1}"})
        return web.Response(text="arrived")

    page = visit(hops, "/5", max_redirects=5)
    assert (page.text, page.url[-2:]) == ("arrived", "/0")
    error = refusal(hops, "/6", max_redirects=5)
    assert (error.status, "redirects" in str(error)) == ("bad_reply", True)


# No way inside


class Watched:
    """A site that must not be reached."""

    def __init__(self) -> None:
        self.visits = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.visits += 1
        return web.Response(text="secret")


def attempt(url: Callable[[int], str], names: Names | None = None, **settings: Any) -> tuple[ToolError, int]:
    """The failure of opening an address that leads to a site on this machine, and that site's visits."""
    watched = Watched()

    async def main() -> ToolError:
        async with site(watched.answer) as port:
            pages = WebPages(WebSettings(ports=(), **settings), resolver=names)
            try:
                with pytest.raises(ToolError) as caught:
                    await pages.fetch(url(port))
                return caught.value
            finally:
                await pages.aclose()

    return asyncio.run(main()), watched.visits


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "0.0.0.0", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "[::1]", "[::]"),
        *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "127.0.0.1.", "①②⑦.0.0.1"),
    ],
)
def test_this_machine_is_not_reached_under_any_name(host: str) -> None:
    error, visits = attempt(lambda port: f"http://{host}:{port}/")
    assert (error.status in ("forbidden", "bad_arguments"), visits) == (True, 0)
    assert "127.0.0.1" not in str(error)


def test_name_that_resolves_to_this_machine_is_forbidden() -> None:
    error, visits = attempt(lambda port: f"http://public.test:{port}/", Names("127.0.0.1"))
    assert (error.status, visits) == ("forbidden", 0)


def test_name_that_changes_its_mind_gains_nothing() -> None:
    """The address is resolved once for each connection, and what was checked is what is connected to."""
    names = Names("203.0.113.1", "127.0.0.1")
    for _ in range(2):
        error, visits = attempt(lambda port: f"http://rebinding.test:{port}/", names)
        assert (error.status, visits) == ("forbidden", 0)
    assert names.asked == ["rebinding.test"] * 2


@pytest.mark.parametrize(
    "target",
    ["http://127.0.0.1/", "http://[::ffff:10.0.0.1]/", "file:///etc/passwd", "http://inside.test/", "//u:p@a.b/"],
)
def test_redirect_inside_is_not_followed(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The site's own address is let through as if it were public; what it redirects to is not."""
    real = addresses.is_public
    monkeypatch.setattr(addresses, "is_public", lambda address: str(address) == "127.0.0.2" or real(address))

    class Resolver(Names):
        async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> list[ResolveResult]:
            self.answers = ["127.0.0.2" if host == "outside.test" else "127.0.0.1"]
            return await super().resolve(host, port, family)

    visits: list[str] = []

    async def main() -> ToolError:
        app = web.Application()

        async def redirect(request: web.Request) -> web.Response:
            visits.append(request.path)
            return web.Response(status=302, headers={"Location": target})

        app.router.add_get("/", redirect)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.2", 0).start()
        pages = WebPages(WebSettings(ports=()), resolver=Resolver("127.0.0.1"))
        try:
            with pytest.raises(ToolError) as caught:
                await pages.fetch(f"http://outside.test:{runner.addresses[0][1]}/")
            return caught.value
        finally:
            await pages.aclose()
            await runner.cleanup()

    assert asyncio.run(main()).status == "forbidden"
    assert visits == ["/"]


# A server


def remote(reply: Any, **options: Any) -> Any:
    """What comes of opening an address at a server that answers `reply`."""

    async def handler(request: web.Request) -> web.Response:
        assert (request.path, await request.json()) == ("/access", {"urls": ["https://a.test/"]})
        return web.json_response(reply, **options)

    async def main() -> Page | ToolError:
        async with site(handler) as port:
            pages = RemotePages(HttpClient("pages", f"http://127.0.0.1:{port}", HttpSettings(attempts=1)))
            try:
                return await pages.fetch("https://a.test/")
            except ToolError as error:
                return error
            finally:
                await pages.aclose()

    return asyncio.run(main())


def test_page_of_a_server_is_the_page_it_has() -> None:
    page = Page("https://a.test/", "A", "text")
    assert remote({"result": [page_json(page)], "errors": [None]}) == page
    assert remote({"result": [{"url": "https://a.test/", "contents": "c"}]}) == Page("https://a.test/", "", "c")


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        ({"result": [None]}, "bad_arguments"),
        ({"result": [None], "errors": [{"error": "timeout", "detail": "late"}]}, "timeout"),
        ({"result": [None], "errors": [{"error": "odd"}]}, "bad_arguments"),
        *(
            (reply, "bad_reply")
            for reply in ({}, [], {"result": []}, {"result": [7]}, {"result": [{}]}, {"result": [{}] * 2})
        ),
    ],
)
def test_page_that_a_server_does_not_give_is_a_typed_failure(reply: Any, status: str) -> None:
    assert remote(reply).status == status


def test_server_that_fails_is_a_failure() -> None:
    assert remote({}, status=500).status == "http_5xx"
