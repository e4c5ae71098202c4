"""Earlier texts on disk: whole ones survive whatever happens to their file; one device has it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.files import write_whole
from pilotfish.device_runtime.texts.text_memory import TextMemory
from pilotfish.drafting.lookup import Recollection
from pilotfish.speculation.corpus import BREAK
from tests.support.examples import examples

SIZE = 100  # of the vocabulary
TEXTS = [[1, 2, 3], [4], [5, 6, 99, 7], [8, 9]]


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.uint32)


def kept_rows(memory: TextMemory, vocabulary: str = "words") -> list[list[int]]:
    """All texts that a device searches."""
    held = memory.texts(vocabulary, SIZE).snapshot().ids
    parts = np.split(held, np.flatnonzero(held == BREAK) + 1)
    return [part[:-1].tolist() for part in parts if len(part)]


def written(folder: Path, texts: list[list[int]] = TEXTS, vocabulary: str = "words") -> Path:
    """Keep texts there; returns their file."""
    memory = TextMemory(folder)
    for text in texts:
        memory.texts(vocabulary, SIZE).add(ids(*text))
    memory.close()
    (path,) = folder.glob("*.texts")
    return path


def reopened(folder: Path, vocabulary: str = "words", **options: int) -> list[list[int]]:
    memory = TextMemory(folder, **options)
    try:
        return kept_rows(memory, vocabulary)
    finally:
        memory.close()


@given(st.lists(st.lists(st.integers(0, SIZE - 1), max_size=20), min_size=1, max_size=9))
@examples(50)
def test_texts_come_back(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("texts")
    written(folder, texts)
    assert reopened(folder) == [text for text in texts if text]


def test_torn_at_any_byte_whole_texts_remain(tmp_path):
    path = written(tmp_path)
    blob = path.read_bytes()
    ends = np.cumsum([8 + 4 * len(text) for text in TEXTS])
    assert ends[-1] == len(blob)
    for length in range(len(blob) + 1):
        path.write_bytes(blob[:length])
        whole = [text for text, end in zip(TEXTS, ends, strict=True) if end <= length]
        memory = TextMemory(tmp_path)
        assert kept_rows(memory) == whole
        memory.texts("words", SIZE).add(ids(50, 51))  # what is added next is not lost behind it
        memory.close()
        assert reopened(tmp_path) == [*whole, [50, 51]]


@pytest.mark.parametrize("tail", [b"\0" * 3, b"\0" * 4096, b"\xff" * 4096, os.urandom(500)])
def test_what_a_power_cut_left_behind_is_no_text(tmp_path, tail):
    path = written(tmp_path)
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes() + tail)
    memory = TextMemory(tmp_path)
    assert kept_rows(memory) == TEXTS
    assert path.stat().st_size == whole
    memory.texts("words", SIZE).add(ids(50, 51))
    memory.close()
    assert reopened(tmp_path) == [*TEXTS, [50, 51]]


@pytest.mark.parametrize("text", [[], [5]])
def test_a_file_of_any_size_is_opened_in_little_memory(tmp_path, text):
    """Texts of one token, and a hole of 50 GB; more than 16 bytes a token are never written."""
    most = 10_000
    path = written(tmp_path, [text])
    path.write_bytes(path.read_bytes() * 2 * most)
    os.truncate(path, 50 << 30)
    memory = TextMemory(tmp_path, max_tokens=most)
    tracemalloc.start()
    try:
        held = memory.texts("words", SIZE).snapshot().ids
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(held) == len(text) * most
    assert peak < 2 << 20
    assert path.stat().st_size <= 16 * most
    memory.close()


def test_a_changed_byte_is_noticed_wherever_it_is(tmp_path):
    path = written(tmp_path)
    blob = path.read_bytes()
    for at in range(len(blob)):
        path.write_bytes(blob[:at] + bytes([blob[at] ^ 0x40]) + blob[at + 1 :])
        result = reopened(tmp_path)
        assert result == TEXTS[: len(result)]
        assert len(result) < len(TEXTS)


def test_ids_beyond_the_vocabulary_are_left_out(tmp_path):
    written(tmp_path, [[1, 2], [3, SIZE], [0xFFFF_FFFF, 4], [5, SIZE - 1]])
    assert reopened(tmp_path) == [[1, 2], [5, SIZE - 1]]


def test_each_vocabulary_has_its_own(tmp_path):
    written(tmp_path, [[1, 2]])
    memory = TextMemory(tmp_path)
    assert kept_rows(memory, "others") == []
    memory.texts("others", SIZE).add(ids(3, 4))
    assert kept_rows(memory) == [[1, 2]]
    assert kept_rows(memory, "others") == [[3, 4]]
    memory.close()
    assert len(list(tmp_path.glob("*.texts"))) == 2
    assert reopened(tmp_path, "a third") == []


def test_off_keeps_nothing_and_none_keeps_it_in_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, wanted in (("off", []), (None, [[1, 2]])):
        memory = TextMemory(words)
        memory.texts("words", SIZE).add(ids(1, 2))
        assert kept_rows(memory) == wanted
        memory.close()
    assert list(tmp_path.iterdir()) == []


# One device at a time

HOLDS = """
import sys
from pilotfish.device_runtime.texts.text_memory import TextMemory
memory = TextMemory(sys.argv[1])
memory.texts(sys.argv[2], 100)
print("held", flush=True)
sys.stdin.read()
"""


def holder(folder: Path, vocabulary: str) -> subprocess.Popen[str]:
    """Another process, which has this vocabulary's texts open."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder), vocabulary],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_another_process_has_them(tmp_path):
    written(tmp_path)
    memory = TextMemory(tmp_path)
    with holder(tmp_path, "words") as process:
        with pytest.raises(UnsupportedError, match="Another device keeps its texts in"):
            memory.texts("words", SIZE)
        process.kill()  # however it ends
        process.wait()
        assert kept_rows(memory) == TEXTS
    memory.close()


def test_texts_that_another_process_has_take_nothing_from_the_others(tmp_path):
    """A device meets an edge of another vocabulary in vain, and is led back to the first one."""
    memory = TextMemory(tmp_path)
    memory.texts("words", SIZE).add(ids(1, 2))
    with holder(tmp_path, "others") as process:
        with pytest.raises(UnsupportedError, match="Another device"):
            memory.texts("others", SIZE)
        memory.texts("words", SIZE).add(ids(3, 4))
        process.kill()
        process.wait()
    memory.close()
    assert reopened(tmp_path) == [[1, 2], [3, 4]]


def test_a_file_that_its_holder_writes_anew_in_this_moment_is_not_taken(tmp_path, monkeypatch):
    """It was opened before it was replaced, and is locked when its holder has left it."""
    path = written(tmp_path)
    real = fcntl.flock

    def late(file: int, how: int) -> None:
        write_whole(path, path.read_bytes(), 0o600)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UnsupportedError, match="Another device"):
        reopened(tmp_path)
    monkeypatch.undo()
    assert reopened(tmp_path) == TEXTS


def test_a_disk_without_locks_is_called_so(tmp_path, monkeypatch):
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnsupportedError, match=r"cannot be kept in .* \(No locks available\)"):
        reopened(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == opened


# Disks

FILLS = """
import resource, sys
import numpy as np
from pilotfish.device_runtime.texts.text_memory import TextMemory
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
memory = TextMemory(sys.argv[1])
for at in range(50):
    memory.texts("words", 100).add(np.full(10, at, np.uint32))
print(len(memory.texts("words", 100).snapshot().ids))
"""


def test_a_full_disk_costs_no_text_that_is_there_already(tmp_path):
    completed = subprocess.run(
        [sys.executable, "-c", FILLS, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert completed.stdout == "550\n"  # in memory all go on
    (warning,) = completed.stderr.splitlines()
    assert warning.startswith("texts are kept in memory only from now on: ")
    assert reopened(tmp_path) == [[at] * 10 for at in range(1000 // 48)]
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size == 1000 // 48 * 48


def test_a_file_is_written_anew_when_it_is_twice_what_is_used(tmp_path):
    most, sizes = 300, []
    memory = TextMemory(tmp_path, max_tokens=most)
    for at in range(400):
        memory.texts("words", SIZE).add(ids(*[at % SIZE] * 9))
        (path,) = tmp_path.iterdir()  # and nothing is left beside it
        sizes.append(path.stat().st_size)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert max(sizes) <= 8 * most + 44
    assert any(after < before for before, after in pairwise(sizes))
    memory.close()
    result = reopened(tmp_path, max_tokens=most)
    assert len(result) >= 22  # three quarters of 30
    assert result == [[at % SIZE] * 9 for at in range(400 - len(result), 400)]


def test_a_file_that_was_written_anew_is_still_held(tmp_path):
    memory = TextMemory(tmp_path, max_tokens=50)
    for at in range(60):
        memory.texts("words", SIZE).add(ids(*[at] * 9))
    other = TextMemory(tmp_path, max_tokens=50)
    with pytest.raises(UnsupportedError, match="Another device"):
        other.texts("words", SIZE)
    memory.close()
    assert kept_rows(other)[-1] == [59] * 9
    other.close()


def test_it_is_readable_by_its_owner_alone(tmp_path):
    folder = tmp_path / "a" / "b"
    before = os.umask(0)
    try:
        path = written(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_file_that_all_could_read_is_closed_to_them(tmp_path):
    path = written(tmp_path)
    path.chmod(0o644)
    assert reopened(tmp_path) == TEXTS
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    path = written(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UnsupportedError, match="it is not a regular file"):
        reopened(tmp_path)


def test_a_folder_that_cannot_be_made_is_said_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UnsupportedError, match=r"Texts cannot be kept in .*: name another"):
            TextMemory(folder)


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path):
    path = written(tmp_path / "texts")
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsupportedError, match="cannot be kept"):
        reopened(tmp_path / "texts")
    assert not (tmp_path / "elsewhere").exists()


# What a lane keeps of its conversations


def test_a_conversation_that_goes_on_is_kept_once():
    memory = TextMemory()
    lane = Recollection(memory)
    for end in (4, 9, 9, 12):
        lane.start("words", SIZE)
        lane.end(np.arange(end, dtype=np.uint32))
    assert kept_rows(memory) == [[0, 1, 2, 3], [2, 3, 4, 5, 6, 7, 8], [7, 8, 9, 10, 11]]


def test_another_conversation_is_kept_whole_in_another_vocabulary():
    memory = TextMemory()
    lane = Recollection(memory)
    for vocabulary in ("words", "others"):
        lane.start(vocabulary, SIZE)
        lane.end(np.arange(9, dtype=np.uint32))
        assert kept_rows(memory, vocabulary) == [list(range(9))]


def test_what_is_said_where_its_texts_cannot_be_had_is_not_kept_among_others(tmp_path):
    """Its ids are other words, and may be none at all."""
    memory = TextMemory(tmp_path)
    lane = Recollection(memory)
    lane.start("words", SIZE)
    lane.end(ids(1, 2, 3))
    with holder(tmp_path, "others") as process:
        with pytest.raises(UnsupportedError, match="Another device"):
            lane.start("others", 2 * SIZE)
        lane.end(ids(1, 2, SIZE + 1))  # an answer ends, however it does
        process.kill()
        process.wait()
    lane.start("words", SIZE)
    lane.end(ids(4, 5))
    assert kept_rows(memory) == [[1, 2, 3], [4, 5]]
    lane.release()


def test_an_answer_that_never_began_is_not_kept():
    lane = Recollection(TextMemory())
    lane.end(ids())
    lane.end(ids(1, 2))


def test_the_last_lane_that_is_released_closes_the_file(tmp_path):
    first = Recollection(TextMemory(tmp_path))
    second = first.fork()
    for lane in (first, second):
        lane.start("words", SIZE)
    first.end(ids(1, 2))
    for _ in range(2):  # twice is once
        first.release()
    second.end(ids(3, 4))
    other = TextMemory(tmp_path)
    with pytest.raises(UnsupportedError, match="Another device"):
        kept_rows(other)
    second.release()
    assert kept_rows(other) == [[1, 2], [3, 4]]
    other.close()
