"""Read a run's prompts from a file; the built-in prompts are the default."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from msgspec import Meta

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.reading import reading_file
from pilotfish.base.settings import setting

# Prompts with short and long answers, in prose and code. Some are easy to draft, others are hard.
BUILT_IN = (
    "Why is the sky blue?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Summarise in three sentences how a lighthouse works.",
    "A train goes 60 km in 45 minutes. What is its speed in km/h? Explain each step.",
    "List five things to check before a long drive, one line each.",
)
_KEYS = ("prompt", "question")
_MESSAGES = "messages"
# a text, or messages of which the last one is a user's
Question: TypeAlias = "str | list[dict[str, Any]]"


def prompts_setting(keys: str, advice: str = "") -> Meta:
    """Return the setting of a file of prompts.

    keys: the keys of a JSON line that the command reads, for the help text. advice: text after the
    default.
    """
    return setting(
        f"one prompt per line, or JSON lines with {keys} "
        f"(default: {len(BUILT_IN)} built-in prompts{advice})",
        metavar="FILE",
    )


class PromptLine(NamedTuple):
    """A line of a file with prompts. content: the line's text, or its JSON object."""

    number: int
    content: str | dict[str, Any]


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read a file of prompts: texts, one a line, or JSON lines with ``prompt`` or ``question``.

    Raises `UnsupportedError`, which names the fault and its line.
    """
    return tuple(
        line.content if isinstance(line.content, str) else text_of(path, line)
        for line in read_lines(path)
    )


def read_questions(path: Path) -> tuple[Question, ...]:
    """Read a file of prompts like `read_prompts`; JSON lines may also have ``messages``.

    Messages after the user's last message are dropped.
    """
    return tuple(question_of(path, line) for line in read_lines(path))


def read_lines(path: Path) -> list[PromptLine]:
    """Read the lines of a file that are not empty.

    If the first line begins with ``{``, all lines are JSON objects; otherwise all are texts. Raises
    `UnsupportedError`, which names the fault and its line.
    """
    with reading_file(
        lambda problem: UnsupportedError(f"The prompts in {path} cannot be read: {problem}.")
    ):
        text = path.read_text(encoding="utf-8-sig")
    if "\0" in text:
        raise UnsupportedError(f"{path} is not a text file: it contains bytes of value 0.")
    # not `splitlines`: a JSON string may contain Unicode's other line ends
    lines = enumerate(text.split("\n"), 1)
    numbered = [PromptLine(number, line.strip()) for number, line in lines if line.strip()]
    if not numbered:
        raise UnsupportedError(f"{path} has no prompt: write one prompt per line.")
    if str(numbered[0].content).startswith("{"):
        return [
            PromptLine(number, _parse_object(path, number, str(line))) for number, line in numbered
        ]
    return numbered


def _parse_object(path: Path, number: int, line: str) -> dict[str, Any]:
    with reading_file(
        lambda problem: UnsupportedError(f"{path}, line {number} is not JSON: {problem}.")
    ):
        entry = json.loads(line)
    if not isinstance(entry, dict):
        raise UnsupportedError(f"{path}, line {number} is not a JSON object.")
    return entry


def text_of(path: Path, line: PromptLine, expected_keys: Sequence[str] = _KEYS) -> str:
    """Return the prompt's text in a line. expected_keys: keys that the error message names."""
    assert isinstance(line.content, dict)
    text = next((line.content[key] for key in _KEYS if key in line.content), None)
    if not isinstance(text, str) or not text.strip():
        keys = " or ".join(map(repr, expected_keys))
        raise UnsupportedError(f"{path}, line {line.number} has no text for the key {keys}.")
    _expect_encodable(path, line.number, text)
    return text


def question_of(path: Path, line: PromptLine) -> Question:
    """Return the prompt's text or messages in a line."""
    if isinstance(line.content, str):
        return line.content
    if _MESSAGES not in line.content:
        return text_of(path, line, (*_KEYS, _MESSAGES))
    messages = line.content[_MESSAGES]
    texts = [
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in (messages if isinstance(messages, list) else [False])
    ]
    user_turns = (
        [index for index, message in enumerate(messages) if message["role"] == "user"]
        if all(texts)
        else []
    )
    if not user_turns:
        raise UnsupportedError(
            f"{path}, line {line.number} has no valid messages: each needs a role and a text "
            "as its content, and one message must be a user's."
        )
    chat = [{"role": message["role"], "content": message["content"]} for message in messages]
    for message in chat:
        _expect_encodable(path, line.number, message["role"] + message["content"])
    return chat[: user_turns[-1] + 1]


def _expect_encodable(path: Path, number: int, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # the text has half a surrogate pair
        raise UnsupportedError(f"{path}, line {number} is not valid text: {error}.") from error
