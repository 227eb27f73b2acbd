"""Answers on disk, in SQLite: shared by the processes of a machine, bounded, and never why a search fails."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_FILE = "answers.sqlite"
_BUSY_S = 0.5  # how long another process may hold the file
_BYPASS_S = 60.0  # how long the file is left alone after a failure
_VARIABLES = 500  # SQLite allows 999 in one statement everywhere

_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, answer BLOB NOT NULL);
"""


class DiskCache:
    """Bytes by key, in one file that several processes may use at a time.

    A file that is corrupt, locked or on a full disk is bypassed for a minute, with a warning: reads find nothing,
    writes are lost. All access is in a thread of its own.

    Args:
        folder: on a local disk, as SQLite's locks are not sound on network file systems. Made if need be.
        size: the most answers kept; the oldest go first.
    """

    def __init__(self, folder: str | Path, size: int) -> None:
        self._path = Path(folder) / _FILE
        self._size = size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search-cache")
        self._connection: sqlite3.Connection | None = None
        self._bypassed_until = 0.0

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The answer to each key, None where there is none."""

        def read(connection: sqlite3.Connection) -> dict[bytes, bytes]:
            found: dict[bytes, bytes] = {}
            for start in range(0, len(keys), _VARIABLES):
                part = keys[start : start + _VARIABLES]
                marks = ",".join("?" * len(part))
                found.update(connection.execute(f"SELECT key, answer FROM answers WHERE key IN ({marks})", part))
            return found

        found = await self._run(read)
        return [None] * len(keys) if found is None else [found.get(key) for key in keys]

    async def put(self, answers: Mapping[bytes, bytes]) -> None:
        """Keeps answers, in the place of older ones to the same keys."""

        def write(connection: sqlite3.Connection) -> None:
            with connection:
                connection.executemany("INSERT OR REPLACE INTO answers (key, answer) VALUES (?, ?)", answers.items())
                # Numbers only grow, so that the newest `size` numbers hold at most `size` answers.
                connection.execute(
                    "DELETE FROM answers WHERE number <= (SELECT MAX(number) FROM answers) - ?", (self._size,)
                )

        if answers:
            await self._run(write)

    async def aclose(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown()

    async def _run(self, action: Callable[[sqlite3.Connection], ResultT]) -> ResultT | None:
        """What `action` returns, or None where the file is bypassed."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run_in_thread, action)

    def _run_in_thread(self, action: Callable[[sqlite3.Connection], ResultT]) -> ResultT | None:
        if time.monotonic() < self._bypassed_until:
            return None
        try:
            return action(self._connect())
        except (sqlite3.Error, OSError) as error:
            self._bypassed_until = time.monotonic() + _BYPASS_S
            logger.warning("search cache %s is bypassed for %g s: %s", self._path, _BYPASS_S, error)
            self._disconnect()
            return None

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self._path, timeout=_BUSY_S)
            self._connection.executescript(_SCHEMA)
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
