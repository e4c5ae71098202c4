"""A small byte-level BPE tokenizer for random models."""

from __future__ import annotations

import json
from collections.abc import Sequence

EOS = "<|end|>"


def tiny_tokenizer(vocab: int, wanted: Sequence[str] | None = None, eos: str = EOS) -> str:
    """Make a byte-level BPE tokenizer.json of `vocab` tokens; the last one is EOS.

    wanted: the other tokens, in GPT-2's characters; longer ones are merged in this order. By
    default letters come first, then the other bytes, then pairs of letters. Bytes without a token
    vanish when text is encoded.
    """
    if wanted is not None:
        assert len({*wanted, eos}) == len(wanted) + 1, "a token is there twice"
        return _tokenizer_json([*wanted], _merges(wanted), eos)
    tokens = sorted(_byte_characters(), key=lambda char: (not char.isalpha(), char))[: vocab - 1]
    merges = []
    letters = [char for char in tokens if "a" <= char <= "z"]
    for first in letters:
        for second in letters:
            if len(tokens) < vocab - 1:
                tokens.append(first + second)
                merges.append([first, second])
    while len(tokens) < vocab - 1:
        tokens.append(f"<{len(tokens)}>")
    return _tokenizer_json(tokens, merges, eos)


def _merges(tokens: Sequence[str]) -> list[list[str]]:
    """Return the merge of each longer token: the first part is as long as possible."""
    merges = []
    for token in tokens:
        splits = [[token[:at], token[at:]] for at in range(len(token) - 1, 0, -1)]
        fitting = [split for split in splits if split[0] in tokens and split[1] in tokens]
        assert fitting or len(token) == 1, f"{token} cannot be put together"
        merges += fitting[:1]
    return merges


def _tokenizer_json(tokens: list[str], merges: list[list[str]], eos: str) -> str:
    end = {
        "id": len(tokens),
        "content": eos,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [end],
            "normalizer": None,
            "pre_tokenizer": {**byte_level, "use_regex": True},
            "post_processor": None,
            "decoder": {**byte_level, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {token: id for id, token in enumerate(tokens)},
                "merges": merges,
            },
        }
    )


def _byte_characters() -> list[str]:
    """Return GPT-2's character of each byte: printable Latin-1 as is, the others from 256 up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
