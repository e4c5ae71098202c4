"""Unigram vocabularies: read the names of control tokens as plain text.

A BPE vocabulary builds tokens from characters and never arrives at "</s>". A Unigram model looks
for every token of its table in the text, names of control tokens included, and the library's switch
to read them as text does not change the table. So the tokenizer for plain text has a table in which
they contain a space, which no text has after the earlier steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from pilotfish.engines.engine_errors import ArtifactError

UNIGRAM = "Unigram"
_SPACE_REPLACEMENT = {"type": "Replace", "pattern": {"String": " "}}


def is_unigram(parsed: dict[str, Any]) -> bool:
    """Whether the content of a `tokenizer.json` has a Unigram model."""
    model = parsed.get("model")
    return isinstance(model, dict) and model.get("type") == UNIGRAM


def check_marks(parsed: dict[str, Any], name: str) -> None:
    """Raise `ArtifactError` for a Unigram vocabulary whose input may contain spaces."""
    steps = chain(
        flatten_steps(parsed.get("normalizer")), flatten_steps(parsed.get("pre_tokenizer"))
    )
    if not any(
        step["type"] == "Metaspace" or _SPACE_REPLACEMENT.items() <= step.items() for step in steps
    ):
        raise ArtifactError(
            f"{name}: a Unigram vocabulary that does not mark spaces (Metaspace) is not supported"
        )


def hide_controls(parsed: dict[str, Any]) -> dict[str, Any]:
    """Return the content with its control tokens under names that no text contains."""
    table: list[list[Any]] = parsed["model"]["vocab"]
    added: list[dict[str, Any]] = parsed.get("added_tokens") or []
    names = {token["content"] for token in added if token["special"] and token["id"] < len(table)}
    if (unknown := parsed["model"].get("unk_id")) is not None:
        names.add(table[unknown][0])
    hidden = [[f" {piece}" if piece in names else piece, score] for piece, score in table]
    # without their names in the table, the tokens would get new ids
    remaining = [token for token in added if token["content"] not in names]
    return parsed | {"model": parsed["model"] | {"vocab": hidden}, "added_tokens": remaining}


def flatten_steps(step: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, with sequences unfolded."""
    if step is None:
        return ()
    if step["type"] != "Sequence":
        return (step,)
    parts = step.get("normalizers", step.get("pretokenizers", []))
    return chain.from_iterable(map(flatten_steps, parts))
