"""Landlock: which files a sandboxed program may open. Standard library only: the zygote imports it.

A ruleset takes away every right that the kernel's landlock knows, then gives some back beneath certain folders. From
version 4 on it also takes away TCP, from version 6 on signals and abstract sockets to the outside. What landlock does
not govern (modes, times, attributes, sockets before version 4) is refused by the seccomp filter.

Source: landlock(7) and `include/uapi/linux/landlock.h` of the kernel.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence

from agentic_rollout.sandbox.syscalls import call

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _MAKE_SYM = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15

_NET = 0b11  # bind and connect by TCP
_SCOPES = 0b11  # abstract unix sockets, signals

_READ = _READ_FILE | _READ_DIR
_WRITE = _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SYM | _REFER | _TRUNCATE
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

_ASK_VERSION = 1
_PATH_BENEATH = 1


def landlock_version() -> int:
    """The version of landlock that the kernel offers; 0 where it offers none, or may not be asked."""
    try:
        return call("landlock_create_ruleset", 0, 0, _ASK_VERSION)
    except OSError:
        return 0


def build_ruleset(version: int, *, read: Sequence[str], write: Sequence[str]) -> int:
    """A ruleset as an open descriptor, to be given to `restrict_self`.

    Args:
        version: what to use of landlock; at most `landlock_version()`.
        read: files and folders that may be read; those that are not there are left out.
        write: files and folders that may be read and written.

    Raises:
        OSError: the kernel does not take it, or a path of `write` cannot be opened.
    """
    handled = _handled(version)
    fields = [handled, *([_NET] if version >= 4 else []), *([_SCOPES] if version >= 6 else [])]
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    ruleset = call("landlock_create_ruleset", ctypes.c_char_p(attributes), len(attributes), 0)
    for path in read:
        if os.path.exists(path):
            _allow(ruleset, path, _READ & handled)
    for path in write:
        _allow(ruleset, path, _WRITE & handled)
    return ruleset


def restrict_self(ruleset: int) -> None:
    """Puts this thread under a ruleset for good, and closes it; new privileges must have been given up before.

    Raises:
        OSError: the kernel does not take it.
    """
    call("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def _handled(version: int) -> int:
    newest = {1: _MAKE_SYM, 2: _REFER, 3: _TRUNCATE, 4: _TRUNCATE}.get(version, _IOCTL_DEV)
    return 2 * newest - 1


def _allow(ruleset: int, path: str, rights: int) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, parent)
        call("landlock_add_rule", ruleset, _PATH_BENEATH, ctypes.c_char_p(rule), 0)
    finally:
        os.close(parent)
