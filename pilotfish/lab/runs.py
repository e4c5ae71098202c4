"""Store the results of a run that may be interrupted and resumed.

A `LineFile` has a line of JSON for each result. A kill, a power cut or a full disk costs at most
the line that is being written. A `WriterLock` admits one writer at a time, `locked_folder` one
process. `changes` compares the settings of a resumed run with those that it began with.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import msgspec

from pilotfish.base.errors import RunFileError
from pilotfish.base.files import PRIVATE, private_folder, remove_partial_files, write_whole
from pilotfish.base.reading import read_content, reading_file

FOLDER_LOCK = ".lock"  # name of the file that is locked while a process uses a run's folder

_Value = TypeVar("_Value")


class WriterLock:
    """An exclusive lock on a file; it ends with `close`, or with its process.

    The constructor makes the file if it does not exist. Raises `RunFileError` with the text
    ``busy`` if another process has the lock.
    """

    def __init__(self, path: Path, busy: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise RunFileError(busy) from error
            raise

    def holds(self, path: Path) -> bool:
        """Return whether this path names the locked file."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), path.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Lock a run's folder inside the ``with`` block; make the folder if it does not exist.

    Removes the partial files of a killed process. Raises `RunFileError` if another process has
    locked the folder.
    """
    private_folder(path)
    busy = f"Another process is using {path}: wait until it ends."
    with closing(WriterLock(path / FOLDER_LOCK, busy)):
        remove_partial_files(path)
        yield


class LineFile:
    """A file with a JSON value on each line, to which a run appends.

    Reading ignores an incomplete last line, which a killed process may leave; `read` with
    ``repair`` also removes it, as a writer must before its first `append`. Any thread may append.

    synced: whether each line is on the disk when `append` returns; if not, the operating system
    has it, and only a power cut can lose it.
    """

    def __init__(self, path: Path, *, synced: bool = False) -> None:
        self.path = path
        self._synced = synced
        self._lock = Lock()

    def read(
        self,
        decode: Callable[[int, bytes], _Value],
        damage: Callable[[int, str], Exception],
        *,
        repair: bool = True,
    ) -> list[_Value]:
        """Decode all complete lines; return [] if the file does not exist.

        decode: called with the number of a line (from 1) and the line. damage: returns the error to
        raise, from the number of a damaged line, or 0 if the file cannot be read, and the problem.
        """
        with reading_file(partial(damage, 0)):
            try:
                content = read_content(self.path)
            except FileNotFoundError:
                return []
        *lines, incomplete = content.split(b"\n")
        values = []
        for number, line in enumerate(lines, 1):
            with reading_file(partial(damage, number)):
                values.append(decode(number, line))
        if repair and incomplete:
            os.truncate(self.path, len(content) - len(incomplete))
        return values

    def append(self, value: Any) -> None:
        """Append a line; raise `OSError`, with the file unchanged, if the write fails."""
        line = memoryview(msgspec.json.encode(value) + b"\n")
        with self._lock:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE)
            try:
                before = os.fstat(descriptor).st_size
                try:
                    while line:
                        line = line[os.write(descriptor, line) :]
                    if self._synced:
                        os.fsync(descriptor)
                except OSError as error:  # such as a full disk, after a part of the line is written
                    os.ftruncate(descriptor, before)
                    raise OSError(error.errno, error.strerror, str(self.path)) from error
            finally:
                os.close(descriptor)

    def replace(self, values: Iterable[Any]) -> None:
        """Replace all lines, as a whole or not at all."""
        content = b"".join(msgspec.json.encode(value) + b"\n" for value in values)
        write_whole(self.path, content, PRIVATE)


class Change(NamedTuple):
    """A setting whose value differs from the value with which the run began."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{format_value(self.before)}, not {format_value(self.now)}"

    @property
    def flag(self) -> str:
        """The setting's flag of the command line."""
        return f"--{self.name.replace('_', '-')}"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the settings in ``now`` that differ from ``before``, in the order of ``now``."""
    return [
        Change(name, before.get(name), value)
        for name, value in now.items()
        if value != before.get(name)
    ]


def format_value(value: Any) -> str:
    """Format a setting's value for an error."""
    if value is None or value == "":
        return "none"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
