"""What a program writes to a terminal, with times: cells of characters, colours and when they came.

It understands what line editing, coloured text and progress bars need (SGR colours, carriage
return, backspace, erasing of lines, the line above); other control sequences are left out. Nothing
scrolls: a recording is as high as its text.
"""

import codecs
import re
from dataclasses import dataclass, field
from typing import NamedTuple

# A control sequence with its numbers and its command, a command of the system, or another escape.
_SEQUENCE = re.compile(r"\x1b\[([0-?]*)[ -/]*([@-~])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[^\[\]]")
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


class Cell(NamedTuple):
    """A character; at_s: when it was written (s after the recording's begin); style: SGR names."""

    at_s: float
    character: str
    style: frozenset[str]


@dataclass
class Recording:
    """The cells of a terminal of ``columns`` columns, by line and column."""

    columns: int = 80
    lines: list[dict[int, Cell]] = field(default_factory=lambda: [{}])
    _row: int = 0
    _column: int = 0
    _style: frozenset[str] = frozenset()
    _rest: str = ""
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def write(self, at_s: float, output: bytes) -> None:
        """Take bytes that the program wrote at this time."""
        text = self._rest + self._decoder.decode(output)
        self._rest = ""
        at = 0
        while at < len(text):
            if text[at] != "\x1b":
                self._put(at_s, text[at])
                at += 1
                continue
            sequence = _SEQUENCE.match(text, at)
            if sequence is None:  # its end has not come yet
                self._rest = text[at:]
                return
            self._obey(sequence[1] or "", sequence[2] or "")
            at = sequence.end()

    def text(self) -> str:
        """Return all that stands there, without styles."""
        return "\n".join(
            "".join(line[column].character for column in sorted(line)) for line in self.lines
        )

    def _put(self, at_s: float, character: str) -> None:
        if character == "\n":
            self._next_line()
        elif character == "\r":
            self._column = 0
        elif character == "\b":
            self._column = max(0, self._column - 1)
        elif character >= " ":
            if self._column == self.columns:
                self._next_line()
            self.lines[self._row][self._column] = Cell(at_s, character, self._style)
            self._column += 1

    def _next_line(self) -> None:
        self._row, self._column = self._row + 1, 0
        if self._row == len(self.lines):
            self.lines.append({})

    def _obey(self, numbers: str, command: str) -> None:
        if command == "m" and not numbers.startswith(("<", "=", ">", "?")):
            for number in numbers.split(";"):
                self._set_style(int(number or 0))
        elif command == "A":
            self._row = max(0, self._row - int(numbers or 1))
        elif command == "K":
            first = self._column if numbers in ("", "0") else 0
            line = self.lines[self._row]
            for column in [column for column in line if column >= first]:
                del line[column]

    def _set_style(self, number: int) -> None:
        if number == 0:
            self._style = frozenset()
        elif number in (1, 2):
            self._style |= {"bold" if number == 1 else "dim"}
        elif number == 22:
            self._style -= {"bold", "dim"}
        elif 30 <= number <= 39:
            self._style -= set(_COLOURS)
            if number < 38:
                self._style |= {_COLOURS[number - 30]}
