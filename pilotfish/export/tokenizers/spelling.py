"""How SentencePiece spells text and tokens: spaces as "▁", bytes as <0x0A>."""

from __future__ import annotations

from typing import Any, Literal

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

SPACE_MARK = "▁"
# The model must not find the name of a byte's token in a text: "<0x0A>" is six characters.
BYTE_NAME = r"(?<=<)(?=0x[0-9A-F]{2}>)"


Prefix = Literal["never", "always", "once", "first"]
"""Where a space is put before a text.

"always" before each part between control tokens and user-defined ones, "once" before the whole, as
SentencePiece does; "first" like "once", but not before a text that begins with a space: so
transformers does where a tokenizer_config.json says `legacy: false`.
"""


def spell(
    tokenizer: tokenizers.Tokenizer, prefix: Prefix, *, collapse: bool = False, table: bytes = b""
) -> None:
    """Set a tokenizer's steps before and behind its model.

    collapse: spaces at both ends and repeated ones are dropped. table: what SentencePiece compiled
    of its rules for characters.
    """
    steps: list[Any] = [normalizers.Precompiled(table)] if table else []
    if collapse:
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if prefix == "always":
        steps.append(normalizers.Prepend(SPACE_MARK))
    splits: list[Any] = []
    if isinstance(tokenizer.model, models.Unigram):
        splits.append(pre_tokenizers.Split(Regex(BYTE_NAME), "isolated"))
    if prefix == "first":
        splits.append(pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="first", split=False))
    else:
        steps.append(normalizers.Replace(" ", SPACE_MARK))
    if prefix == "once":  # all spaces are marks by now, so that one more is put before any text
        splits += [
            pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False),
            pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="never", split=False),
        ]
    if steps:
        tokenizer.normalizer = steps[0] if len(steps) == 1 else normalizers.Sequence(steps)
    if splits:
        tokenizer.pre_tokenizer = splits[0] if len(splits) == 1 else pre_tokenizers.Sequence(splits)
    ends = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix != "never":
        ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(ends)
