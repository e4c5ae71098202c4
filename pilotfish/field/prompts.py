"""The prompts of a run: a file's, or the built-in ones."""

import json
from pathlib import Path

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


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read the prompts of a file: one a line, or JSON lines with ``prompt`` or ``question``.

    UnsupportedError says what is wrong with the file, and in which line.
    """
    try:
        # by line feeds alone: JSON strings may hold what else ends a line in Unicode
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UnsupportedError(f"The prompts in {path} are not UTF-8 text: {error}.") from error
    except OSError as error:
        raise UnsupportedError(f"The prompts cannot be read: {error}.") from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if numbered and numbered[0][1].startswith("{"):
        return tuple(_from_json(path, number, line) for number, line in numbered)
    if not numbered:
        raise UnsupportedError(f"{path} holds no prompt: give it one a line.")
    return tuple(line for _, line in numbered)


def _from_json(path: Path, number: int, line: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise UnsupportedError(f"{path}, line {number} is not JSON: {error}.") from error
    found = [entry[key] for key in _KEYS if key in entry] if isinstance(entry, dict) else []
    if not found or not isinstance(found[0], str) or not found[0].strip():
        raise UnsupportedError(
            f"{path}, line {number} has no text under {' or '.join(map(repr, _KEYS))}."
        )
    try:
        found[0].encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise UnsupportedError(f"{path}, line {number} is no text: {error}.") from error
    return found[0]
