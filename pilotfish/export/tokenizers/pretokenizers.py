"""Pre-tokenizers of byte-level vocabularies, by GGUF's `tokenizer.ggml.pre`.

The patterns are those of the models' tokenizer.json. llama.cpp's src/llama-vocab.cpp also lists
them, but rewrites some for its regex engine. To add a pre-tokenizer, add a line to _RECIPES.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
DIGITS_3 = r"\p{N}{1,3}"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
LLAMA3 = _WORDS + DIGITS_3 + _REST
QWEN2 = _WORDS + DIGIT + _REST
QWEN35 = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    + _SPACES
)
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
# Words that end before an upper-case letter of the next word.
_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_REST_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_LOWER}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}|" + DIGIT + _REST_SLASH
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LOWER}{_CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{_CONTRACTIONS}?|" + DIGITS_3 + _REST_SLASH
)
EXAONE_MOE = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    + r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES
)
# Letters with two cases, in the Unicode version of DeepSeek's tokenizer.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_CJK,
    r"\p{N}+",
)


class Recipe(NamedTuple):
    """The patterns that split a text, applied one after another; a match stays in one piece.

    `ignore_merges`: whether a piece that is a token becomes that token, even if no merges produce
    it. `adds_bos`: whether BOS precedes a raw text by default; a file may override this.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False

    def build(self) -> PreTokenizer:
        """Build the pre-tokenizer; its last step maps bytes to GPT-2's alphabet."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_bytes])


_LLAMA3 = Recipe((LLAMA3,), ignore_merges=True, adds_bos=True)
_RECIPES: tuple[tuple[Recipe, tuple[str, ...]], ...] = (
    # llama.cpp's default for files without a pre-tokenizer.
    (Recipe((PUNCTUATION, GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")), ("default",)),
    # GPT-2, Phi-2, OLMo 1, EXAONE 4
    (
        Recipe((GPT2,)),
        (
            *("gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4", "trillion", "granite-docling"),
            *("gigachat", "a.x-4.0", "mellum"),
        ),
    ),
    # SmolLM 1 and 2, StarCoder 2, Granite 3, Command R, EXAONE 3
    (
        Recipe((DIGIT, GPT2)),
        (
            *("smollm", "starcoder", "refact", "command-r", "exaone", "codeshell", "minerva-7b"),
            "mellum2",
        ),
    ),
    # Llama 3 (and so BitNet), Falcon 3, LFM2
    (
        _LLAMA3,
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    ),
    # Derived from GPT-4's: OLMo 2, Granite 4, Phi-4; GLM 4
    (Recipe((LLAMA3,)), ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")),
    # Qwen 2 to 3, StableLM 2, Hunyuan
    (
        Recipe((QWEN2,)),
        (
            *("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo"),
            *("solar-open", "grok-2"),
        ),
    ),
    (Recipe((QWEN35,)), ("qwen35",)),
    # Mistral Nemo and later models
    (Recipe((TEKKEN,), ignore_merges=True, adds_bos=True), ("tekken",)),
    # o200k: gpt-oss, Phi-4-mini; Llama 4
    (Recipe((GPT4O,)), ("gpt-4o", "llama4", "kanana2", "minimax-m2")),
    # Cohere's Tiny Aya
    (Recipe((r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)), ("tiny_aya", "cohere2moe")),
    (Recipe((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")), ("falcon",)),
    (Recipe(DEEPSEEK_LLM), ("deepseek-llm",)),
    (
        Recipe((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, DIGIT)),
        ("deepseek-coder",),
    ),
    (
        Recipe((DIGITS_3, HAN_KANA, DEEPSEEK3)),
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
    ),
    (Recipe((EXAONE_MOE,)), ("exaone-moe",)),
)

PRETOKENIZERS: dict[str, Recipe] = {name: recipe for recipe, names in _RECIPES for name in names}
