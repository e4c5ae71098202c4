"""Choose the tokens to keep in a drafter's head: the tokens that the target uses most often.

In: texts that resemble the target's answers. Out: N tokens, ranked by their frequency in the texts,
then by id, because byte-pair encodings give low ids to frequent tokens (FR-Spec, Zhao et al. 2025;
VocabTrim, Goel et al. 2025). End tokens, and the control tokens of the chat template, are always
kept.

Texts are read in pieces, so they may be larger than the memory. In a line of JSON only the answers
count, which are recognised by the usual keys of data sets and chats; if there are none, all strings
count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.reading import reading_file
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources import WeightSource

Counts = NDArray[np.int64]
PIECE = 1 << 16  # size (characters) of the pieces in which texts are read
LONGEST_LINE = 1 << 24  # maximum characters of a line of JSON
# Keys that hold a model's answer in a data set, and keys that hold a list of messages.
ANSWERS = ("answer", "text", "output", "response", "completion", "solution", "chosen")
LISTS = ("messages", "conversations")


def choose_tokens(
    source: WeightSource, count: int, counts: Counts, useful: NDArray[np.bool_] | None = None
) -> Counts:
    """Return the `count` tokens to keep, ascending, i64 [count].

    Args:
        counts: i64 [V], occurrences of each token.
        useful: bool [V], whether a token can be drafted; other tokens are chosen last. None = all
            tokens can be drafted.

    Raises:
        ExportError: if `count` is not less than the vocabulary, or is less than the number of
        tokens that must be kept.
    """
    size = source.vocabulary.vocab_size
    if count >= size:
        raise ExportError(
            f"{source.config.name} has {size} tokens: --keep-tokens must be less than that "
            f"number, not {count}"
        )
    needed = needed_tokens(source)
    if count < len(needed):
        raise ExportError(
            f"{source.config.name} needs {len(needed)} tokens to end answers and turns: "
            f"--keep-tokens must be at least that number, not {count}"
        )
    ids = np.arange(size)
    optional, unusable = np.ones(size, np.bool_), np.zeros(size, np.bool_)
    optional[needed] = False
    if useful is not None:
        unusable = ~useful
    order = np.lexsort((ids, -counts, unusable, optional))
    return np.sort(order[:count])


def needed_tokens(source: WeightSource) -> Counts:
    """Return the ids that must be kept: end tokens, and control tokens in the chat templates."""
    vocabulary = source.vocabulary
    templates = [vocabulary.chat_template or "", *vocabulary.chat_templates.values()]
    named = vocabulary.tokenizer.named_controls(templates)
    return np.array(sorted({*vocabulary.eos_ids, *named}), np.int64)


def count_tokens(texts: Iterable[str], tokenizer: Tokenizer, size: int) -> Counts:
    """Count the occurrences of each token in the texts; i64 [size]."""
    counts = np.zeros(size, np.int64)
    for text in texts:
        occurrences = np.bincount(np.array(tokenizer.encode(text), np.int64), minlength=size)
        counts += occurrences[:size]
    return counts


def read_texts(path: Path) -> Iterator[str]:
    """Yield the text of a file, or the answers of a JSON lines file (.jsonl), in pieces.

    Raises:
        ExportError: if the file cannot be read or has no text, or if a .jsonl file is not JSON.
    """
    has_text = False
    with (
        reading_file(lambda problem: ExportError(f"{path} cannot be read: {problem}")),
        path.open(encoding="utf-8-sig") as file,
    ):
        pieces = _json_texts(path, file) if path.suffix == ".jsonl" else _pieces(file)
        for piece in pieces:
            if "\0" in piece:
                raise ExportError(f"{path} is not a text file: it contains NUL characters")
            has_text = has_text or bool(piece.strip())
            yield piece
    if not has_text:
        raise ExportError(f"{path} contains no text: give texts that the target wrote")


def _pieces(file: Any) -> Iterator[str]:
    """Yield whole lines in pieces of about `PIECE` characters; longer lines are cut."""
    while piece := file.read(PIECE):
        yield piece + file.readline(PIECE)


def _json_texts(path: Path, file: Any) -> Iterator[str]:
    number = 0
    while line := file.readline(LONGEST_LINE):
        number += 1
        if not line.strip():
            continue
        with reading_file(partial(_no_json, path, number)):
            entry = json.loads(line)
        for text in _answers(entry):
            # JSON can contain half of a surrogate pair, but UTF-8 cannot.
            yield text.encode("utf-8", "replace").decode("utf-8")


def _no_json(path: Path, number: int, problem: str) -> ExportError:
    return ExportError(f"{path}, line {number} is not JSON: {problem}")


def _answers(entry: Any) -> Iterator[str]:
    """Yield the model's answers in an entry, or all its strings if no key marks an answer."""
    if isinstance(entry, dict):
        texts = [entry[name] for name in ANSWERS if isinstance(entry.get(name), str)]
        for name in LISTS:
            if isinstance(entry.get(name), list):
                texts += [_assistant_text(turn) for turn in entry[name] if isinstance(turn, dict)]
        if texts:
            yield from texts
            return
    yield from _all_texts(entry)


def _assistant_text(turn: dict[str, Any]) -> str:
    """Return the text of an assistant's message; "" for another role."""
    if turn.get("role", turn.get("from")) not in {"assistant", "gpt"}:
        return ""
    text = turn.get("content", turn.get("value"))
    return text if isinstance(text, str) else ""


def _all_texts(entry: Any) -> Iterator[str]:
    waiting = [entry]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict | list):
            waiting += each.values() if isinstance(each, dict) else each
