from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentic_rollout.config import build_settings
from agentic_rollout.errors import CorpusError, SettingsError, ToolError
from agentic_rollout.search.pages import NoSuchPageError, Page
from agentic_rollout.tools.access import AccessSettings, AccessTool, render_page
from agentic_rollout.tools.base import Toolbox, ToolContext
from agentic_rollout.types import ToolCall, ToolRequest, ToolStatus


class Shelf:
    """A store of pages, which remembers what it was asked for."""

    def __init__(self, *pages: Page) -> None:
        self.pages = {page.url: page for page in pages}
        self.asked: list[str] = []
        self.closed = False

    async def fetch(self, url: str) -> Page:
        self.asked.append(url)
        if url not in self.pages:
            raise NoSuchPageError
        return self.pages[url]

    async def aclose(self) -> None:
        self.closed = True


def call(tool: AccessTool, *calls: dict[str, Any]) -> list[ToolCall]:
    async def main() -> list[ToolCall]:
        toolbox = Toolbox({"access": tool})
        records = [await toolbox.call(ToolRequest("access", arguments), ToolContext("row")) for arguments in calls]
        await toolbox.aclose()
        return records

    return asyncio.run(main())


def shelf_tool(*pages: Page, **settings: Any) -> tuple[AccessTool, Shelf]:
    shelf = Shelf(*pages)
    return AccessTool(shelf, AccessSettings(source="shelf", **settings)), shelf


def test_page_is_shown_under_its_title() -> None:
    tool, shelf = shelf_tool(Page("https://a.test/", "A", "text"))
    (record,) = call(tool, {"url": " https://a.test/ "})
    assert (record.status, record.text) == (ToolStatus.OK, "Title: A\ntext")
    assert shelf.closed


def test_long_page_is_shown_in_parts_that_make_up_the_whole() -> None:
    text = "".join(map(str, range(10_000)))
    tool, shelf = shelf_tool(Page("https://a.test/", "", text), max_chars=8000)
    calls = [{"url": "https://a.test/", "page": number} for number in (1, "2", 3, 4, 5)]
    records = call(tool, {"url": "https://a.test/"}, *calls)
    assert records[0].text == records[1].text
    assert records[0].text.endswith("\n(part 1 of 5)")
    assert "".join(record.text.rpartition("\n")[0] for record in records[1:]) == text
    assert shelf.asked == ["https://a.test/"]


def test_page_too_large_to_be_kept_is_fetched_again() -> None:
    tool, shelf = shelf_tool(Page("https://a.test/", "", "text"), cache_chars=3)
    call(tool, {"url": "https://a.test/"}, {"url": "https://a.test/"})
    assert len(shelf.asked) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        *({}, {"url": None}, {"url": ""}, {"url": " "}, {"url": ["https://a.test/"]}),
        *({"url": "https://a.test/", "page": page} for page in (0, -1, 2, 1.5, True, "x", [1], "9" * 5000)),
        {"url": "https://a.test/nowhere"},
    ],
)
def test_arguments_that_name_no_page_are_the_models_mistake(arguments: dict[str, Any]) -> None:
    tool, _ = shelf_tool(Page("https://a.test/", "A", "text"))
    (record,) = call(tool, arguments)
    assert (record.status, record.error is not None) == (ToolStatus.BAD_ARGUMENTS, True)


def test_empty_page_has_one_part() -> None:
    assert render_page(Page("u", "T", ""), number=1, max_chars=10) == "Title: T\n"
    with pytest.raises(ToolError, match="1 part;"):
        render_page(Page("u", "T", ""), number=2, max_chars=10)


def from_settings(**values: Any) -> AccessTool:
    return AccessTool.from_settings(build_settings(AccessSettings, values, key="tools.access"), key="tools.access")


def test_source_can_be_a_corpus(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": 1, "contents": '"A"\ntext', "url": "https://a.test/"}))
    (record,) = call(from_settings(source=str(corpus)), {"url": "https://a.test/"})
    assert (record.status, record.text) == (ToolStatus.OK, "Title: A\ntext")


def test_source_can_be_a_server_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGE_TOKEN", "s3cret")

    async def access(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer s3cret":
            return web.json_response({"error": "unauthorized"}, status=401)
        urls = (await request.json())["urls"]
        return web.json_response({"result": [{"url": url, "title": "A", "contents": "text"} for url in urls]})

    async def main(**settings: Any) -> ToolCall:
        app = web.Application()
        app.router.add_post("/access", access)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        toolbox = Toolbox({"access": from_settings(source=f"http://127.0.0.1:{runner.addresses[0][1]}", **settings)})
        try:
            return await toolbox.call(ToolRequest("access", {"url": "https://a.test/"}), ToolContext("row"))
        finally:
            await toolbox.aclose()
            await runner.cleanup()

    assert asyncio.run(main(token_env="PAGE_TOKEN")).text == "Title: A\ntext"
    refused = asyncio.run(main())
    assert refused.status is ToolStatus.HTTP_4XX
    assert "s3cret" not in refused.text


def test_web_is_guarded_unless_told_otherwise() -> None:
    (record,) = call(from_settings(source="web"), {"url": "http://127.0.0.1/"})
    assert record.status is ToolStatus.FORBIDDEN


def test_limits_of_the_web_are_settings_of_the_tool() -> None:
    tool = from_settings(source="web", web={"ports": [8080]})
    (record,) = call(tool, {"url": "http://example.com/"})
    assert (record.status, record.text) == (ToolStatus.FORBIDDEN, "port 80 is not allowed")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "source"),
        ({"source": "web", "max_chars": 0}, "max_chars"),
        ({"source": "web", "max_char": 1}, "max_chars"),
        ({"source": "http://127.0.0.1:1", "token_env": "NOT_SET_ANYWHERE"}, "token_env"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        from_settings(**values)


def test_corpus_that_is_not_there_is_named() -> None:
    with pytest.raises(CorpusError, match="/no/such/corpus"):
        from_settings(source="/no/such/corpus")
