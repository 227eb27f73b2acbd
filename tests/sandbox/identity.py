"""Becoming another user, or a process as Docker starts them, before a sandbox is tried. For a process of its own."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
from pathlib import Path

from agentic_rollout.sandbox.seccomp import install_filter
from agentic_rollout.sandbox.syscalls import call, syscall_numbers

NOBODY = 65534

_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 4096, 16384, 1 << 18
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER = 24, 38, 36


def guard() -> None:
    """Limits that hold whatever the sandbox fails to hold, and a claim to every process that is left over."""
    wanted = {
        resource.RLIMIT_AS: 24 << 30,
        resource.RLIMIT_FSIZE: 1 << 30,
        resource.RLIMIT_CPU: 240,
        resource.RLIMIT_NPROC: 2000,
    }
    for which, value in wanted.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))
    call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def become_ordinary_user(*, in_docker: bool = False) -> None:
    """Becomes `nobody`, who can read the interpreter."""
    _make_readable([Path(sys.base_prefix), Path(sys.prefix), *map(Path, filter(None, sys.path))])
    if in_docker:
        become_docker_container()
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def become_docker_container() -> None:
    """What Docker denies by default: all but a few of root's capabilities, and the calls that make namespaces."""
    for capability in range(41):
        if capability not in _DOCKER_CAPABILITIES:
            call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
    if os.geteuid() != 0:
        raise PermissionError("only root can become a container")
    install_filter(_docker_filter())
    kept = sum(1 << capability for capability in _DOCKER_CAPABILITIES)
    sets = struct.pack("6I", kept, kept, 0, 0, 0, 0)
    call("capset", ctypes.c_char_p(struct.pack("Ii", 0x2008_0522, 0)), ctypes.c_char_p(sets))


# chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, net_raw, sys_chroot, mknod,
# audit_write, setfcap
_DOCKER_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)

_DOCKER_DENIES = """
    unshare setns mount umount2 pivot_root open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr
    keyctl add_key request_key bpf perf_event_open userfaultfd kcmp process_vm_readv process_vm_writev
    io_uring_setup io_uring_enter io_uring_register open_by_handle_at name_to_handle_at init_module finit_module
    delete_module kexec_load kexec_file_load reboot swapon swapoff syslog quotactl acct settimeofday clock_settime
    sethostname setdomainname vhangup fanotify_init personality
""".split()


def _docker_filter() -> bytes:
    numbers = syscall_numbers()
    load, test, equal, end = 0x20, 0x45, 0x15, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050001, 0x00050026
    program = [(load, 0, 0, 0), (equal, 0, 1, numbers["clone3"]), (end, 0, 0, unknown)]
    for name in _DOCKER_DENIES:
        if name in numbers:
            program += [(equal, 0, 1, numbers[name]), (end, 0, 0, refuse)]
    program += [(equal, 0, 3, numbers["clone"]), (load, 0, 0, 16), (test, 0, 1, 0x7E020000), (end, 0, 0, refuse)]
    program += [(end, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _make_readable(paths: list[Path]) -> None:
    """In a mount namespace of its own, uncovers folders that lie where only root may go: under /root, say."""
    hidden: dict[Path, Path] = {}  # folder -> the closed folder above it
    for path in map(Path.resolve, paths):
        closed = [above for above in reversed(path.parents) if not above.stat().st_mode & 0o001]
        if closed and not any(path.is_relative_to(other) for other in hidden):
            hidden[path] = closed[0]
    if not hidden:
        return
    call("unshare", _CLONE_NEWNS)
    _mount("none", "/", "none", _MS_REC | _MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH) for path in hidden}
    for closed_folder in set(hidden.values()):
        _mount("none", str(closed_folder), "tmpfs", 0)
        os.chmod(closed_folder, 0o755)
    for path, source in sources.items():
        path.mkdir(parents=True)
        _mount(f"/proc/self/fd/{source}", str(path), "none", _MS_BIND | _MS_REC)
        os.close(source)


def _mount(source: str, target: str, kind: str, flags: int) -> None:
    texts = [ctypes.c_char_p(text.encode()) for text in (source, target, kind)]
    call("mount", *texts, flags, 0)
