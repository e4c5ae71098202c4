"""Read a chat's lines: from a terminal with editing and history, or from a pipe.

The history is a file in the user's state folder, readable by the user alone.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.files import private_folder
from pilotfish.base.home import user_folder
from pilotfish.base.reading import reading_file

_MOST_LINES = 1000  # lines that the history keeps


class LineReader:
    """A reader of lines. interactive: stdin and stdout are terminals, so there is a prompt."""

    def __init__(self, prompt: str, history_name: str) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._prompt = prompt
        self._history = _History(history_name) if self.interactive else None

    def read(self) -> str | None:
        """Return the next line without its end; None at the end of the input."""
        if self._history is None:
            with reading_file(lambda why: UnsupportedError(f"stdin cannot be read: {why}.")):
                line = sys.stdin.readline()
            return line.removesuffix("\n") if line else None
        try:
            line = input(self._prompt)
        except EOFError:
            return None
        self._history.save()
        return line


class _History:
    """The lines that the arrow keys bring back, in this session and the next ones."""

    def __init__(self, name: str) -> None:
        self._file: Path | None = None
        self._length = 0
        with suppress(ImportError):  # a Python without readline has neither editing nor history
            import readline

            self._readline = readline
            self._file = _private_file(name)
        if self._file is not None:
            readline.set_history_length(_MOST_LINES)
            with suppress(OSError):
                readline.read_history_file(self._file)
            self._length = readline.get_current_history_length()

    def save(self) -> None:
        """Append the last line to the file, unless readline has left it out as a repetition."""
        if self._file is None:
            return
        length = self._readline.get_current_history_length()
        if length > self._length:
            with suppress(OSError):  # a full disk must not end the chat
                self._readline.append_history_file(length - self._length, self._file)
        self._length = length


def _private_file(name: str) -> Path | None:
    """Return a file of the state folder, made if it is missing; None if that is impossible."""
    state = user_folder("XDG_STATE_HOME", ".local/state")
    if state is None:
        return None
    path = state / "pilotfish" / name
    try:
        private_folder(path.parent)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    except OSError:
        return None
    return path
