"""The prompts of a run: a file's, or the built-in ones."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pilotfish.wire.errors import UnsupportedError

# short and long answers, prose and code: what a drafter predicts well, and what it does not
BUILT_IN = (
    "Why is the sky blue?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Summarise in three sentences how a lighthouse works.",
    "A train goes 60 km in 45 minutes. What is its speed in km/h? Explain each step.",
    "List five things to check before a long drive, one line each.",
)
_KEYS = ("prompt", "question")
_MESSAGES = "messages"
Question: TypeAlias = "str | Sequence[Mapping[str, Any]]"  # a text, or messages up to a user's


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read the prompts of a file: one a line, or JSON lines with ``prompt`` or ``question``.

    UnsupportedError says what is wrong with the file, and in which line.
    """
    return tuple(_text(path, number, found) for number, found in _entries(path))


def read_questions(path: Path) -> tuple[Question, ...]:
    """Read the prompts of a file as `read_prompts` does; JSON lines may also have ``messages``.

    Of these, what stands behind the last user's message is left out.
    """
    return tuple(
        _talk(path, number, found[_MESSAGES])
        if isinstance(found, dict) and _MESSAGES in found
        else _text(path, number, found)
        for number, found in _entries(path)
    )


def _entries(path: Path) -> list[tuple[int, Any]]:
    """List what the lines hold, and their numbers: texts, or what JSON says."""
    try:
        # by line feeds alone: JSON strings may hold what else ends a line in Unicode
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UnsupportedError(f"The prompts in {path} are not UTF-8 text: {error}.") from error
    except OSError as error:
        raise UnsupportedError(f"The prompts cannot be read: {error}.") from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UnsupportedError(f"{path} holds no prompt: give it one a line.")
    if numbered[0][1].startswith("{"):
        return [(number, _from_json(path, number, line)) for number, line in numbered]
    return list(numbered)


def _from_json(path: Path, number: int, line: str) -> Any:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UnsupportedError(f"{path}, line {number} is not JSON: {error}.") from error
    return entry if isinstance(entry, dict) else {}


def _text(path: Path, number: int, entry: Any) -> str:
    found = [entry]
    if isinstance(entry, dict):
        found = [entry[key] for key in _KEYS if key in entry]
    if not found or not isinstance(found[0], str) or not found[0].strip():
        raise UnsupportedError(
            f"{path}, line {number} has no text under {' or '.join(map(repr, _KEYS))}."
        )
    _encodable(path, number, found[0])
    return found[0]


def _talk(path: Path, number: int, messages: Any) -> Question:
    texts = [
        isinstance(one, dict)
        and isinstance(one.get("role"), str)
        and isinstance(one.get("content"), str)
        for one in (messages if isinstance(messages, list) else [False])
    ]
    asked = [at for at, one in enumerate(messages) if one["role"] == "user"] if all(texts) else []
    if not asked:
        raise UnsupportedError(
            f"{path}, line {number} has no messages, each with a role and a text as its content, "
            "of which one is a user's."
        )
    talk = [{"role": one["role"], "content": one["content"]} for one in messages]
    for one in talk:
        _encodable(path, number, one["role"] + one["content"])
    return talk[: asked[-1] + 1]


def _encodable(path: Path, number: int, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise UnsupportedError(f"{path}, line {number} is no text: {error}.") from error
