"""SandboxFusion's own client, as it is published, against the real server."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator

import pytest

from server.code_serving import code_server

fusion = pytest.importorskip("sandbox_fusion")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with code_server() as url:
        yield url


def request(code: str, **fields: object) -> object:
    return fusion.RunCodeRequest(code=code, language="python", **fields)


def test_success(url: str) -> None:
    reply = fusion.run_code(request("print(6 * 7)"), endpoint=url, max_attempts=1)
    assert reply.status == fusion.RunStatus.Success
    assert reply.run_result.status == "Finished"
    assert (reply.run_result.return_code, reply.run_result.stdout) == (0, "42\n")
    assert fusion.summary_run_code_result(reply, fusion.SummaryMapping(Success="good")) == "good"


def test_failure(url: str) -> None:
    reply = fusion.run_code(request("1/0"), endpoint=f"{url}/", max_attempts=1)
    assert reply.status == fusion.RunStatus.Failed
    assert (reply.run_result.status, reply.run_result.return_code) == ("Finished", 1)
    assert "ZeroDivisionError" in reply.run_result.stderr
    assert fusion.summary_run_code_result(reply, fusion.SummaryMapping(RunFailed="bad")) == "bad"


def test_timeout(url: str) -> None:
    code = "print('before', flush=True)\nwhile True: pass"
    reply = fusion.run_code(request(code, run_timeout=0.5), endpoint=url, max_attempts=1)
    assert reply.status == fusion.RunStatus.Failed
    assert (reply.run_result.status, reply.run_result.return_code) == ("TimeLimitExceeded", None)
    assert reply.run_result.stdout == "before\n"
    assert fusion.summary_run_code_result(reply, fusion.SummaryMapping(RunTimeout="late")) == "late"


def test_stdin(url: str) -> None:
    reply = fusion.run_code(request("print(input().upper())", stdin="abc"), endpoint=url, max_attempts=1)
    assert reply.run_result.stdout == "ABC\n"


def test_files_in_and_out(url: str) -> None:
    files = {"a.txt": base64.b64encode(b"abc").decode(), "null.txt": None}
    code = "import os\nopen('b.txt', 'w').write(open('a.txt').read()[::-1])\nprint(os.listdir())"
    reply = fusion.run_code(request(code, files=files, fetch_files=["b.txt"]), endpoint=url, max_attempts=1)
    assert {path: base64.b64decode(data) for path, data in reply.files.items()} == {"b.txt": b"cba"}


def test_asynchronous_client(url: str) -> None:
    async def main() -> list[str]:
        requests = [request(f"print({number})") for number in range(8)]
        replies = await asyncio.gather(*(fusion.run_code_async(one, endpoint=url) for one in requests))
        return [reply.run_result.stdout for reply in replies]

    assert asyncio.run(main()) == [f"{number}\n" for number in range(8)]


def test_language_that_is_not_there_is_an_error(url: str) -> None:
    with pytest.raises(Exception, match="422"):
        fusion.run_code(fusion.RunCodeRequest(code="", language="cpp"), endpoint=url, max_attempts=1)
