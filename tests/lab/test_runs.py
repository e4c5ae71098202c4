"""What all runs share: lines that a kill cannot damage, one writer at a time, changed settings."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from pilotfish.base.errors import RunFileError
from pilotfish.lab.runs import LineFile, WriterLock, changes, locked_folder


def damage(number: int, problem: str) -> RunFileError:
    return RunFileError(f"line {number}: {problem}")


def read(file: LineFile, *, repair: bool = True) -> list[Any]:
    def decode(number: int, line: bytes) -> tuple[int, Any]:
        return number, msgspec.json.decode(line)

    return file.read(decode, damage, repair=repair)


def test_lines_come_back_with_their_numbers(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines")
    assert read(file) == []
    for value in ({"a": "one\ntwo"}, 3):
        file.append(value)
    assert read(LineFile(file.path)) == [(1, {"a": "one\ntwo"}), (2, 3)]
    file.replace([4])
    assert read(file) == [(1, 4)]


def test_an_incomplete_line_is_left_by_a_reader_and_removed_by_a_writer(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines")
    file.append([1])
    whole = file.path.read_bytes()
    for size in range(1, len(whole)):
        torn = whole + whole[:size]
        file.path.write_bytes(torn)
        assert read(file, repair=False) == [(1, [1])]
        assert file.path.read_bytes() == torn
        assert read(file) == [(1, [1])]
        assert file.path.read_bytes() == whole


def test_a_damaged_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines")
    file.path.write_bytes(b"1\nno json\n2")
    with pytest.raises(RunFileError, match="line 2: JSON is malformed"):
        read(file)
    assert file.path.read_bytes() == b"1\nno json\n2"
    with pytest.raises(RunFileError, match="line 0: Is a directory"):
        read(LineFile(tmp_path))


def test_lines_of_several_threads_stay_whole(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines")
    values = [[number] * 2000 for number in range(4)]
    threads = [
        Thread(target=lambda value=value: [file.append(value) for _ in range(20)])
        for value in values
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(value for _, value in read(file)) == sorted(values * 20)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with closing(WriterLock(tmp_path / "lines", "")), pytest.raises(RunFileError, match="busy"):
        WriterLock(tmp_path / "lines", "busy")
    WriterLock(tmp_path / "lines", "busy").close()
    with (
        locked_folder(tmp_path / "run"),
        pytest.raises(RunFileError, match="Another process is using"),
        locked_folder(tmp_path / "run"),
    ):
        pass


def test_only_named_settings_can_have_changed() -> None:
    before = {"count": 3, "rates": (1, 2), "note": "", "seed": 0}
    result = changes(before, {"seed": 0, "rates": (1, 3), "note": "x", "new_name": 2})
    assert [change.name for change in result] == ["rates", "note", "new_name"]
    assert [str(change) for change in result] == ["1,2, not 1,3", "none, not x", "none, not 2"]
    assert result[2].flag == "--new-name"
