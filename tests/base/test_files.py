"""Results that a command writes to a path of its caller: whole or not at all."""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pilotfish.base.files import write_output
from pilotfish.cli.options import write_json


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this process grow beyond 100 bytes; writing more ends with an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_earlier_results_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(str(path), {"a": 1})
    before = path.read_bytes()
    with pytest.raises(OSError, match=r"out\.json") as caught, full_disk():
        write_json(str(path), {"a": "x" * 1000})
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_picture_is_whole_or_absent(tmp_path: Path) -> None:
    drawing = pytest.importorskip("pilotfish.lab.drawing")
    path = tmp_path / "plot.png"

    def draw() -> None:
        with drawing.plot(path, "title", "x", "y") as axes:
            axes.plot([1, 2], [1, 2])

    draw()
    before = path.read_bytes()
    assert before.startswith(b"\x89PNG")
    with pytest.raises(OSError, match=r"plot\.png"), full_disk():
        draw()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plot.png"]


def test_modes_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    before = os.umask(0o027)
    try:
        write_output(path, b"1")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    link.symlink_to(path)
    write_output(link, b"2")
    assert link.is_symlink()
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"2", 0o604)


def test_a_pipe_and_a_device_are_written_in_place(tmp_path: Path) -> None:
    pipe, received = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    write_output(pipe, b"piped")
    reader.join()
    assert received == [b"piped"]
    write_output(Path("/dev/null"), b"gone")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(OSError, match="/dev/full") as caught:
        write_output(Path("/dev/full"), b"no room")
    assert caught.value.errno == errno.ENOSPC


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "out.json"
    with pytest.raises(FileNotFoundError) as caught:
        write_output(path, b"1")
    assert caught.value.filename == str(path)
