"""What Unigram vocabularies need besides: names of control tokens that stand in a text are text.

A BPE vocabulary puts tokens together from characters and never arrives at "</s>". A Unigram model
looks for every token of its table in the text, control tokens' names too, and the library's switch
for reading them as text does not change the table. So the table that reads plain text has them
under names that no text contains: with a space, of which the steps before leave none.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from pilotfish.engines.engine_errors import ArtifactError

UNIGRAM = "Unigram"
_MARKING = {"type": "Replace", "pattern": {"String": " "}}


def is_unigram(parsed: dict[str, Any]) -> bool:
    """Whether a `tokenizer.json`'s content is of this kind."""
    model = parsed.get("model")
    return isinstance(model, dict) and model.get("type") == UNIGRAM


def expect_marks(parsed: dict[str, Any], name: str) -> None:
    """Raise `ArtifactError` for a Unigram vocabulary that is given texts with spaces."""
    steps = chain(flat(parsed.get("normalizer")), flat(parsed.get("pre_tokenizer")))
    if not any(step["type"] == "Metaspace" or _MARKING.items() <= step.items() for step in steps):
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
    # those in the table would get other ids, now that their names are not there
    kept = [token for token in added if token["content"] not in names]
    return parsed | {"model": parsed["model"] | {"vocab": hidden}, "added_tokens": kept}


def flat(step: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, with sequences unfolded."""
    if step is None:
        return ()
    if step["type"] != "Sequence":
        return (step,)
    parts = step.get("normalizers", step.get("pretokenizers", []))
    return chain.from_iterable(map(flat, parts))
