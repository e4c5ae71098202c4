"""How SentencePiece spells text and tokens: spaces as "▁", bytes as <0x0A>."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

SPACE_MARK = "▁"
# The model must not find the name of a byte's token in a text: "<0x0A>" is six characters.
BYTE_NAME = r"(?<=<)(?=0x[0-9A-F]{2}>)"


def spell(
    tokenizer: tokenizers.Tokenizer,
    *,
    prefix: bool,
    once: bool = False,
    collapse: bool = False,
    table: bytes = b"",
) -> None:
    """Set a tokenizer's steps before and behind its model.

    prefix: a space is put before a text, or, unless `once`, before each part of it between control
    tokens. collapse: spaces at both ends and repeated ones are dropped. table: what SentencePiece
    compiled of its rules for characters.
    """
    steps: list[Any] = [normalizers.Precompiled(table)] if table else []
    if collapse:
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    splits: list[Any] = []
    if prefix and once:
        splits.append(pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="first", split=False))
    else:
        steps += [normalizers.Prepend(SPACE_MARK)] if prefix else []
        steps.append(normalizers.Replace(" ", SPACE_MARK))
    if isinstance(tokenizer.model, models.Unigram):
        splits.insert(0, pre_tokenizers.Split(Regex(BYTE_NAME), "isolated"))
    if steps:
        tokenizer.normalizer = steps[0] if len(steps) == 1 else normalizers.Sequence(steps)
    if splits:
        tokenizer.pre_tokenizer = splits[0] if len(splits) == 1 else pre_tokenizers.Sequence(splits)
    ends = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(ends)
