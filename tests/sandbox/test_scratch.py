from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentic_rollout.errors import ToolError
from agentic_rollout.sandbox.scratch import Scratch, ScratchRoot, remove_tree


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    (tmp_path / "scratch").mkdir()
    return Scratch(str(tmp_path / "scratch"), None)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def test_reading_follows_no_link_and_takes_no_folder(scratch: Scratch, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("top-secret")
    inside = Path(scratch.path)
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "up").symlink_to(tmp_path)
    (inside / "folder").mkdir()
    os.mkfifo(inside / "fifo")
    (inside / "file").write_text("x")
    paths = ["link", "up/secret", "folder", "fifo", "missing", "file", "./file"]
    assert scratch.read(paths, max_bytes=100) == {"file": b"x", "./file": b"x"}


def test_reading_stops_at_its_limit(scratch: Scratch) -> None:
    scratch.write({"a": b"1" * 60, "b": b"2" * 60, "c": b"3" * 40})
    assert sorted(scratch.read(["a", "b", "c"], max_bytes=100)) == ["a", "c"]


def test_writing_replaces_a_link_and_enters_none(scratch: Scratch, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    inside = Path(scratch.path)
    (inside / "link").symlink_to(tmp_path / "target")
    (inside / "up").symlink_to(tmp_path)
    os.mkfifo(inside / "fifo")
    scratch.write({"link": b"new", "fifo": b"new"})
    with pytest.raises(ToolError, match="'up/target' cannot be written") as error:
        scratch.write({"up/target": b"new"})
    assert error.value.status == "bad_arguments"
    assert (tmp_path / "target").read_text() == "kept"
    assert [(inside / name).read_text() for name in ("link", "fifo")] == ["new", "new"]


@pytest.mark.parametrize(
    ("files", "max_bytes", "max_files", "exceeded"),
    [
        ({"a": 8192, "d/b": 8192}, 20_000, 3, False),
        ({"a": 8192, "d/b": 8192}, 10_000, 3, True),
        ({"a": 1, "d/b": 1}, 20_000, 2, True),
        ({"/".join("d" * 60): 1}, 20_000, 100, True),
    ],
)
def test_size_number_and_depth_are_limited(
    scratch: Scratch, files: dict[str, int], max_bytes: int, max_files: int, exceeded: bool
) -> None:
    scratch.write({path: b"x" * size for path, size in files.items()})
    assert scratch.exceeds(max_bytes=max_bytes, max_files=max_files) is exceeded


def test_what_is_nested_deeper_than_a_path_can_say_is_removed(folder: Path) -> None:
    top = folder / "top"
    top.mkdir()
    descriptor = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    remove_tree(str(top))
    assert list(folder.iterdir()) == []
    remove_tree(str(top))


def test_links_out_of_a_removed_folder_lead_nowhere(folder: Path) -> None:
    (folder / "kept").mkdir()
    (folder / "kept" / "file").write_text("kept")
    (folder / "top").mkdir()
    (folder / "top" / "link").symlink_to(folder / "kept")
    remove_tree(str(folder / "top"))
    assert (folder / "kept" / "file").read_text() == "kept"


def test_a_root_that_is_never_closed_goes_with_its_owner(folder: Path) -> None:
    root = ScratchRoot(str(folder))
    assert list(folder.iterdir()) == [Path(root.path)]
    del root
    assert list(folder.iterdir()) == []


def test_a_folder_in_use_is_not_removed_and_an_abandoned_one_is(folder: Path) -> None:
    used = ScratchRoot(str(folder))
    os.utime(used.path, (0, 0))
    abandoned = Path(tempfile.mkdtemp(prefix="agentic-sandbox-", dir=folder))
    (abandoned / "lock").touch()
    (abandoned / "file").touch()
    just_made = Path(tempfile.mkdtemp(prefix="agentic-sandbox-", dir=folder))
    (just_made / "lock").touch()
    os.utime(abandoned, (0, 0))
    other = ScratchRoot(str(folder))
    assert sorted(map(str, folder.iterdir())) == sorted([used.path, str(just_made), other.path])
    used.close()
    other.close()
    assert list(folder.iterdir()) == [just_made]
