"""Unigram vocabularies: change the table so that names of control tokens are plain text.

BPE merges characters into tokens and never produces "</s>". A Unigram model looks for every token
of its table in the text, also for the names of control tokens, and the library's option
`encode_special_tokens` does not change the table. So the tokenizer for plain text gets a table in
which the names of control tokens begin with a space. No text contains a space at that step, because
earlier steps replace spaces.
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
    """Raise `ArtifactError` for a Unigram vocabulary that does not replace spaces in its input."""
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
    """Return the content with control tokens renamed, so that no text contains their names."""
    table: list[list[Any]] = parsed["model"]["vocab"]
    added: list[dict[str, Any]] = parsed.get("added_tokens") or []
    names = {token["content"] for token in added if token["special"] and token["id"] < len(table)}
    if (unknown := parsed["model"].get("unk_id")) is not None:
        names.add(table[unknown][0])
    hidden = [[f" {piece}" if piece in names else piece, score] for piece, score in table]
    # An added token that is not in the table would get a new id, so renamed tokens are removed.
    remaining = [token for token in added if token["content"] not in names]
    return parsed | {"model": parsed["model"] | {"vocab": hidden}, "added_tokens": remaining}


def flatten_steps(step: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    """Yield the single steps of a normalizer or pre-tokenizer, including those in sequences."""
    if step is None:
        return ()
    if step["type"] != "Sequence":
        return (step,)
    parts = step.get("normalizers", step.get("pretokenizers", []))
    return chain.from_iterable(map(flatten_steps, parts))
