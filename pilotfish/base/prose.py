"""Clean foreign text for logs, terminals, status lines and JSON."""

import re
from typing import Final

MOST_CHARACTERS: Final = 1024

_BLANK = re.compile(r"[^\S ]+")  # all whitespace except the plain space: line breaks, tabs


def one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    """Make ``text`` one printable line of at most ``most`` characters.

    Line breaks become spaces. Other unprintable characters, such as terminal escapes and marks of
    writing direction, are escaped as in a Python string.
    """
    text = _BLANK.sub(" ", text[:most])
    if not text.isprintable():
        text = "".join(char if char.isprintable() else _escape(char) for char in text)
    return text[:most]


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")
