"""SentencePiece's spelling of text and tokens: spaces as "▁", bytes as <0x0A>."""

from __future__ import annotations

from typing import Any, Literal

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

SPACE_MARK = "▁"
# Pattern that splits the text "<0x0A>" in the middle, so that it does not become the byte's token.
BYTE_NAME = r"(?<=<)(?=0x[0-9A-F]{2}>)"


Prefix = Literal["never", "always", "once", "first"]
"""Rule for a space before a text.

"always": before each part between control or user-defined tokens. "once": before the whole text, as
in SentencePiece. "first": as "once", but not before a text that begins with a space, as
transformers does with `legacy: false` in tokenizer_config.json.
"""


def spell(
    tokenizer: tokenizers.Tokenizer, prefix: Prefix, *, collapse: bool = False, table: bytes = b""
) -> None:
    """Set a tokenizer's normaliser, pre-tokenizer and decoder.

    collapse: drop spaces at both ends and repeated spaces. table: SentencePiece's compiled
    character map.
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
    if prefix == "once":  # spaces are marks at this step, so this step puts a mark before any text
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


def put_before(tokenizer: tokenizers.Tokenizer, token: str, id: int) -> None:
    """Put a token before each text, such as BOS."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, id)]
    )
