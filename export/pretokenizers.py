"""How byte-level vocabularies split text before merging, by GGUF's `tokenizer.ggml.pre`.

The patterns are those of the models' own tokenizer.json, also found in llama.cpp's
src/llama-vocab.cpp. To add one, add a line to PRETOKENIZERS.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
QWEN2 = _WORDS + r"\p{N}" + _REST
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"


class Recipe(NamedTuple):
    """Patterns to split by, one after another; a match stays in one piece.

    With `ignore_merges`, a piece that is in the vocabulary is its token, whatever the merges.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False

    def build(self) -> PreTokenizer:
        """Build the pre-tokenizer, which ends by mapping bytes to GPT-2's alphabet."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_bytes])


_GPT2, _SINGLE_DIGITS = Recipe((GPT2,)), Recipe((DIGIT, GPT2))
_LLAMA3, _QWEN2 = Recipe((LLAMA3,), ignore_merges=True), Recipe((QWEN2,))

PRETOKENIZERS: dict[str, Recipe] = {
    # What llama.cpp does for files without a pre-tokenizer.
    "default": Recipe((PUNCTUATION, GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
