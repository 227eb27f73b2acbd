from __future__ import annotations

import argparse
import base64
import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

from agentic_rollout.errors import AgenticRolloutError
from agentic_rollout.server import code_cli
from server.code_serving import code_command, code_server, ran, run_code
from server.serving import get, post

ENDLESS = "import time\nprint('before', flush=True)\nwhile True: time.sleep(0.01)"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with code_server() as url:
        yield url


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


# /run_code, as SandboxFusion's clients know it


def test_program_that_succeeds(url: str) -> None:
    reply = ran(url, "print('hello')")
    result = reply["run_result"]
    assert (reply["status"], reply["message"], reply["compile_result"]) == ("Success", "", None)
    assert (reply["executor_pod_name"], reply["files"]) == (None, {})
    assert (result["status"], result["return_code"], result["stdout"], result["stderr"]) == (
        *("Finished", 0, "hello\n", ""),
    )
    assert 0 <= result["execution_time"] < 10


@pytest.mark.parametrize(
    ("code", "return_code", "stderr"),
    [
        ("1/0", 1, "ZeroDivisionError: division by zero"),
        ("def f(:", 1, "SyntaxError"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no')", 1, "no"),
        ("a = 'x' * 10**11", 1, "MemoryError"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("print('a\\0b'.index('\\0'), '\0')", 1, "null bytes"),
    ],
)
def test_program_that_fails_is_failed_and_finished(url: str, code: str, return_code: int, stderr: str) -> None:
    reply = ran(url, code)
    result = reply["run_result"]
    assert (reply["status"], result["status"], result["return_code"]) == ("Failed", "Finished", return_code)
    assert stderr in result["stderr"]


def test_program_that_takes_too_long_has_no_return_code_and_keeps_what_it_printed(url: str) -> None:
    reply = ran(url, ENDLESS, run_timeout=0.5)
    result = reply["run_result"]
    assert (reply["status"], result["status"], result["return_code"]) == ("Failed", "TimeLimitExceeded", None)
    assert result["stdout"] == "before\n"
    assert 0.4 < result["execution_time"] < 5


def test_megabytes_of_output_are_no_timeout_and_are_cut_with_a_mark(url: str) -> None:
    result = ran(url, "print('x' * 1_000_000)\nprint('end')", run_timeout=10)["run_result"]
    assert (result["status"], result["return_code"], result["stdout_bytes"]) == ("Finished", 0, 1_000_005)
    assert len(result["stdout"]) < 200_000
    assert result["stdout"].endswith("x\nend\n")
    assert "bytes left out" in result["stdout"]


def test_stdin_is_read(url: str) -> None:
    assert ran(url, "print(input()[::-1], input())", stdin="äb\nc\n")["run_result"]["stdout"] == "bä c\n"
    for nothing in (None, ""):
        assert ran(url, "import sys; print(repr(sys.stdin.read()))", stdin=nothing)["run_result"]["stdout"] == "''\n"


def test_files_go_in_and_come_out(url: str) -> None:
    code = "open('sub/b', 'w').write(open('sub/a').read() * 2)"
    files = {"sub/a": encoded("ab"), "not there": None}
    assert ran(url, code, files=files, fetch_files=["sub/b", "missing"])["files"] == {"sub/b": encoded("abab")}


def test_programs_do_not_see_each_others_files(url: str) -> None:
    ran(url, "open('left', 'w').write('a')")
    assert ran(url, "import os; print(os.listdir())")["run_result"]["stdout"] == "[]\n"


def test_memory_limit_is_the_requests_own(url: str) -> None:
    code = "a = bytearray(300_000_000)"
    assert ran(url, code)["status"] == "Success"
    small = ran(url, code, memory_limit_MB=100)
    assert (small["status"], small["run_result"]["ending"]) == ("Failed", "memory")
    assert ran(url, code, memory_limit_MB=-1)["status"] == "Success"


def test_value_is_given_where_it_is_asked_for(url: str) -> None:
    assert ran(url, "a = 6\na * 7", want_value=True)["run_result"]["value"] == "42"
    assert ran(url, "6 * 7")["run_result"]["value"] is None
    odd = "class A:\n    def __repr__(self): return 'a\\ud800'\nA()"
    assert ran(url, odd, want_value=True)["run_result"]["value"] == "a?"


@pytest.mark.parametrize(
    "fields",
    [
        *({"language": language} for language in ("cpp", "Python", None, 7, ["python"])),
        *({"code": code} for code in (None, 7, ["print(1)"])),
        *({"run_timeout": seconds} for seconds in (0, -1, 1e9, "10", True, [1])),
        *({"memory_limit_MB": limit} for limit in (0, -2, 10**9, 1.5, "100", True)),
        *({"stdin": stdin} for stdin in (7, ["a"], True)),
        *({"files": files} for files in ([], "a", {"a": "?"}, {"a": 7}, {"a": "é"}, {"../a": ""}, {"/a": ""})),
        *({"files": {name: ""}} for name in ("", ".", "..", "a\0b", "a" * 300, "a/../b")),
        *({"fetch_files": paths} for paths in ({}, "a", [7], ["/etc/passwd"], ["../a"])),
        *({"session_id": name} for name in ("", "a b", "a/b", "é", "a" * 129, 7)),
        {"session_id": "a", "memory_limit_MB": 100},
        {"continue_session": "yes"},
        {"want_value": 1},
    ],
)
def test_body_that_is_no_request_is_refused_with_the_reason(url: str, fields: dict[str, Any]) -> None:
    response = run_code(url, **{"code": "print(1)", **fields})
    assert (response.status_code, response.json()["error"]) == (422, "bad_request")
    assert response.json()["detail"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = {
    "code": st.sampled_from(["", "1/0", "print(1)", "x = 1", "raise SystemExit(object())"])
    | st.text(max_size=10)
    | JSON,
    "language": st.just("python") | JSON,
    "run_timeout": st.just(1) | JSON,
    "memory_limit_MB": st.sampled_from([-1, 1, 64]) | JSON,
    "stdin": st.text(max_size=5) | JSON,
    "files": st.dictionaries(st.text(max_size=5), st.just("YQ==") | st.text(max_size=5), max_size=2) | JSON,
    "fetch_files": st.lists(st.text(max_size=5), max_size=2) | JSON,
    "session_id": st.none() | st.sampled_from(["one", "two"]) | JSON,
    "continue_session": st.booleans() | JSON,
    "run_id": st.none() | st.sampled_from(["one", "two"]) | JSON,
    "want_value": st.booleans() | JSON,
}


@settings(max_examples=60)
@given(body=st.fixed_dictionaries({}, optional=FIELDS) | JSON | st.binary(max_size=20))
def test_no_body_makes_the_server_fail(url: str, body: Any) -> None:
    # As bytes: `requests` refuses to write Infinity, which other clients do send.
    response = post(f"{url}/run_code", body if isinstance(body, bytes) else json.dumps(body).encode())
    assert response.status_code in (200, 409, 410, 422)
    reply = response.json()
    assert reply["status"] in ("Success", "Failed") if response.status_code == 200 else reply["error"]


# Sessions


def test_variables_and_files_of_a_session_last_and_are_its_own(url: str) -> None:
    ran(url, "x = 1; open('f', 'w').write('a')", session_id="first")
    ran(url, "x = 2", session_id="second")
    reply = ran(url, "print(x, open('f').read())", session_id="first", continue_session=True)
    assert (reply["run_result"]["stdout"], reply["session_id"], reply["session_lost"]) == ("1 a\n", "first", False)
    assert "NameError" in ran(url, "x")["run_result"]["stderr"]


def test_session_that_must_be_there_and_is_not_is_gone(url: str) -> None:
    response = run_code(url, "print(x)", session_id="never", continue_session=True)
    assert (response.status_code, response.json()["error"]) == (410, "session_lost")


def test_closed_session_is_gone_and_its_name_is_free_again(url: str) -> None:
    ran(url, "x = 1", session_id="closing")
    closings = [requests.delete(f"{url}/sessions/closing", timeout=30).json() for _ in range(2)]
    assert closings == [{"closed": True}, {"closed": False}]
    assert run_code(url, "x", session_id="closing", continue_session=True).status_code == 410
    assert "NameError" in ran(url, "x", session_id="closing")["run_result"]["stderr"]


def test_request_sent_again_is_answered_and_not_run_again(url: str) -> None:
    ran(url, "x = 0", session_id="again", run_id="a")
    replies = [ran(url, "x += 1; print(x)", session_id="again", run_id=run_id) for run_id in ("b", "b", "c")]
    assert [reply["run_result"]["stdout"] for reply in replies] == ["1\n", "1\n", "2\n"]


def test_program_that_ends_its_session_says_so(url: str) -> None:
    reply = ran(url, "import os; os._exit(3)", session_id="ending")
    assert (reply["session_lost"], reply["run_result"]["return_code"]) == (True, 3)
    assert run_code(url, "1", session_id="ending", continue_session=True).status_code == 410


def test_session_outlives_a_program_that_takes_too_long(url: str) -> None:
    ran(url, "x = 5", session_id="patient")
    stopped = ran(url, ENDLESS, session_id="patient", run_timeout=0.5)
    assert (stopped["run_result"]["status"], stopped["session_lost"]) == ("TimeLimitExceeded", False)
    assert ran(url, "print(x)", session_id="patient", continue_session=True)["run_result"]["stdout"] == "5\n"


def test_idle_session_is_closed_and_makes_room() -> None:
    with code_server(sandbox={"session_idle_s": 0.3, "max_sessions": 1}) as url:
        ran(url, "x = 1", session_id="idle")
        refused = run_code(url, "x = 2", session_id="other")
        time.sleep(0.8)
        other = ran(url, "print(2)", session_id="other")
        gone = run_code(url, "print(x)", session_id="idle", continue_session=True)
    assert (refused.status_code, refused.json()["error"], "Retry-After" in refused.headers) == (503, "overloaded", True)
    assert (gone.status_code, gone.json()["error"]) == (410, "session_lost")
    assert other["run_result"]["stdout"] == "2\n"


# Load


def test_full_queue_refuses_at_once_says_when_to_come_back_and_recovers() -> None:
    with code_server(max_queue=2, retry_after_s=7) as url, ThreadPoolExecutor(2) as pool:
        accepted = [pool.submit(ran, url, "import time; time.sleep(1)") for _ in range(2)]
        while get(f"{url}/health").json()["waiting"] != 2:
            pass
        refused = run_code(url, "print(1)")
        assert [future.result()["status"] for future in accepted] == ["Success"] * 2
        after = ran(url, "print(1)")
    assert (refused.status_code, refused.json()["error"], refused.headers["Retry-After"]) == (503, "overloaded", "7")
    assert after["status"] == "Success"


def test_many_at_once_get_their_own_answers(url: str) -> None:
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda number: ran(url, f"print({number} ** 2)"), range(64)))
    assert [int(reply["run_result"]["stdout"]) for reply in replies] == [number**2 for number in range(64)]


def test_request_beyond_its_deadline_is_a_504_and_its_program_is_ended() -> None:
    with code_server(deadline_s=1.5, sandbox={"max_concurrency": 1}) as url:
        late = run_code(url, ENDLESS)
        in_session = run_code(url, ENDLESS, session_id="s")
        gone = run_code(url, "1", session_id="s", continue_session=True)
        after = ran(url, "print(1)")
    assert (late.status_code, late.json()["error"]) == (504, "timeout")
    assert (in_session.status_code, gone.status_code) == (504, 410)
    assert after["status"] == "Success"


# Token, health, metrics, bodies


def test_token_guards_everything_but_health_and_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODE_TOKEN", "s3cret")
    with code_server(token_env="CODE_TOKEN") as url:
        codes = [
            post(f"{url}/run_code", {"code": "1", "language": "python"}, headers=headers).status_code
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer s3cret"})
        ]
        others = [get(f"{url}{path}").status_code for path in ("/metrics", "/health", "/v1/ping")]
        closing = requests.delete(f"{url}/sessions/a", timeout=30).status_code
    assert (codes, others, closing) == ([401, 401, 200], [401, 200, 200], 401)


def test_ping_and_health_answer(url: str) -> None:
    assert get(f"{url}/v1/ping").json() == "pong"
    health = get(f"{url}/health").json()
    assert (health["status"], health["containment"] in ("bubblewrap", "landlock")) == ("ready", True)


def test_wrong_path_or_method_is_told_in_json(url: str) -> None:
    for method, path, code in [("GET", "/run_code", 405), ("POST", "/sessions/a", 405), ("POST", "/run_jupyter", 404)]:
        response = requests.request(method, f"{url}{path}", timeout=30)
        assert (response.status_code, bool(response.json()["detail"])) == (code, True)


def test_body_beyond_the_limit_is_refused() -> None:
    with code_server(max_body_bytes=1000) as url:
        response = run_code(url, "#" * 2000)
    assert (response.status_code, response.json()["error"]) == (413, "too_large")


def test_metrics_count_programs_endings_and_sessions() -> None:
    with code_server() as url:
        ran(url, "print(1)")
        ran(url, ENDLESS, run_timeout=0.3)
        ran(url, "x = 1", session_id="a")
        run_code(url, "1", language="cpp")
        lines = get(f"{url}/metrics").text.splitlines()
    for line in (
        "agentic_code_programs_total 3.0",
        'agentic_code_endings_total{ending="finished"} 2.0',
        'agentic_code_endings_total{ending="timeout"} 1.0',
        "agentic_code_program_seconds_count 3.0",
        "agentic_code_sessions 1.0",
        "agentic_code_queue_programs 0.0",
        'agentic_code_requests_total{route="/run_code",status="422"} 1.0',
    ):
        assert line in lines


# The command


def test_command_serves_drains_and_leaves_no_process() -> None:
    with code_command("--port", "0", "--concurrency", "2") as (process, url):
        ran(url, "x = 1", session_id="left")
        replies: list[dict[str, Any]] = []
        code = "import time; print(1, flush=True); time.sleep(1)"
        client = threading.Thread(target=lambda: replies.append(ran(url, code)))
        client.start()
        while get(f"{url}/health").json()["waiting"] != 1:
            pass
        children = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        client.join()
        _, errors = process.communicate(timeout=20)
    assert [reply["run_result"]["stdout"] for reply in replies] == ["1\n"]
    assert (process.returncode, errors) == (0, "")
    assert url.startswith("http://127.0.0.1:")
    assert children
    assert not any(alive(child) for child in children)


def test_killed_command_leaves_no_process() -> None:
    with code_command("--port", "0") as (process, url):
        ran(url, "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()", session_id="left")
        children = children_of(process.pid)
        process.kill()
        process.wait(20)
        until = time.monotonic() + 10
        while any(map(alive, children)) and time.monotonic() < until:
            time.sleep(0.05)
    assert children
    assert not any(map(alive, children))


def children_of(pid: int) -> list[int]:
    """Processes started by a process, and by those."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    parents = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    found = [child for child, parent in parents if parent == pid]
    return found + [below for child in found for below in children_of(child)]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--concurrency", "0"], ["--memory", "1"], ["--max-queue", "0"], ["--port", "70000"]),
        *(["--host", "203.0.113.1"], ["--token-env", "NOT_SET_ANYWHERE"], ["--preload", "no_such_module"]),
    ],
)
def test_wrong_option_is_said_and_not_a_traceback(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    code_cli.add_code_arguments(parser)
    with pytest.raises(AgenticRolloutError):
        code_cli.run_code_server(parser.parse_args(["--port", "0", *arguments]))
