"""Words from elsewhere, as they may stand in a log, on a terminal, in a status line or in JSON."""

import re
from typing import Final

MOST_CHARACTERS: Final = 1024

_BLANK = re.compile(r"[^\S ]+")  # whitespace but for the plain space: line breaks, tabs


def one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    """``text`` in one printable line of at most ``most`` characters.

    Line breaks become spaces. What else does not print, such as a terminal's escapes or marks that
    turn the direction of writing, is spelled out as Python would.
    """
    text = _BLANK.sub(" ", text[:most])
    if not text.isprintable():
        text = "".join(char if char.isprintable() else _spelled(char) for char in text)
    return text[:most]


def _spelled(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")
