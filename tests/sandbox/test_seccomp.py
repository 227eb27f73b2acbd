from __future__ import annotations

import errno
import os
import re
import struct
from pathlib import Path

import pytest

from agentic_rollout.sandbox.seccomp import ALLOWED, REFUSED, build_filter, checked
from agentic_rollout.sandbox.syscalls import call, syscall_numbers

ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
REFUSE, UNKNOWN = FAIL | errno.EPERM, FAIL | errno.ENOSYS
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
PID = 4711

HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"#define __NR_(\w+)\s+(\d+)"),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"), r"#define __NR(?:3264)?_(\w+)\s+(\d+)"),
}
RENAMED = {"newfstatat": "fstatat"}  # the generic table's name of a call


def decide(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter answers: the kernel's interpreter of classic BPF, for the operations that it uses."""
    given = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("=iIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *given)
    program = list(struct.iter_unpack("HBBI", build_filter(PID, machine)))
    accumulator = position = 0
    while True:
        code, if_true, if_false, operand = program[position]
        position += 1
        if code == 0x06:
            return int(operand)
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, operand)[0]
        elif code == 0x54:
            accumulator &= operand
        elif code == 0x15:
            position += if_true if accumulator == operand else if_false
        elif code == 0x35:
            position += if_true if accumulator >= operand else if_false
        else:
            raise AssertionError(f"unknown operation {code:#x}")


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_numbers_are_the_kernels(machine: str) -> None:
    header, pattern = HEADERS[machine]
    if not header.exists():
        pytest.skip("the kernel's headers are not installed")
    real = {name: int(number) for name, number in re.findall(pattern, header.read_text())}
    ours = syscall_numbers(machine)
    known = {name: number for name, number in ours.items() if RENAMED.get(name, name) in real}
    assert len(known) > 200
    assert {name: number for name, number in known.items() if real[RENAMED.get(name, name)] != number} == {}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_each_call_has_one_rule_and_a_number(machine: str) -> None:
    ruled = [*ALLOWED, *REFUSED, *checked(PID)]
    assert len(ruled) == len(set(ruled))
    assert set(ruled) - set(syscall_numbers("x86_64")) == set()
    numbers = syscall_numbers(machine)
    assert len(set(numbers.values())) == len(numbers)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_is_allowed_passes_what_is_refused_does_not_and_the_rest_is_unknown(machine: str) -> None:
    numbers = syscall_numbers(machine)
    assert {decide(machine, numbers[name]) for name in ALLOWED if name in numbers} == {ALLOW}
    assert {decide(machine, numbers[name]) for name in REFUSED if name in numbers} == {REFUSE}
    rest = set(range(600)) - set(numbers.values())
    assert {decide(machine, number) for number in rest} == {UNKNOWN}
    assert decide(machine, numbers["clone3"]) == UNKNOWN


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_of_another_architecture_end_the_process(machine: str) -> None:
    assert decide(machine, 1, architecture=0x40000003) == KILL
    if machine == "x86_64":
        assert decide(machine, 0x40000000) == KILL
        assert decide(machine, 0x40000000 | 39) == KILL


@pytest.mark.parametrize(
    ("name", "passing", "failing"),
    [
        ("clone", [(0x3D0F00,), (0x10000,)], [(17,), (0x4111,), (0x10010000,), (0x20010000,), (0x00030000,)]),
        ("kill", [(PID, 9), (PID, 0)], [(0, 9), (1, 9), (2**32 - 1, 9), (PID + 1, 9)]),
        ("tgkill", [(PID, 1, 6)], [(PID - 1, 1, 6)]),
        ("prlimit64", [(0, 7, 0), (PID, 7, 1)], [(1, 7, 0)]),
        ("openat", [(0, 0, os.O_RDONLY), (0, 0, os.O_WRONLY | os.O_TRUNC | os.O_CREAT)], [(0, 0, os.O_TRUNC)]),
        ("socketpair", [(1, 1, 0), (1, 1 | os.O_CLOEXEC, 0)], [(1, 2, 0), (2, 1, 0), (1, 5, 0), (1, 3, 0)]),
        ("sendto", [(3, 1, 1, 0, 0, 0)], [(3, 1, 1, 0, 1, 16), (3, 1, 1, 0, 1 << 32, 16)]),
        ("fallocate", [(3, 0, 0, 1)], [(3, 1, 0, 1), (3, 2, 0, 1)]),
        ("fcntl", [(3, 1), (3, 1030)], [(3, 8), (3, 10), (3, 15), (3, 1024), (3, 1031)]),
        ("ioctl", [(3, 0x5401)], [(3, 0x5412), (3, 0x541C), (3, 0x8901)]),
        ("prctl", [(15,), (3,)], [(1,), (4,), (22,), (38,), (53,)]),
    ],
)
@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_are_judged_by_their_arguments(
    machine: str, name: str, passing: list[tuple[int, ...]], failing: list[tuple[int, ...]]
) -> None:
    number = syscall_numbers(machine)[name]
    assert [decide(machine, number, *arguments) for arguments in passing] == [ALLOW] * len(passing)
    assert [decide(machine, number, *arguments) for arguments in failing] == [REFUSE] * len(failing)


def test_the_upper_half_of_a_number_that_the_kernel_ignores_is_no_way_around() -> None:
    numbers = syscall_numbers("x86_64")
    assert decide("x86_64", numbers["kill"], (7 << 32) | (PID + 1), 9) == REFUSE
    assert decide("x86_64", numbers["clone"], (1 << 48) | 0x10000000) == REFUSE


def test_an_unknown_architecture_is_said() -> None:
    with pytest.raises(OSError, match="no table of system calls for riscv64"):
        syscall_numbers("riscv64")


def test_a_call_that_fails_says_which() -> None:
    assert call("getpid") == os.getpid()
    with pytest.raises(PermissionError if os.geteuid() else OSError, match="chroot"):
        call("chroot", 0)
