"""Lets every attack loose on one sandbox, in a process of its own, and prints what came of each as JSON."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from agentic_rollout.config import build_settings
from agentic_rollout.errors import SettingsError
from agentic_rollout.sandbox.containment import find_containment
from agentic_rollout.sandbox.execution import Program
from agentic_rollout.sandbox.sandbox import Sandbox
from agentic_rollout.sandbox.settings import SandboxSettings
from agentic_rollout.sandbox.syscalls import syscall_numbers
from sandbox.attacks import ATTACKS, PRELUDE, Attack
from sandbox.identity import become_docker_container, become_ordinary_user, guard

LIMITS = {
    "preload": (),
    "wall_time_s": 10.0,
    "cpu_time_s": 5,
    "memory_limit_mb": 256,
    "max_file_bytes": 2 << 20,
    "max_disk_bytes": 8 << 20,
    "max_files": 100,
    "max_written_bytes": 16 << 20,
}


ENDLESS_S = 0.5

# mode -> the version of landlock to make do with; None for the kernel's
MODES = {
    "landlock": None,
    "landlock of version 1": 1,
    "landlock of version 3": 3,
    "bubblewrap": None,
    "bubblewrap without landlock": 0,
}


class Arena:
    """What lies outside the sandbox, and must not change: files open to everyone, servers, and a process to harm."""

    def __init__(self, stack: ExitStack) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="arena-")))
        self.scratch = self.folder / "scratch"
        self.outside = self.folder / "outside"
        self.home = self.outside / "home"
        for folder in (self.folder, self.scratch, self.outside, self.home):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o777)
        for name in ("secret", "writable", "home/secret"):
            (self.outside / name).write_text("top-secret")
            (self.outside / name).chmod(0o666)
        self.tcp = self._listen(stack, socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))
        self.udp = self._listen(stack, socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))
        self.unix = self._listen(stack, socket.AF_UNIX, socket.SOCK_STREAM, str(self.folder / "stream"))
        self.abstract = self._listen(stack, socket.AF_UNIX, socket.SOCK_STREAM, f"\0arena-{secrets.token_hex(8)}")
        self.datagram = self._listen(stack, socket.AF_UNIX, socket.SOCK_DGRAM, str(self.folder / "datagram"))
        self.decoy = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
        stack.callback(self.decoy.wait)
        stack.callback(self.decoy.kill)

    def _listen(self, stack: ExitStack, family: int, kind: int, address: Any) -> socket.socket:
        server = stack.enter_context(socket.socket(family, kind))
        server.bind(address)
        server.setblocking(False)
        if kind == socket.SOCK_STREAM:
            server.listen()
        if family == socket.AF_UNIX and not address.startswith("\0"):
            os.chmod(address, 0o777)
        return server

    def targets(self) -> dict[str, Any]:
        return {
            "arena": str(self.outside),
            "home": str(self.home),
            "secret": str(self.outside / "secret"),
            "writable": str(self.outside / "writable"),
            "tcp": self.tcp.getsockname()[1],
            "udp": self.udp.getsockname()[1],
            "unix": self.unix.getsockname(),
            "abstract": self.abstract.getsockname().decode(),
            "datagram": self.datagram.getsockname(),
            "pids": [os.getpid(), self.decoy.pid],
        }

    def state(self) -> dict[str, Any]:
        """All that an attack could have changed."""
        files = {}
        for path in sorted(self.outside.rglob("*")):
            status = path.lstat()
            text = path.read_text() if path.is_file() else ""
            fields = (status.st_mode, status.st_uid, status.st_nlink, status.st_size, status.st_mtime, text)
            files[str(path)] = (*fields, os.listxattr(path))
        return {
            "files": files,
            "left in scratch": sorted(path.name for root in self.scratch.iterdir() for path in root.glob("?" * 32)),
            "escaped": [p for p in ("/tmp", "/dev/shm", "/var/tmp", "/") if os.path.exists(f"{p}/escaped-sandbox")],
            "decoy": self.decoy.poll(),
            "visited": [name for name in ("tcp", "udp", "unix", "abstract", "datagram") if self._visited(name)],
        }

    def _visited(self, name: str) -> bool:
        server: socket.socket = getattr(self, name)
        try:
            server.recv(1) if server.type == socket.SOCK_DGRAM else server.accept()[0].close()
        except BlockingIOError:
            return False
        return True


def program(attack: Attack, arena: Arena) -> str:
    """The attack as it is run."""
    head = f"TARGETS = {arena.targets()!r}\nNR = {syscall_numbers()!r}\n{PRELUDE}"
    return f"{head}\n{attack.code}\nprint('attempts', attempts)\n"


def descendants() -> list[int]:
    """Processes that stem from this one; as their subreaper, it inherits those whose parents are gone."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return sorted(found - {os.getpid()})


async def left_running(known: set[int]) -> list[int]:
    """Processes that are there in spite of everything; the kernel takes a moment to clear up a namespace."""
    for _ in range(50):
        if not set(descendants()) - known:
            break
        await asyncio.sleep(0.02)
    return sorted(set(descendants()) - known)


async def attack_all(mode: str, arena: Arena) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    mapping = {**LIMITS, "sandbox": mode.split()[0], "scratch_dir": str(arena.scratch)}
    settings = build_settings(SandboxSettings, mapping, key="sandbox")
    containment = find_containment(settings, key="sandbox")
    if MODES[mode] is not None:
        containment = dataclasses.replace(containment, landlock=MODES[mode])
    async with Sandbox(settings, containment=containment) as sandbox:
        await sandbox.run(Program("1"))
        quiet = descendants()
        for attack in ATTACKS:
            outcomes[attack.name] = await attack_once(sandbox, attack, arena, quiet)
        outcomes["mode"] = sandbox.containment.mode
    outcomes["left running"] = await left_running({arena.decoy.pid})
    outcomes["left in scratch"] = sorted(path.name for path in arena.scratch.iterdir())
    return outcomes


async def attack_once(sandbox: Sandbox, attack: Attack, arena: Arena, quiet: list[int]) -> dict[str, Any]:
    before = arena.state()
    zygote = sandbox.zygote_pid
    start_s = time.perf_counter()
    timeout_s = ENDLESS_S if attack.ends == ("timeout",) else None
    result = await sandbox.run(Program(program(attack, arena), fetch_files=attack.files, timeout_s=timeout_s))
    elapsed_s = time.perf_counter() - start_s
    after = await sandbox.run(Program("print(6 * 7)"))
    return {
        "status": result.status,
        "stdout": result.stdout.text()[:20_000],
        "stderr": result.stderr.text()[:2_000],
        "files": sorted(result.files),
        "elapsed_s": elapsed_s,
        "changes": differences(before, arena.state()),
        "left running": await left_running(set(quiet)),
        "same zygote": sandbox.zygote_pid == zygote,
        "works after": after.stdout.text(),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [f"{key}: {before[key]} -> {after[key]}" for key in before if before[key] != after[key]]


@contextmanager
def arena() -> Iterator[Arena]:
    with ExitStack() as stack:
        yield Arena(stack)


def main(mode: str, user: str, profile: str) -> dict[str, Any]:
    os.environ["SECRET_TOKEN"] = "top-secret"
    guard()
    if user == "nobody":
        become_ordinary_user(in_docker=profile == "docker")
    elif profile == "docker":
        become_docker_container()
    with arena() as outside:
        os.environ["HOME"] = str(outside.home)
        try:
            return asyncio.run(attack_all(mode, outside))
        except SettingsError as error:
            return {"unfit": str(error)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
