"""What a process does to itself before it runs a program that nobody has read. Standard library only.

Each step narrows what the next may still do, so the order counts: limits that a parent may have set higher, the change
of user, the promise to gain nothing again, the files, and the filter of system calls last.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from agentic_rollout.sandbox.landlock import build_ruleset, restrict_self
from agentic_rollout.sandbox.seccomp import build_filter, install_filter
from agentic_rollout.sandbox.syscalls import call


@dataclass(frozen=True, slots=True)
class Limits:
    """Hard limits of one process.

    Attributes:
        address_bytes: of address space, preloaded libraries included.
        cpu_s: of processor time: at this, `SIGXCPU`; a second later, the end.
        file_bytes: of each file that it writes.
        tasks: threads that its user may have when it starts one more, its own first thread included.
        open_files: of descriptors.
    """

    address_bytes: int
    cpu_s: int
    file_bytes: int
    tasks: int
    open_files: int


@dataclass(frozen=True, slots=True)
class Confinement:
    """What holds for every program of one sandbox.

    Attributes:
        landlock: version of landlock to use; 0 does without.
        read: files and folders that may be read.
        keep_read: keeps one capability of root's, that of entering folders that only root may enter, because the
            libraries lie in one. Landlock still says which files may be opened.
        best_effort: goes on where a step fails (`sandbox: unsafe`).
    """

    landlock: int
    read: tuple[str, ...]
    keep_read: bool = False
    best_effort: bool = False


def confine(confinement: Confinement, limits: Limits, *, scratch: str, uid: int | None) -> None:
    """Confines this process, which must have one thread, to its scratch folder, which becomes the current one.

    Args:
        confinement: what holds for every program.
        limits: what holds for this one.
        scratch: its folder.
        uid: the user and group to become; None stays.

    Raises:
        OSError: a step failed, and the program must not run.
    """
    attempt = suppress(OSError) if confinement.best_effort else nullcontext()
    os.umask(0o077)
    _volunteer_for_the_oom_killer()
    with attempt:
        _lower_limits(limits)
    with attempt:
        _become(uid, keep_read=confinement.keep_read)
    os.chdir(scratch)
    with attempt:
        _promise()
    with attempt:
        if confinement.landlock:
            restrict_self(build_ruleset(confinement.landlock, read=confinement.read, write=[scratch]))
    with attempt:
        install_filter(build_filter(os.getpid()))


def _volunteer_for_the_oom_killer() -> None:
    """Where memory runs out all the same, a sandboxed program dies before whatever trains."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _lower_limits(limits: Limits) -> None:
    wanted = [
        (resource.RLIMIT_AS, limits.address_bytes, limits.address_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s, limits.cpu_s + 1),
        (resource.RLIMIT_FSIZE, limits.file_bytes, limits.file_bytes),
        (resource.RLIMIT_NPROC, limits.tasks, limits.tasks),
        (resource.RLIMIT_NOFILE, limits.open_files, limits.open_files),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_STACK, 8 << 20, 8 << 20),
    ]
    for which, soft, hard in wanted:
        most = resource.getrlimit(which)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(which, (soft, hard))


_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 1, 4, 8, 38
_CAPABILITY_HEADER = struct.pack("Ii", 0x2008_0522, 0)
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1 << 1, 1 << 2


def _become(uid: int | None, *, keep_read: bool) -> None:
    """Becomes a user without capabilities, except perhaps for reading."""
    kept = _reading_capability() if keep_read else 0
    if uid is not None:
        call("prctl", _PR_SET_KEEPCAPS, 1 if kept else 0, 0, 0, 0)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    sets = struct.pack("6I", kept, kept, 0, 0, 0, 0)  # effective, permitted, inheritable: lower 32, then upper 32
    call("capset", ctypes.c_char_p(_CAPABILITY_HEADER), ctypes.c_char_p(sets))


def _reading_capability() -> int:
    held = ctypes.create_string_buffer(24)
    call("capget", ctypes.c_char_p(_CAPABILITY_HEADER), held)
    permitted: int = struct.unpack_from("I", held, 4)[0]
    return permitted & _DAC_READ_SEARCH or permitted & _DAC_OVERRIDE


def _promise() -> None:
    """To gain no privileges, to be no one's to trace, and to die with the zygote; a change of user would undo these."""
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
