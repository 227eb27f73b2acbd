"""What can contain a program on this machine, and how the zygote is started in it."""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentic_rollout.errors import SettingsError
from agentic_rollout.sandbox.landlock import landlock_version
from agentic_rollout.sandbox.settings import SandboxSettings
from agentic_rollout.sandbox.syscalls import syscall_numbers

logger = logging.getLogger(__name__)

_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

# Nothing else is inherited. A numerical library that starts a thread per core would run into the limits.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# The package's own __init__ loads what has no place in the zygote: its folder stands in for it.
_BOOTSTRAP = """
import sys, types
package = types.ModuleType("agentic_rollout")
package.__path__ = [sys.argv[1]]
sys.modules["agentic_rollout"] = package
from agentic_rollout.sandbox.zygote import main
main(sys.argv[2], int(sys.argv[3]))
"""

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Containment:
    """What contains the programs of a sandbox.

    Attributes:
        mode: the outer wall; landlock is used inside bubblewrap too where the kernel has it.
        landlock: the version of landlock to use; 0 does without.
        bwrap: path of bubblewrap's program, where it is the mode.
    """

    mode: Literal["landlock", "bubblewrap", "unsafe"]
    landlock: int
    bwrap: str | None = None


def find_containment(settings: SandboxSettings, *, key: str) -> Containment:
    """Chooses what contains programs here.

    Args:
        settings: validated.
        key: the settings' own name, for error messages.

    Raises:
        SettingsError: neither bubblewrap nor landlock works, or not the one that is asked for; it says why.
    """
    try:
        syscall_numbers()
    except OSError as error:
        raise _refusal(key, settings.sandbox, str(error)) from None
    landlock = landlock_version()
    if settings.sandbox == "unsafe":
        logger.warning(
            "%s.sandbox is `unsafe`: programs that a model writes run with whatever containment happens to work here. "
            "They may read files and secrets, reach the network and harm this machine.",
            key,
        )
        return Containment("unsafe", landlock)
    problems = []
    if settings.sandbox in ("auto", "bubblewrap"):
        bwrap = shutil.which("bwrap")
        problem = bubblewrap_problem(bwrap)
        if bwrap is not None and problem is None:
            return Containment("bubblewrap", landlock, bwrap)
        problems.append(f"bubblewrap: {problem}")
    if settings.sandbox in ("auto", "landlock"):
        if landlock:
            return Containment("landlock", landlock)
        problems.append("landlock: the kernel does not offer it, or the container's seccomp profile denies it")
    raise _refusal(key, settings.sandbox, "; ".join(problems))


def bubblewrap_problem(bwrap: str | None) -> str | None:
    """Why bubblewrap does not work here; None where it does."""
    if bwrap is None:
        return "no program `bwrap` on the PATH"
    command = [bwrap, *_isolation(bwrap), "--ro-bind", "/", "/", "true"]
    try:
        done = subprocess.run(command, env={}, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    reason = done.stderr.decode(errors="replace").strip()
    return None if done.returncode == 0 else reason or f"it ended with {done.returncode}"


def readable_paths(settings: SandboxSettings) -> list[str]:
    """What programs may read: the interpreter's libraries, the system's, and what the settings add."""
    return [*dict.fromkeys([*_library_folders(), *_SYSTEM_LIBRARIES, *settings.readable])]


def needs_reading_capability(paths: Sequence[str], containment: Containment) -> bool:
    """Whether a user who owns nothing could not read `paths`: under /root, say, where conda and pyenv often are."""
    if os.geteuid() != 0:
        return False
    leaves = [Path(path).resolve() for path in paths if os.path.exists(path)]
    # Bubblewrap makes the folders above those that it binds anew, open to all.
    above = set() if containment.mode == "bubblewrap" else {parent for leaf in leaves for parent in leaf.parents}
    entered = above | {leaf for leaf in leaves if leaf.is_dir()}
    return not all(path.stat().st_mode & 0o001 for path in entered)


def zygote_command(
    containment: Containment,
    settings: SandboxSettings,
    *,
    scratch: str,
    channel: int,
    trial: Mapping[str, Any],
) -> list[str]:
    """The command line of the zygote, to be run with `zygote_environment` and no descriptor but `channel`.

    Args:
        containment: what it runs in.
        settings: validated.
        scratch: the folder of the scratch folders.
        channel: the zygote's end of the socket.
        trial: an order that it tries the confinement with.
    """
    read = readable_paths(settings)
    keep_read = containment.landlock > 0 and needs_reading_capability([*read, scratch], containment)
    configuration = {
        "path": _import_path(),
        "preload": settings.preload,
        "confinement": {
            "landlock": containment.landlock,
            "read": [*read, *_DEVICES],
            "keep_read": keep_read,
            "best_effort": containment.mode == "unsafe",
        },
        "trial": trial,
    }
    interpreter = os.path.realpath(sys.executable)
    arguments = ["-I", "-S", "-X", "utf8", "-c", _BOOTSTRAP, str(_PACKAGE), json.dumps(configuration), str(channel)]
    if containment.bwrap is None:
        return [interpreter, *arguments]
    folders = [*read, interpreter, str(_PACKAGE / "sandbox")]
    binds = [argument for path in folders for argument in ("--ro-bind-try", path, path)]
    devices = [argument for path in _DEVICES for argument in ("--dev-bind-try", path, path)]
    above = dict.fromkeys(str(parent) for path in [*folders, scratch] for parent in reversed(Path(path).parents[:-1]))
    open_to_all = [argument for path in above for argument in ("--dir", path)]  # what is made unasked is root's alone
    privileges = ["--cap-add", "CAP_DAC_READ_SEARCH"] if keep_read else []
    walls = [*_isolation(containment.bwrap), *privileges, *open_to_all, *binds, *devices, "--bind", scratch, scratch]
    return [containment.bwrap, *walls, "--remount-ro", "/", "--chdir", "/", interpreter, *arguments]


def zygote_environment() -> dict[str, str]:
    """All of the zygote's environment, and so of every program's."""
    return dict(_ENVIRONMENT)


def _library_folders() -> list[str]:
    paths = sysconfig.get_paths()
    shared = sysconfig.get_config_var("LIBDIR")
    folders = [paths["stdlib"], paths["platstdlib"], *site.getsitepackages(), *([shared] if shared else [])]
    return [folder for folder in folders if os.path.isdir(folder)]


def _import_path() -> list[str]:
    """The standard library and the installed packages, without the folders of packages under development."""
    roots = tuple(_library_folders())
    return [path for path in sys.path if path.startswith(roots) and os.path.exists(path)]


@functools.cache
def _isolation(bwrap: str) -> tuple[str, ...]:
    """Namespaces and capabilities. Root keeps what gives each program a user of its own, others need a namespace."""
    common = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    common += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if os.geteuid() == 0:
        return (*common, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    listed = subprocess.run([bwrap, "--help"], env={}, capture_output=True, timeout=10, check=False)
    further = ["--disable-userns"] if b"--disable-userns" in listed.stdout + listed.stderr else []
    return (*common, "--unshare-user", *further)


def _refusal(key: str, value: str, reason: str) -> SettingsError:
    return SettingsError(
        f"{key}.sandbox",
        value,
        f"something that can contain a program here ({reason})",
        "Use a kernel from 5.13 on with landlock enabled, or install bubblewrap where user namespaces are allowed. "
        "`sandbox: unsafe` runs programs without containment.",
    )
