"""The tool that runs Python: in a sandbox of the worker's own, or on a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from agentic_rollout.config import Settings
from agentic_rollout.errors import SettingsError, ToolError
from agentic_rollout.sandbox.execution import Program
from agentic_rollout.sandbox.results import Output
from agentic_rollout.sandbox.sandbox import Sandbox
from agentic_rollout.sandbox.settings import SandboxSettings
from agentic_rollout.search.build import read_secret
from agentic_rollout.search.http import HttpSettings
from agentic_rollout.tools.base import BaseTool, ToolContext
from agentic_rollout.tools.python_output import Cut, Interpreter, Outcome, Printed
from agentic_rollout.tools.python_server import CodeServer
from agentic_rollout.tools.schemas import signature_schema

EMBEDDED = "embedded"

_ASKED_OF_A_SERVER = {"wall_time_s", "memory_limit_mb"}


class CodeHttpSettings(HttpSettings):
    """How a code server is asked: it says nothing while a program waits and runs. Times are in seconds."""

    read_timeout_s: float = Field(default=280.0, gt=0, description="longest silence of the service")
    total_timeout_s: float = Field(default=290.0, gt=0, description="one call, its retries and all waiting included")


class PythonSettings(Settings):
    """Settings of a tool of type `python`."""

    type: Literal["python"] = "python"
    source: str = Field(default=EMBEDDED, description="embedded, or URL of a server with /run_code")
    stateful: bool = Field(default=False, description="a trajectory's programs share variables and files")
    show_value: bool = Field(default=False, description="show the last expression's value, as a notebook does")
    max_output_chars: int = Field(default=4000, ge=2, description="shown of stdout, of stderr and of a value, each")
    cut: Cut = Field(default="middle", description="where longer output is cut")
    timeout_s: float = Field(default=300.0, gt=0, description="for one call of the tool, all waiting included")
    sandbox: SandboxSettings = Field(
        default_factory=SandboxSettings, description="limits of programs; of a server's, time and memory"
    )
    http: CodeHttpSettings = Field(default_factory=CodeHttpSettings, description="how a server is asked")
    token_env: str | None = Field(default=None, description="environment variable that holds the server's token")


def _python(code: Annotated[str, Field(description="the program")]) -> None:
    """Runs a Python program and shows what it prints. Each call starts anew."""


def _stateful_python(code: Annotated[str, Field(description="the program")]) -> None:
    """Runs a Python program and shows what it prints. Variables last from one call to the next."""


class PythonTool(BaseTool):
    """Runs the program `code`, and shows what it printed, its traceback, and why it was stopped, if it was.

    A program that fails is a result like any other; only a sandbox or a server that fails makes the call fail.

    Args:
        interpreter: where programs run.
        settings: validated.
    """

    def __init__(self, interpreter: Interpreter, settings: PythonSettings) -> None:
        self.schema = signature_schema(_stateful_python if settings.stateful else _python)
        self.timeout_s = settings.timeout_s
        self._interpreter = interpreter
        self._settings = settings

    @classmethod
    def from_settings(cls, settings: PythonSettings, *, key: str) -> PythonTool:
        """The tool over a sandbox or a server.

        Args:
            settings: validated.
            key: name of the mapping that the settings came from, for error messages.

        Raises:
            SettingsError: nothing here can contain programs, or the settings contradict each other.
        """
        _check_times(settings, key)
        open_source = _open_sandbox if settings.source == EMBEDDED else _open_server
        return cls(open_source(settings, key), settings)

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        code = arguments.get("code")
        if not isinstance(code, str) or not code.strip():
            raise ToolError("python needs a program `code`", "bad_arguments")
        code = code.encode(errors="replace").decode()  # a lone surrogate is no program
        outcome = await self._interpreter.run(code, context.trajectory_id)
        settings = self._settings
        return outcome.render(
            max_chars=settings.max_output_chars, cut=settings.cut, wall_time_s=settings.sandbox.wall_time_s
        )

    async def finish(self, trajectory_id: str) -> None:
        await self._interpreter.finish(trajectory_id)

    async def aclose(self) -> None:
        await self._interpreter.aclose()


class EmbeddedInterpreter:
    """Runs programs in a sandbox of this process.

    Args:
        sandbox: closed by `aclose`.
        stateful: whether a trajectory's programs share a session.
        want_value: whether the last expression's value is asked for.
        cut: what of long output is kept.
    """

    def __init__(self, sandbox: Sandbox, *, stateful: bool, want_value: bool, cut: Cut) -> None:
        self.sandbox = sandbox
        self._stateful = stateful
        self._want_value = want_value
        self._cut = cut

    async def run(self, code: str, trajectory_id: str) -> Outcome:
        program = Program(code, want_value=self._want_value)
        if self._stateful:
            result = await (await self.sandbox.session(trajectory_id)).run(program)
        else:
            result = await self.sandbox.run(program)
        return Outcome(
            stdout=self._printed(result.stdout),
            stderr=self._printed(result.stderr),
            ending=result.status,
            return_code=result.return_code,
            value=result.value,
            session_lost=result.session_lost,
        )

    async def finish(self, trajectory_id: str) -> None:
        await self.sandbox.finish(trajectory_id)

    async def aclose(self) -> None:
        await self.sandbox.aclose()

    def _printed(self, output: Output) -> Printed:
        return Printed(output.text(self._cut), output.total_bytes)


def _check_times(settings: PythonSettings, key: str) -> None:
    """A program's time must fit into what waits for it, or slow programs would look like failures."""
    waiting = {"timeout_s": settings.timeout_s}
    if settings.source != EMBEDDED:
        http = settings.http
        waiting |= {"http.read_timeout_s": http.read_timeout_s, "http.total_timeout_s": http.total_timeout_s}
    for name, value in waiting.items():
        if value <= settings.sandbox.wall_time_s:
            expected = f"more than sandbox.wall_time_s, which is {settings.sandbox.wall_time_s:g}"
            raise SettingsError(f"{key}.{name}", value, expected, "Raise it, and leave room for programs to wait.")


def _open_sandbox(settings: PythonSettings, key: str) -> Interpreter:
    kept = max(settings.sandbox.max_output_bytes, 8 * settings.max_output_chars)  # both ends, four bytes a character
    sandbox = Sandbox(settings.sandbox.model_copy(update={"max_output_bytes": kept}), key=f"{key}.sandbox")
    return EmbeddedInterpreter(sandbox, stateful=settings.stateful, want_value=settings.show_value, cut=settings.cut)


def _open_server(settings: PythonSettings, key: str) -> Interpreter:
    if not settings.source.startswith(("http://", "https://")):
        remedy = "Leave it out, or give the server's URL."
        raise SettingsError(f"{key}.source", settings.source, f"{EMBEDDED}, or a URL: http://host:port", remedy)
    given = settings.sandbox.model_fields_set
    if unusable := sorted(given - _ASKED_OF_A_SERVER):
        remedy = "Set the others where the server is started, or take them out."
        expected = f"no setting but {', '.join(sorted(_ASKED_OF_A_SERVER))}, as the programs run on a server"
        raise SettingsError(f"{key}.sandbox", unusable, expected, remedy)
    memory_limit_mb = settings.sandbox.memory_limit_mb if "memory_limit_mb" in given else None
    if memory_limit_mb is not None and settings.stateful:
        remedy = "Set it where the server is started, or take it out."
        raise SettingsError(f"{key}.sandbox.memory_limit_mb", memory_limit_mb, "the server's own in a session", remedy)
    return CodeServer(
        settings.source,
        settings.http,
        wall_time_s=settings.sandbox.wall_time_s,
        memory_limit_mb=memory_limit_mb,
        stateful=settings.stateful,
        want_value=settings.show_value,
        token=None if settings.token_env is None else read_secret(settings.token_env, f"{key}.token_env"),
        key=f"{key}.source",
    )
