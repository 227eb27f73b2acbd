"""Scratch folders. Their contents are a stranger's: nothing here follows a link or trusts a depth, a mode or a name."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import stat
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from agentic_rollout.errors import ToolError

logger = logging.getLogger(__name__)

_PREFIX = "agentic-sandbox-"
_LOCK = "lock"
_MAX_DEPTH = 50
_JUST_MADE_S = 60.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ScratchRoot:
    """The folder that holds the scratch folders of one sandbox.

    It is removed when it is closed, or else with this object or the worker's end. It is locked until then, so that the
    next sandbox can tell one whose worker was killed and remove it.

    Args:
        parent: where it is made; None for the system's folder for temporary files.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, parent: str | None) -> None:
        parent = os.path.realpath(parent or tempfile.gettempdir())
        _remove_abandoned(parent)
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        lock = os.open(f"{self.path}/{_LOCK}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self._remove = weakref.finalize(self, _remove_root, self.path, lock, os.getpid())
        os.chmod(self.path, 0o311)  # entered but not listed, so that a program cannot learn another's folder

    def create(self, uid: int | None) -> Scratch:
        """A new folder, which belongs to `uid`; None leaves it the worker's."""
        path = f"{self.path}/{secrets.token_hex(16)}"
        os.mkdir(path, 0o700)
        if uid is not None:
            os.chown(path, uid, uid)
        return Scratch(path, uid)

    def close(self) -> None:
        """Removes the folder with all that is in it."""
        self._remove()


class Scratch:
    """The folder of one program or session.

    Args:
        path: absolute.
        uid: whom its contents belong to; None for the worker's own user.
    """

    def __init__(self, path: str, uid: int | None) -> None:
        self.path = path
        self._uid = uid

    def write(self, files: Mapping[str, bytes]) -> None:
        """Writes files, and the folders that they are in.

        Raises:
            ToolError: `bad_arguments`, if a path leads out of the folder or cannot be written.
        """
        for path, data in files.items():
            *folders, name = _parts(path)
            try:
                with self._entered(folders, create=True) as folder:
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder)
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
                    with open(descriptor, "wb") as file:
                        self._give(descriptor)
                        file.write(data)
            except OSError as error:
                raise ToolError(f"the file {path!r} cannot be written ({error.strerror})", "bad_arguments") from error

    def read(self, paths: Iterable[str], *, max_bytes: int) -> dict[str, bytes]:
        """Contents of the regular files among `paths`; what is not there, or is no regular file, is left out.

        Args:
            paths: relative to the folder.
            max_bytes: of all files together; a file that would go beyond is left out.

        Raises:
            ToolError: `bad_arguments`, if a path leads out of the folder.
        """
        found: dict[str, bytes] = {}
        for path in paths:
            *folders, name = _parts(path)
            with suppress(OSError), self._entered(folders) as folder:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                with open(os.open(name, flags, dir_fd=folder), "rb") as file:
                    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                        continue
                    data = file.read(max_bytes + 1)
                if len(data) <= max_bytes:
                    max_bytes -= len(data)
                    found[path] = data
        return found

    def exceeds(self, *, max_bytes: int, max_files: int) -> bool:
        """Whether the folder holds more than this, or hides what it holds."""
        size, count = 0, -1  # the folder itself is not counted
        hidden: list[OSError] = []
        for folder, _, names, descriptor in os.fwalk(self.path, onerror=hidden.append):
            count += 1 + len(names)
            if count > max_files or folder.count("/") - self.path.count("/") > _MAX_DEPTH:
                return True
            for name in names:
                with suppress(FileNotFoundError):
                    size += os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_blocks * 512
        return size > max_bytes or any(not isinstance(error, FileNotFoundError) for error in hidden)

    def remove_if_empty(self) -> bool:
        """Removes the folder where that is quickly done; says whether it was."""
        with suppress(OSError):
            os.rmdir(self.path)
            return True
        return False

    def remove(self) -> None:
        """Removes the folder with all that is in it; nothing may run in it any more."""
        remove_tree(self.path)

    @contextmanager
    def _entered(self, folders: Iterable[str], *, create: bool = False) -> Iterator[int]:
        descriptor = os.open(self.path, _FOLDER)
        try:
            for name in folders:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=descriptor)
                        if self._uid is not None:
                            os.chown(name, self._uid, self._uid, dir_fd=descriptor, follow_symlinks=False)
                inner = os.open(name, _FOLDER, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    def _give(self, descriptor: int) -> None:
        if self._uid is not None:
            os.fchown(descriptor, self._uid, self._uid)


def check_paths(paths: Iterable[str]) -> None:
    """Makes sure that paths lead nowhere but into the folder that they are relative to.

    Raises:
        ToolError: `bad_arguments`, if one may not.
    """
    for path in paths:
        _parts(path)


def remove_tree(path: str) -> None:
    """Removes a folder whose contents may have been made to resist: nested deeper than a path can say, or locked."""
    try:
        os.chmod(path, 0o700, follow_symlinks=True)
        top = os.open(path, _FOLDER)
    except FileNotFoundError:
        return
    try:
        while names := os.listdir(top):
            for name in names:
                _lift_or_remove(top, name)
    finally:
        os.close(top)
    os.rmdir(path)


def _lift_or_remove(top: int, name: str) -> None:
    """Removes one entry of `top`; the folders in a folder come to lie beside it first, so that no depth is too much."""
    if not _is_opened_folder(name, top):
        return
    folder = os.open(name, _FOLDER, dir_fd=top)
    try:
        for inner in os.listdir(folder):
            if _is_opened_folder(inner, folder):
                os.rename(inner, secrets.token_hex(16), src_dir_fd=folder, dst_dir_fd=top)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)


def _is_opened_folder(name: str, parent: int) -> bool:
    """Makes a folder accessible, removes anything else; says which."""
    try:
        os.unlink(name, dir_fd=parent)
    except IsADirectoryError:
        os.chmod(name, 0o700, dir_fd=parent)
        return True
    return False


def _remove_root(path: str, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the worker ends
    try:
        remove_tree(path)
    except OSError as error:
        logger.warning("the folder %s could not be removed: %s", path, error)
    finally:
        os.close(lock)


def _remove_abandoned(parent: str) -> None:
    """Removes the folders of sandboxes whose workers were killed."""
    for root in Path(parent).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - root.stat().st_mtime < _JUST_MADE_S:
                continue  # perhaps not locked yet
        try:
            lock = os.open(root / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or one that is just being made or removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(str(root))
        except OSError as error:
            logger.debug("the folder %s stays: %s", root, error)
        finally:
            os.close(lock)


def _parts(path: str) -> tuple[str, ...]:
    parts = PurePosixPath(path).parts
    if not parts or PurePosixPath(path).is_absolute() or ".." in parts or "\0" in path:
        raise ToolError(f"the path {path!r} must be relative, without `..`", "bad_arguments")
    return parts
