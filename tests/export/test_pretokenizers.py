"""How each family of byte-level vocabularies splits text, by the names in GGUF files."""

from __future__ import annotations

import pytest

from pilotfish.engines.token_bytes import BYTE_OF_CHARACTER
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.export.tokenizers.gguf import GgufVocabulary
from pilotfish.export.tokenizers.pretokenizers import PRETOKENIZERS
from tests.support.tokenizer_strings import make_strings
from tests.support.vocabularies import HERE, smollm2_metadata

# One text in which every rule shows: contractions, digits, cases, marks, Han, punctuation, lines.
TEXT = "I'LL're 12345 aB'd कि 漢字ab、:x!/\n\n  y"
SPLITS: dict[tuple[str, ...], str] = {
    ("gpt-2", "phi-2", "olmo", "exaone4"):
        "I|'|LL|'re| 12345| aB|'d| क|ि| 漢字ab|、:|x|!/|\n\n | y",
    ("smollm", "starcoder", "refact", "command-r", "exaone"):
        "I|'|LL|'re| |1|2|3|4|5| aB|'d| क|ि| 漢字ab|、:|x|!/|\n\n | y",
    ("llama-bpe", "llama3", "falcon3", "lfm2", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"):
        "I|'LL|'re| |123|45| aB|'d| क|ि| 漢字ab|、:|x|!/\n\n| | y",
    ("qwen2", "stablelm2", "hunyuan", "deepseek-r1-qwen"):
        "I|'LL|'re| |1|2|3|4|5| aB|'d| क|ि| 漢字ab|、:|x|!/\n\n| | y",
    ("qwen35",):
        "I|'LL|'re| |1|2|3|4|5| aB|'d| कि| 漢字ab|、:|x|!/\n\n| | y",
    ("tekken",):
        "I|'LL|'re| |1|2|3|4|5| a|B|'d| कि| 漢字ab|、:|x|!/\n\n| | y",
    ("gpt-4o", "llama4"):
        "I'LL|'re| |123|45| a|B'd| कि| 漢字ab|、:|x|!/\n\n| | y",
    ("tiny_aya",):
        "I'LL|'re| |12|345| a|B'd| कि| 漢字ab|、:|x|!/\n\n| | y",
    ("falcon",):
        "I|'|LL|'|re| |123|45| aB|'|d| क|ि| 漢字ab|、:|x|!/|\n\n | y",
    ("deepseek-llm",):
        "I|'|LL|'|re| |12345| aB|'|d| |कि| |漢字|ab|、|:|x|!/|\n|\n| | y",
    ("deepseek-coder",):
        "I|'|LL|'|re| |1|2|3|4|5| aB|'|d| |क|ि| |漢字|ab|、|:|x|!/|\n|\n| | y",
    ("deepseek-v3", "hunyuan-dense"):
        "I|'LL|'re| |123|45| aB|'d| कि| |漢字|ab|、:|x|!/\n\n| | y",
    ("exaone-moe",):
        "I|'LL|'re| |1|2|3|4|5| aB|'d| कि 漢字ab|、:|x|!/\n|\n| | y",
}  # fmt: skip


def pieces(name: str, text: str) -> list[str]:
    found = PRETOKENIZERS[name].build().pre_tokenize_str(text)
    return [bytes(BYTE_OF_CHARACTER[one] for one in piece).decode() for piece, _ in found]


@pytest.mark.parametrize(
    ("name", "expected"), [(name, said) for names, said in SPLITS.items() for name in names]
)
def test_a_text_is_split_as_the_family_does(name: str, expected: str) -> None:
    assert pieces(name, TEXT) == expected.split("|")


@pytest.mark.parametrize("name", ["default", *(names[0] for names in SPLITS)])
def test_nothing_of_a_text_is_lost(name: str) -> None:
    for text in make_strings()[::25]:
        assert "".join(pieces(name, text)) == text


@pytest.mark.parametrize(
    ("name", "whole", "begins"),
    [("tekken", True, True), ("falcon3", True, True), ("dbrx", False, False)],
)
def test_what_else_a_name_says(name: str, whole: bool, begins: bool) -> None:
    """Whether a piece that is a token is that token, and whether BOS precedes a text."""
    metadata = smollm2_metadata() | {"tokenizer.ggml.pre": name, "tokenizer.ggml.merges": []}
    metadata.pop("tokenizer.ggml.add_bos_token", None)
    tokenizer = Tokenizer.from_json(GgufVocabulary(metadata, HERE).tokenizer_json)
    assert (len(tokenizer.encode("Hello")) == 1) == whole
    assert tokenizer.beginning == ([1] if begins else [])
    said = metadata | {"tokenizer.ggml.add_bos_token": not begins}
    other = Tokenizer.from_json(GgufVocabulary(said, HERE).tokenizer_json)
    assert other.beginning == ([] if begins else [1])


def test_what_would_end_a_text_is_left_out() -> None:
    metadata = smollm2_metadata() | {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    assert Tokenizer.from_json(GgufVocabulary(metadata, HERE).tokenizer_json).beginning == [1]


def test_gemma_4_merges_characters_and_marks_spaces() -> None:
    tokens = ["<pad>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "\n",
              "ab", "▁ab", "\n\n", "▁▁"]  # fmt: skip
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[6] * 256, *[1] * 8],
        "tokenizer.ggml.merges": ["\n \n", "▁ ▁", "a b", "▁ ab"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = Tokenizer.from_json(GgufVocabulary(metadata, HERE).tokenizer_json)
    assert tokenizer.beginning == [1]
    ids = tokenizer.encode("ab ab  a\n\n\né")
    found = ["ab", "▁ab", "▁▁", "a", "\n\n", "\n", "<0xC3>", "<0xA9>"]
    assert [tokenizer.piece(id) for id in ids] == found
    assert tokenizer.decode(ids) == "ab ab  a\n\n\né"
