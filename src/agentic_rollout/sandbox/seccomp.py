"""The seccomp filter of a sandboxed program. Standard library only: the zygote imports it.

It is an allow-list: what is listed in `ALLOWED` passes, what is in `checked` passes if its arguments do, and all else
fails. A deny-list would let through every call that a newer kernel adds. Two errors tell a program what it met: `EPERM`
for a call that is refused on purpose (`REFUSED`), which Python shows as a `PermissionError`, and `ENOSYS` for one that
is not known here, so that the C library falls back to an older call. A call of another architecture, or through the x32
interface, ends the process.

The decisions that are not plain:

- No second process, ever: `fork` and `execve` are refused, and `clone` only makes threads. The life of a program is the
  life of one process, so killing it is complete; nothing can daemonise.
- landlock does not govern modes, owners, times, extended attributes, hard links' targets and, before its third version,
  truncation: all of these are refused, inside the scratch folder too, because a filter cannot see paths.
- Signals go to the program itself only: the filter holds its process id. `fcntl(F_SETOWN)` would send them by a detour.
- `socketpair` makes connected streams, which asyncio wakes its loop with. A datagram pair could send to any address.
- `fallocate` may not reserve room past the end of a file, which the limit of a file's size does not see; `memfd_create`
  and System V shared memory would be memory that no limit counts.

Source: seccomp(2), `Documentation/userspace-api/seccomp_filter.rst` and `include/uapi/linux/` of the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from agentic_rollout.sandbox.syscalls import call, syscall_numbers

ALLOWED = """
    read write futex mmap munmap mprotect madvise brk mremap lseek close newfstatat fstat clock_gettime
    clock_nanosleep nanosleep gettimeofday getpid gettid getrandom sched_yield readv writev pread64 pwrite64 preadv
    pwritev preadv2 pwritev2 close_range stat lstat statx access faccessat faccessat2 readlink readlinkat getdents
    getdents64 getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 symlink symlinkat
    creat ftruncate fsync fdatasync sync_file_range fadvise64 readahead flock umask statfs fstatfs sendfile
    copy_file_range dup dup2 dup3 pipe pipe2 poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl
    epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2 timerfd_create timerfd_settime timerfd_gettime signalfd4
    shutdown getsockname getpeername getsockopt recvfrom msync mincore rt_sigaction rt_sigprocmask rt_sigreturn
    rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack pause getitimer setitimer alarm timer_create timer_settime
    timer_gettime timer_getoverrun timer_delete clock_getres time times getrusage sysinfo uname getppid getuid geteuid
    getgid getegid getgroups getpgrp getpgid getsid getresuid getresgid capget getpriority getrlimit setrlimit
    sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min getcpu
    futex_waitv set_robust_list get_robust_list set_tid_address rseq membarrier restart_syscall exit exit_group wait4
    waitid arch_prctl
""".split()

REFUSED = """
    fork vfork execve execveat setsid setpgid socket connect bind listen accept accept4 sendmsg sendmmsg recvmsg
    recvmmsg setsockopt tkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_send_signal pidfd_getfd ptrace
    process_vm_readv process_vm_writev process_madvise kcmp mount umount2 pivot_root chroot unshare setns
    mount_setattr open_tree move_mount fsopen fsconfig fsmount fspick chmod fchmod fchmodat fchmodat2 chown fchown
    lchown fchownat utime utimes futimesat utimensat truncate link linkat mknod mknodat setxattr lsetxattr fsetxattr
    removexattr lremovexattr fremovexattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
    name_to_handle_at open_by_handle_at inotify_init inotify_init1 inotify_add_watch fanotify_init fanotify_mark
    setuid setgid setreuid setregid setresuid setresgid setgroups setfsuid setfsgid capset personality
    sched_setaffinity sched_setscheduler sched_setparam sched_setattr setpriority ioprio_set shmget shmat shmctl shmdt
    semget semop semtimedop semctl msgget msgsnd msgrcv msgctl mq_open mq_unlink memfd_create mlock mlock2 mlockall
    bpf perf_event_open keyctl add_key request_key userfaultfd io_uring_setup io_uring_enter io_uring_register seccomp
    landlock_create_ruleset landlock_add_rule landlock_restrict_self init_module finit_module delete_module kexec_load
    kexec_file_load reboot swapon swapoff sethostname setdomainname settimeofday clock_settime adjtimex clock_adjtime
    acct quotactl syslog vhangup iopl ioperm modify_ldt
""".split()


@dataclass(frozen=True, slots=True)
class Check:
    """A condition on one argument: its lower 32 bits under `mask` are one of `values`.

    Attributes:
        argument: which, counted from 0.
        values: what passes.
        mask: the bits that are looked at.
        upper: looks at the upper 32 bits instead, which count for pointers only.
    """

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFF_FFFF
    upper: bool = False


# From the kernel's headers; Python's standard library names only some of them.
_CLONE_THREAD = 0x0001_0000
_CLONE_NAMESPACES = 0x7E02_0000
_O_ACCESS_AND_TRUNCATE = os.O_ACCMODE | os.O_TRUNC
_F_DUPFD_CLOEXEC, _F_GETPIPE_SZ = 1030, 1032
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, _F_DUPFD_CLOEXEC, _F_GETPIPE_SZ)  # duplicate, flags, locks
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_PRCTL = (3, 15, 16, 21, 27, 39, 0x53564D41)  # PR_GET_*, PR_SET_NAME, PR_SET_VMA
_OPEN_FLAGS = tuple(  # all but truncating a file that is opened for reading, which landlock 1 and 2 do not see
    access | truncate for access in range(4) for truncate in (0, os.O_TRUNC) if (access, truncate) != (0, os.O_TRUNC)
)


def checked(pid: int) -> dict[str, tuple[Check, ...]]:
    """The calls that depend on their arguments, and what must hold of these.

    Args:
        pid: the process that the filter is for, as itself sees it.
    """
    return {
        "clone": (Check(0, (_CLONE_THREAD,), mask=_CLONE_THREAD | _CLONE_NAMESPACES),),
        "kill": (Check(0, (pid,)),),
        "tgkill": (Check(0, (pid,)),),
        "prlimit64": (Check(0, (0, pid)),),
        "prctl": (Check(0, _PRCTL),),
        "ioctl": (Check(1, _IOCTL),),
        "fcntl": (Check(1, _FCNTL),),
        "open": (Check(1, _OPEN_FLAGS, mask=_O_ACCESS_AND_TRUNCATE),),
        "openat": (Check(2, _OPEN_FLAGS, mask=_O_ACCESS_AND_TRUNCATE),),
        "socketpair": (Check(0, (1,)), Check(1, (1,), mask=0xF)),  # AF_UNIX, SOCK_STREAM
        "sendto": (Check(4, (0,)), Check(4, (0,), upper=True)),  # to nobody but the other end
        "fallocate": (Check(1, (0,)),),
    }


# Classic BPF: operation codes, and where `struct seccomp_data` keeps what.
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16

_ALLOW = 0x7FFF_0000
_KILL = 0x8000_0000
_FAIL = 0x0005_0000

_ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32_BIT = 0x4000_0000

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""


def build_filter(pid: int, machine: str | None = None) -> bytes:
    """The filter's program, for the process `pid`: an array of `struct sock_filter`.

    Args:
        pid: as the process itself sees it.
        machine: as `platform.machine()` names it; this machine unless told otherwise.

    Raises:
        OSError: the architecture is not known here.
    """
    machine = machine or platform.machine()
    numbers = syscall_numbers(machine)
    own: list[Instruction] = []
    for name, checks in checked(pid).items():
        if name in numbers:
            body = _body(checks)
            own += [(_EQUAL, 0, len(body), numbers[name]), *body]
    before, after = _same_for_all(machine)
    return before + _assemble(own) + after


@cache
def _same_for_all(machine: str) -> tuple[bytes, bytes]:
    """What comes before and after the calls that are checked; a zygote's children inherit it."""
    numbers = syscall_numbers(machine)
    before: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine == "x86_64":
        before += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    for name in ALLOWED:
        if name in numbers:
            before += [(_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _ALLOW)]
    after: list[Instruction] = []
    for name in REFUSED:
        if name in numbers:
            after += [(_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    after.append((_RETURN, 0, 0, _FAIL | errno.ENOSYS))
    return _assemble(before), _assemble(after)


def _assemble(program: Sequence[Instruction]) -> bytes:
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _body(checks: tuple[Check, ...]) -> list[Instruction]:
    """Allows if every check holds, refuses otherwise."""
    body: list[Instruction] = []
    for check in checks:
        body.append((_LOAD, 0, 0, _ARGUMENTS_AT + 8 * check.argument + 4 * check.upper))  # both are little-endian
        body.append((_AND, 0, 0, check.mask))
        for index, value in enumerate(check.values):
            body.append((_EQUAL, len(check.values) - index, 0, value))
        body.append((_RETURN, 0, 0, _FAIL | errno.EPERM))
    return [*body, (_RETURN, 0, 0, _ALLOW)]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


_SET_MODE_FILTER = 1


def install_filter(program: bytes) -> None:
    """Puts this process under a filter for good; it must have given up new privileges before.

    Raises:
        OSError: the kernel does not take it.
    """
    call("seccomp", _SET_MODE_FILTER, 0, ctypes.byref(_Program(len(program) // 8, program)))
