"""The blocks of docs/clients.md, by heading and language."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.support.shards import ROOT

ADDRESS = "http://127.0.0.1:8080"
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A block of code below a heading."""

    heading: str
    language: str
    text: str

    def at(self, url: str) -> str:
        """Return the text with a service's address in place of the documented one."""
        return self.text.replace(ADDRESS, url)


def blocks() -> list[Block]:
    """Return all blocks, in the order of the page."""
    page = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
    _, *parts = _HEADING.split(page)
    return [
        Block(heading, language, text)
        for heading, part in zip(parts[::2], parts[1::2], strict=True)
        for language, text in _BLOCK.findall(part)
    ]


def block(heading: str, language: str) -> Block:
    """Return the one block of a heading in a language."""
    (only,) = [each for each in blocks() if (each.heading, each.language) == (heading, language)]
    return only
