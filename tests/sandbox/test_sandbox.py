from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agentic_rollout.errors import SettingsError, ToolError
from agentic_rollout.sandbox.containment import find_containment
from agentic_rollout.sandbox.execution import Program
from agentic_rollout.sandbox.results import Output, RunResult, RunStatus
from agentic_rollout.sandbox.sandbox import Sandbox
from agentic_rollout.sandbox.settings import SandboxSettings

T = TypeVar("T")


def within(use: Callable[[Sandbox], Awaitable[T]], **settings: Any) -> T:
    """What `use` makes of a sandbox with such settings."""

    async def main() -> T:
        async with Sandbox(SandboxSettings(**{"preload": (), **settings})) as sandbox:
            return await use(sandbox)

    return asyncio.run(main())


def run(code: str, *, settings: dict[str, Any] | None = None, **program: Any) -> RunResult:
    return within(lambda sandbox: sandbox.run(Program(code, **program)), **(settings or {}))


# Results


def test_what_a_program_prints_is_its_result() -> None:
    result = run("import sys\nprint('Grüße')\nprint('oh', file=sys.stderr)")
    assert (result.status, result.return_code) == (RunStatus.FINISHED, 0)
    assert (result.stdout.text(), result.stderr.text(), result.value) == ("Grüße\n", "oh\n", None)
    assert 0.0 < result.execution_time_s < 5.0


def test_an_error_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    code = "def f(x):\n    return 1 / x\n\ntry:\n    f(0)\nexcept ZeroDivisionError:\n    f('a')\n"
    result = run(code)
    assert (result.status, result.return_code) == (RunStatus.FINISHED, 1)
    assert result.stderr.text() == shown_by_python(code, tmp_path)


@pytest.mark.parametrize(
    "code",
    [
        "x = (1,\n",
        "x = = 1",
        "raise SystemExit('bye')",
        "import sys; sys.exit(3)",
        "exit(4)",
        "raise KeyError(1)",
    ],
)
def test_endings_are_pythons_own(code: str, tmp_path: Path) -> None:
    result = run(code)
    assert result.stderr.text() == shown_by_python(code, tmp_path)
    assert result.return_code == python(code, tmp_path)[0]


def python(code: str, folder: Path) -> tuple[int, str]:
    async def main() -> tuple[int, str]:
        (folder / "main.py").write_text(code)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "main.py", cwd=folder, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
        )
        error = (await process.communicate())[1].decode()
        assert process.returncode is not None
        return process.returncode, error

    return asyncio.run(main())


def shown_by_python(code: str, folder: Path) -> str:
    return python(code, folder)[1].replace(f'"{folder}/main.py"', '"main.py"')


def test_the_last_expressions_value_is_shown_if_asked_for() -> None:
    async def use(sandbox: Sandbox) -> list[str | None]:
        codes = ["x = [1]\nx * 3", "x = 1", "None", "print(1)", "'a'", ""]
        results = [await sandbox.run(Program(code, want_value=True)) for code in codes]
        results.append(await sandbox.run(Program("1 + 1")))
        return [result.value for result in results]

    assert within(use) == ["[1, 1, 1]", None, None, None, "'a'", None, None]


def test_a_value_that_cannot_be_shown_is_the_programs_error() -> None:
    result = run("class A:\n    def __repr__(self):\n        raise ValueError('no')\nA()", want_value=True)
    assert (result.return_code, result.value) == (1, None)
    assert result.stderr.text().endswith("ValueError: no\n")


def test_a_long_value_is_cut() -> None:
    result = run("'x' * 10_000_000", want_value=True, settings={"max_output_bytes": 100})
    assert result.value == "'" + "x" * 99


@pytest.mark.parametrize("read", ["input() + input()", "open(0).read()", "__import__('sys').stdin.read()"])
def test_standard_input_is_read_as_from_a_file(read: str) -> None:
    assert run(f"print(repr({read}))", stdin="ä\nb".encode()).stdout.text() in ("'äb'\n", "'ä\\nb'\n")


def test_files_go_in_and_come_out() -> None:
    code = (
        "import os, lib.tool\nos.makedirs('out/deep')\nopen('out/deep/a', 'wb').write(open('in').read().encode() * 2)\n"
    )
    files = {"in": b"data", "lib/tool.py": b"print('imported')"}
    result = run(code, files=files, fetch_files=["out/deep/a", "missing", "in", "out"])
    assert result.stdout.text() == "imported\n"
    assert result.files == {"out/deep/a": b"datadata", "in": b"data"}


@pytest.mark.parametrize("path", ["../a", "/etc/a", "", "a/../../b", ".", "a\0b"])
def test_a_path_that_leads_out_is_a_wrong_argument(path: str) -> None:
    async def use(sandbox: Sandbox) -> list[str]:
        statuses = []
        for program in (Program("1", files={path: b""}), Program("1", fetch_files=[path])):
            with pytest.raises(ToolError) as error:
                await sandbox.run(program)
            statuses.append(error.value.status)
        return statuses

    assert within(use) == ["bad_arguments"] * 2


def test_a_megabyte_of_output_is_no_timeout() -> None:
    result = run("for i in range(125_000): print('%07d' % i)", timeout_s=10.0)
    assert (result.status, result.stdout.total_bytes) == (RunStatus.FINISHED, 1_000_000)
    assert result.stdout.text().startswith("0000000\n")
    assert result.stdout.text().endswith("0124999\n")


def test_output_printed_before_the_time_was_up_is_kept() -> None:
    result = run("print('so far')\nwhile True: pass", timeout_s=1.0)
    assert (result.status, result.return_code, result.stdout.text()) == (RunStatus.TIMEOUT, None, "so far\n")


def test_processor_time_is_limited_apart_from_wall_time() -> None:
    code = "import threading\nprint('so far')\nwhile True: pass"
    result = run(code, settings={"cpu_time_s": 1, "wall_time_s": 20.0})
    assert (result.status, result.return_code, result.stdout.text()) == (RunStatus.TIMEOUT, None, "so far\n")
    assert result.execution_time_s < 10.0


def test_a_crash_is_told_by_its_signal() -> None:
    result = run("import os; os.abort()")
    assert (result.status, result.return_code) == (RunStatus.KILLED, -signal.SIGABRT)


def test_a_program_may_end_itself_at_once() -> None:
    assert run("import os; os._exit(7)").return_code == 7


ORDINARY = {
    "asyncio": (
        "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 5\nprint(asyncio.run(f()))",
        "5",
    ),
    "threads": ("from concurrent.futures import *\nprint(sum(ThreadPoolExecutor(8).map(abs, range(-9, 0))))", "45"),
    "numpy": ("import numpy as np; print(int(np.linalg.det(np.eye(64)) + 0.5))", "1"),
    "numpy in threads": (
        "import numpy as n, threading as t\nfor _ in range(4): t.Thread(target=n.dot, args=[n.eye(200)] * 2).start()",
        "",
    ),
    "sqlite": ("import sqlite3; print(sqlite3.connect('a.db').execute('select 6 * 7').fetchone()[0])", "42"),
    "temporary files": (
        "import tempfile\nwith tempfile.TemporaryDirectory() as d: print(open(d + '/a', 'w').write('x'))",
        "1",
    ),
    "extension modules": ("import hashlib, ssl, lzma, zoneinfo; print(hashlib.sha256().hexdigest()[:4])", "e3b0"),
    "pickling": (
        "import pickle as p, dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\nprint(p.loads(p.dumps(A(3))))",
        "A(x=3)",
    ),
    "atexit": ("import atexit; atexit.register(print, 'bye')", "bye"),
    "timers": (
        "import signal as s\ns.signal(s.SIGALRM, lambda *a: print('rang'))\ns.setitimer(0, 0.01)\ns.pause()",
        "rang",
    ),
    "copying": ("import shutil; open('a', 'w').write('x'); shutil.copyfile('a', 'b'); print(open('b').read())", "x"),
    "being the main module": ("print(__name__, __import__('sys').argv)", "__main__ ['']"),
    "its own source": ("import inspect\ndef f(): return 1\nprint(inspect.getsource(f).strip())", "def f(): return 1"),
}


@pytest.mark.parametrize(("code", "printed"), ORDINARY.values(), ids=ORDINARY)
def test_ordinary_python_works(code: str, printed: str) -> None:
    result = run(code)
    assert (result.stdout.text().strip(), result.stderr.text(), result.return_code) == (printed, "", 0)


def test_nothing_of_this_package_or_the_workers_environment_is_in_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    code = "import os, sys\nprint(*sorted(os.environ))\nprint([name for name in sys.modules if 'agentic' in name])"
    names, modules = run(code).stdout.text().splitlines()
    known = {"HOME", "LC_CTYPE", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PWD", "TMPDIR"}
    assert set(names.split()) <= known
    assert modules == "[]"


def test_random_numbers_differ_between_programs() -> None:
    async def use(sandbox: Sandbox) -> list[str]:
        code = "import random, numpy as np; print(random.random(), np.random.rand())"
        return [(await sandbox.run(Program(code))).stdout.text() for _ in range(2)]

    first, second = within(use, preload=("numpy", "random"))
    assert not set(first.split()) & set(second.split())


def test_programs_run_at_the_same_time_up_to_the_limit() -> None:
    code = "import time; start = time.monotonic(); time.sleep(0.4); print(start, time.monotonic())"

    async def use(sandbox: Sandbox) -> list[RunResult]:
        return await asyncio.gather(*(sandbox.run(Program(code)) for _ in range(6)))

    spans = [tuple(map(float, result.stdout.text().split())) for result in within(use, max_concurrency=3)]
    assert max(sum(start <= moment < end for start, end in spans) for moment, _ in spans) == 3


def test_a_cancelled_run_leaves_nothing() -> None:
    async def use(sandbox: Sandbox) -> list[str]:
        task = asyncio.ensure_future(sandbox.run(Program("while True: pass")))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await sandbox.run(Program("print(1)"))).stdout.text() == "1\n"
        return children_of(sandbox.zygote_pid)

    assert within(use) == []


def children_of(pid: int | None) -> list[str]:
    return [child for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if alive(child)]


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_two_hundred_programs_leave_no_descriptor_process_file_or_memory() -> None:
    async def use(sandbox: Sandbox) -> None:
        await asyncio.gather(*(sandbox.run(Program("print(1)")) for _ in range(16)))
        descriptors, size = len(os.listdir("/proc/self/fd")), resident_pages(sandbox.zygote_pid)
        for _ in range(25):
            await asyncio.gather(*(sandbox.run(Program("open('a', 'w'); print(1)")) for _ in range(8)))
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert children_of(sandbox.zygote_pid) == []
        assert os.stat(sandbox.scratch_root).st_nlink == 2  # no folder in it
        assert len(os.listdir(f"/proc/{sandbox.zygote_pid}/fd")) < 12
        assert resident_pages(sandbox.zygote_pid) - size < 256

    within(use)


def resident_pages(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


# Sessions


def test_variables_last_between_a_sessions_programs() -> None:
    async def use(sandbox: Sandbox) -> list[str]:
        texts = []
        for code in (
            "x = 20\ndef f(): return x + 1",
            "x += 21; print(f())",
            "1 / 0",
            "print(x); open('a', 'w').write('z')",
        ):
            result = await (await sandbox.session("a")).run(Program(code))
            texts.append(result.stdout.text() + result.stderr.text())
        other = await (await sandbox.session("b")).run(Program("print(open('a').read(), x)"))
        return [*texts, other.stderr.text().splitlines()[-1]]

    *texts, other = within(use)
    assert texts[:2] + texts[3:] == ["", "42\n", "41\n"]
    assert texts[2].startswith(
        'Traceback (most recent call last):\n  File "<cell 3>", line 1, in <module>\n    1 / 0\n'
    )
    assert other == "FileNotFoundError: [Errno 2] No such file or directory: 'a'"


def test_a_sessions_programs_have_files_input_and_values_of_their_own() -> None:
    async def use(sandbox: Sandbox) -> None:
        session = await sandbox.session("a")
        first = await session.run(Program("input()", stdin=b"one", want_value=True, files={"f": b"1"}))
        second = await session.run(
            Program("input() + open('f').read()", stdin=b"two", want_value=True, files={"f": b"2"})
        )
        third = await session.run(Program("import os; os.symlink('/etc', 'e')", fetch_files=["f", "e/passwd"]))
        assert (first.value, second.value, third.files) == ("'one'", "'two2'", {"f": b"2"})
        with pytest.raises(ToolError, match="cannot be written"):
            await session.run(Program("1", files={"e/escaped": b""}))
        assert (await session.run(Program("print('alive')"))).stdout.text() == "alive\n"

    within(use)
    assert not Path("/etc/escaped").exists()


def test_a_session_survives_a_program_that_takes_too_long() -> None:
    async def use(sandbox: Sandbox) -> list[Any]:
        session = await sandbox.session("a")
        await session.run(Program("x = 1"))
        late = await session.run(Program("print('so far')\nwhile True: pass", timeout_s=1.0))
        after = await session.run(Program("print(x)"))
        return [late.status, late.return_code, late.stdout.text(), late.session_lost, after.stdout.text()]

    assert within(use) == [RunStatus.TIMEOUT, None, "so far\n", False, "1\n"]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (
            "import time\nwhile True:\n    try:\n        while True: time.sleep(0.01)\n    except BaseException: pass",
            RunStatus.TIMEOUT,
        ),
        ("sum(range(10**12))", RunStatus.TIMEOUT),
        ("import os; os._exit(1)", RunStatus.FINISHED),
        ("import os; os.abort()", RunStatus.KILLED),
        ("while True: print('x' * 1000)", RunStatus.OUTPUT),
        ("import time\nwhile True:\n    open(str(time.time()), 'w')\n    time.sleep(0.001)", RunStatus.DISK),
    ],
)
def test_a_session_that_must_be_ended_says_so_and_the_next_one_is_new(code: str, status: RunStatus) -> None:
    async def use(sandbox: Sandbox) -> list[Any]:
        await (await sandbox.session("a")).run(Program("x = 1"))
        lost = await (await sandbox.session("a")).run(Program(code, timeout_s=1.0))
        after = await (await sandbox.session("a")).run(Program("print('x' in globals())"))
        return [lost.status, lost.session_lost, after.stdout.text()]

    assert within(use, max_files=50, max_written_bytes=1_000_000) == [status, True, "False\n"]


def test_threads_that_a_program_leaves_behind_rest_between_programs() -> None:
    async def use(sandbox: Sandbox) -> float:
        session = await sandbox.session("a")
        code = "import threading, time\nn = 0\ndef f():\n    global n\n    while True: n += 1; time.sleep(0.001)\n"
        await session.run(Program(code + "threading.Thread(target=f, daemon=True).start()"))
        before = int((await session.run(Program("print(n)"))).stdout.text())
        await asyncio.sleep(0.5)
        return int((await session.run(Program("print(n)"))).stdout.text()) - before

    assert within(use) < 100


def test_a_finished_session_is_gone() -> None:
    async def use(sandbox: Sandbox) -> list[str]:
        await (await sandbox.session("a")).run(Program("x = 1"))
        await sandbox.finish("a")
        await sandbox.finish("never opened")
        assert children_of(sandbox.zygote_pid) == []
        return [(await (await sandbox.session("a")).run(Program("print('x' in globals())"))).stdout.text()]

    assert within(use) == ["False\n"]


def test_an_idle_session_is_closed_and_its_loss_told_once() -> None:
    async def use(sandbox: Sandbox) -> None:
        await (await sandbox.session("a")).run(Program("x = 1"))
        await asyncio.sleep(0.4)
        with pytest.raises(ToolError, match="variables are gone") as error:
            await (await sandbox.session("a")).run(Program("print(x)"))
        assert error.value.status == "disconnected"
        assert (await (await sandbox.session("a")).run(Program("print(2)"))).stdout.text() == "2\n"

    within(use, session_idle_s=0.2)


def test_sessions_are_limited_in_number() -> None:
    async def use(sandbox: Sandbox) -> str:
        await sandbox.session("a")
        with pytest.raises(ToolError) as error:
            await sandbox.session("b")
        return error.value.status

    assert within(use, max_sessions=1) == "unavailable"


def test_a_cancelled_program_ends_its_session() -> None:
    async def use(sandbox: Sandbox) -> None:
        session = await sandbox.session("a")
        task = asyncio.ensure_future(session.run(Program("while True: pass")))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert children_of(sandbox.zygote_pid) == []
        with pytest.raises(ToolError, match="variables are gone"):
            await (await sandbox.session("a")).run(Program("1"))

    within(use)


# Failures of the sandbox itself


def test_a_killed_zygote_fails_what_runs_and_is_started_anew() -> None:
    async def use(sandbox: Sandbox) -> None:
        await (await sandbox.session("a")).run(Program("x = 1"))
        running = asyncio.ensure_future(sandbox.run(Program("import time; time.sleep(60)")))
        pid = sandbox.zygote_pid
        assert pid is not None
        await asyncio.to_thread(eventually, lambda: len(children_of(pid)) == 2)
        processes = children_of(pid)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ToolError, match="died") as error:
            await running
        assert error.value.status == "disconnected"
        with pytest.raises(ToolError, match="variables are gone"):
            await (await sandbox.session("a")).run(Program("print(x)"))
        assert (await sandbox.run(Program("print(2)"))).stdout.text() == "2\n"
        assert (await (await sandbox.session("a")).run(Program("print(3)"))).stdout.text() == "3\n"
        assert sandbox.zygote_pid != pid
        assert len(processes) == 2
        assert not any(map(alive, processes))

    within(use)


def test_a_zygote_killed_amid_a_sessions_program_takes_the_variables_along() -> None:
    async def use(sandbox: Sandbox) -> None:
        running = asyncio.ensure_future((await sandbox.session("a")).run(Program("import time; time.sleep(60)")))
        await asyncio.to_thread(eventually, lambda: len(children_of(sandbox.zygote_pid)) == 1)
        assert sandbox.zygote_pid is not None
        os.kill(sandbox.zygote_pid, signal.SIGKILL)
        with pytest.raises(ToolError, match=r"died.*variables are gone") as error:
            await running
        assert error.value.status == "disconnected"
        assert (await (await sandbox.session("a")).run(Program("print(3)"))).stdout.text() == "3\n"

    within(use)


def test_a_killed_session_is_told_and_replaced() -> None:
    async def use(sandbox: Sandbox) -> None:
        await (await sandbox.session("a")).run(Program("x = 1"))
        os.kill(int(children_of(sandbox.zygote_pid)[0]), signal.SIGKILL)
        await asyncio.sleep(0.2)
        with pytest.raises(ToolError, match="variables are gone"):
            await (await sandbox.session("a")).run(Program("print(x)"))
        assert (await (await sandbox.session("a")).run(Program("print(3)"))).stdout.text() == "3\n"

    within(use)


def test_a_closed_sandbox_is_unavailable() -> None:
    async def main() -> str:
        sandbox = Sandbox(SandboxSettings(preload=()))
        running = asyncio.ensure_future(sandbox.run(Program("import time; time.sleep(60)")))
        await asyncio.sleep(0.5)
        await sandbox.aclose()
        for waiting in (running, sandbox.run(Program("1"))):
            with pytest.raises(ToolError) as error:
                await waiting
            assert error.value.status == "unavailable"
        return str(sandbox.scratch_root)

    assert not Path(asyncio.run(main())).exists()


KILLED_WORKER = """
import asyncio, os, sys
from agentic_rollout.sandbox.execution import Program
from agentic_rollout.sandbox.sandbox import Sandbox
from agentic_rollout.sandbox.settings import SandboxSettings
async def main():
    sandbox = Sandbox(SandboxSettings(preload=(), scratch_dir=sys.argv[1]))
    await (await sandbox.session("a")).run(Program("x = 1"))
    print(sandbox.zygote_pid, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""


def test_nothing_outlives_a_killed_worker(scratch_dir: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_WORKER, str(scratch_dir)], stdout=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL
    assert eventually(lambda: not alive(done.stdout.decode().strip()))
    (left,) = scratch_dir.iterdir()
    os.utime(left, (0, 0))
    within(lambda sandbox: sandbox.run(Program("1")), scratch_dir=str(scratch_dir))
    assert list(scratch_dir.iterdir()) == []


def eventually(holds: Callable[[], bool]) -> bool:
    for _ in range(100):
        if holds():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def scratch_dir() -> Iterator[Path]:
    """A folder that other users may enter, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


# Settings


def test_a_module_that_cannot_be_preloaded_is_a_setting_to_correct(scratch_dir: Path) -> None:
    with pytest.raises(SettingsError, match="'no_such_module' cannot be imported") as error:
        within(lambda sandbox: sandbox.run(Program("1")), preload=("no_such_module",), scratch_dir=str(scratch_dir))
    assert error.value.key == "sandbox.preload"
    assert list(scratch_dir.iterdir()) == []


def test_what_cannot_be_confined_does_not_run() -> None:
    beyond = SandboxSettings.model_construct(preload=(), memory_limit_mb=1 << 50)  # a limit that no kernel takes

    async def main() -> None:
        sandbox = Sandbox(beyond)
        try:
            with pytest.raises(SettingsError, match="a confinement that works") as error:
                await sandbox.run(Program("1"))
            assert error.value.key == "sandbox.sandbox"
        finally:
            await sandbox.aclose()

    asyncio.run(main())


def test_unsafe_is_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    assert find_containment(SandboxSettings(sandbox="unsafe"), key="tools.python").mode == "unsafe"
    assert "tools.python.sandbox is `unsafe`" in caplog.text


def test_unsafe_runs_programs_all_the_same() -> None:
    assert run("print(1)", settings={"sandbox": "unsafe"}).stdout.text() == "1\n"


def test_a_machine_without_walls_is_refused_by_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentic_rollout.sandbox.containment.landlock_version", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SettingsError) as error:
        find_containment(SandboxSettings(), key="sandbox")
    assert "no program `bwrap` on the PATH" in str(error.value)
    assert "landlock: the kernel does not offer it" in str(error.value)


def test_a_scratch_dir_that_is_missing_is_a_setting_to_correct() -> None:
    with pytest.raises(SettingsError) as error:
        Sandbox(SandboxSettings(scratch_dir="/nowhere"))
    assert error.value.key == "sandbox.scratch_dir"


def test_what_the_settings_add_can_be_read(scratch_dir: Path) -> None:
    (scratch_dir / "data").write_text("given")
    code = f"print(open('{scratch_dir}/data').read())\nopen('{scratch_dir}/new', 'w')"
    result = run(code, settings={"readable": (str(scratch_dir),)})
    assert (result.stdout.text(), result.return_code) == ("given\n", 1)
    assert not (scratch_dir / "new").exists()


# Output


def test_output_within_the_limit_is_whole() -> None:
    assert Output(b"abcdef", b"gh", 8).text() == "abcdefgh"
    assert not Output(b"abcdef", b"gh", 8).truncated


def test_cut_output_says_where_and_how_much_is_missing() -> None:
    result = run("print('a' * 50 + 'b' * 50 + 'c' * 100, end='')", settings={"max_output_bytes": 60})
    assert result.stdout.truncated
    assert result.stdout.text() == "a" * 30 + "\n[... 140 bytes left out ...]\n" + "c" * 30
    assert result.stdout.text("end") == "a" * 50 + "b" * 10 + "\n[... 140 bytes left out ...]"


def test_nothing_of_the_output_may_be_kept() -> None:
    assert run("print(1)", settings={"max_output_bytes": 0}).stdout.text() == "\n[... 2 bytes left out ...]\n"
