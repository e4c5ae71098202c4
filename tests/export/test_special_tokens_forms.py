"""Special tokens in the less usual forms that published checkpoints have them in."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from pilotfish.engines.tokenizer import Tokenizer as ModelTokenizer
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.huggingface import DirectorySource
from pilotfish.export.sources.huggingface_tokenizer import DirectoryTokenizer
from pilotfish.export.tokenizers.gguf import CONTROL, USER_DEFINED, GgufVocabulary
from pilotfish.export.tokenizers.roles import named_tokens, tokenizer_class
from tests.export.test_special_tokens import (
    ONE,
    PLAIN,
    TEXT,
    silent,
    source_of,
    token,
)
from tests.support.small_checkpoints import (
    LLAMA,
    MERGES,
    SPECIAL,
    TOKENS,
    tiny_weights,
    write_directory,
)


@pytest.mark.parametrize("name", ["bos_token", "pad_token"])
def test_an_empty_token_writes_nothing(tmp_path: Path, name: str) -> None:
    written = f"{{{{ {name} is defined }}}}[{{{{ {name} }}}}]{PLAIN}"
    source = source_of(tmp_path, {name: ""}, chat_template__jinja=written)
    template = source.vocabulary.template
    assert template is not None
    assert template.render(ONE) == "True[]hi"


@pytest.mark.parametrize("name", ["a(", "a+b", "*", "\\"])
def test_a_name_of_any_characters(tmp_path: Path, name: str) -> None:
    settings = {"extra_special_tokens": {name: "[X]"}}
    source = source_of(tmp_path, settings, chat_template__jinja=PLAIN)
    assert source.vocabulary.chat_template == PLAIN


def test_an_object_that_is_not_called_a_token_is_none() -> None:
    stated = {"image_token": token(TEXT), "audio_token": {"__type": "AddedToken", **token(TEXT)}}
    assert named_tokens(stated, {}, "") == {"audio_token": TEXT}


@pytest.mark.parametrize(
    ("class_name", "named", "missing"),
    [("GPTNeoXTokenizer", "pad_token", "<|padding|>"), ("GemmaTokenizer", "bos_token", "<bos>")],
)
def test_a_template_that_writes_what_only_the_class_has(
    tmp_path: Path, class_name: str, named: str, missing: str
) -> None:
    settings = {"tokenizer_class": class_name}
    written = f"{{{{ {named} }}}}{PLAIN}"
    with pytest.raises(
        ExportError, match=rf"writes {named}, .* this token, '{missing}'".replace("|", r"\|")
    ):
        source_of(tmp_path, settings, chat_template__jinja=written)


@pytest.mark.parametrize(
    ("stated", "model_type", "results"),
    [
        (None, "qwen2_5_vl", "Qwen2Tokenizer"),
        (None, "qwen3_vl", "Qwen2Tokenizer"),
        (None, "aya_vision", "CohereTokenizer"),
        ("LlamaTokenizerFast", "llava", ""),
        ("GPT2Tokenizer", "smolvlm", ""),
        ("LlamaTokenizer", "mistral3", ""),
        ("Qwen2Tokenizer", "qwen3_5_moe", "Qwen3_5Tokenizer"),
    ],
)
def test_the_class_that_reads_the_tokenizer_of_a_multimodal_model(
    stated: str | None, model_type: str, results: str
) -> None:
    settings = {} if stated is None else {"tokenizer_class": stated}
    assert tokenizer_class(settings, {"model_type": model_type}, byte_level=False) == results


def pair_of_files(path: Path, settings: dict[str, Any], **files: Any) -> Path:
    """A directory with GPT-2's two files in place of a tokenizer.json."""
    path.mkdir()
    vocabulary = {token: id for id, token in enumerate(TOKENS)}
    files |= {
        "vocab": vocabulary,
        "tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"} | settings,
    }
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    merges = "".join(f"{left} {right}\n" for left, right in MERGES)
    (path / "merges.txt").write_text(f"#version: 0.2\n{merges}", "utf-8")
    return path


def test_tokens_beside_a_vocab_json(tmp_path: Path) -> None:
    decoder = {"260": token(TEXT, special=True), "261": token("  ", normalized=True)}
    listed = pair_of_files(
        tmp_path / "a", {"added_tokens_decoder": decoder, "sep_token": "<|end|>"}
    )
    pair = pair_of_files(tmp_path / "b", {"eos_token": TEXT}, added_tokens={TEXT: 260, "  ": 261})
    for path in (listed, pair):
        tokenizer = ModelTokenizer.from_json(DirectoryTokenizer(path).text)
        assert tokenizer.encode(f"the{TEXT}  the", special=True) == [257, 260, 261, 257]
        assert 260 in tokenizer.special_tokens
        assert 261 not in tokenizer.special_tokens
    conflict = pair_of_files(tmp_path / "c", {"added_tokens_decoder": {"300": token(TEXT)}})
    with pytest.raises(ExportError, match="would get the id 260, not 300"):
        DirectoryTokenizer(conflict)


def spaced(prefix: str | None) -> str:
    """A small tokenizer.json of SentencePiece's kind, which puts a space before a text."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abhi", "▁a"]
    vocabulary = {piece: id for id, piece in enumerate(["<unk>", "<s>", "</s>", *pieces])}
    model = models.BPE(
        vocabulary, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    if prefix is None:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=prefix, split=False)
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    text: str = tokenizer.to_str()
    return text


@pytest.mark.parametrize(
    ("prefix", "class_name", "legacy", "model_type", "flag"),
    [
        (None, "LlamaTokenizer", False, "llama", True),
        (None, "LlamaTokenizerFast", None, "llama", True),
        (None, "LlamaTokenizer", True, "llama", False),
        (None, "LlamaTokenizer", False, "mistral", False),
        (None, "PreTrainedTokenizerFast", False, "llama", False),
        ("first", "LlamaTokenizer", False, "llama", False),
    ],
)
def test_readers_that_differ_in_spaces_are_told_of(
    tmp_path: Path,
    prefix: str | None,
    class_name: str,
    legacy: bool | None,
    model_type: str,
    flag: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = {"tokenizer_class": class_name} | ({} if legacy is None else {"legacy": legacy})
    files = {"tokenizer.json": json.loads(spaced(prefix)), "tokenizer_config.json": settings}
    for name, content in (files | {"config.json": {"model_type": model_type}}).items():
        (tmp_path / name).write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING, "pilotfish.export"):
        DirectoryTokenizer(tmp_path)
    reply = [record.getMessage() for record in caplog.records]
    assert bool(reply) == flag
    assert all("between a control token" in sentence for sentence in reply)


@pytest.mark.parametrize("outer", [None, 258])
def test_ends_and_begins_that_only_the_text_model_names(tmp_path: Path, outer: int | None) -> None:
    inner = LLAMA | {"eos_token_id": [257, 256], "bos_token_id": 3}
    config = {"model_type": "llava", "text_config": inner, "tie_word_embeddings": False}
    weights = {f"language_model.{name}": value for name, value in tiny_weights(LLAMA).items()}
    whole = {} if outer is None else {"eos_token_id": outer}
    path = write_directory(
        tmp_path / "model",
        config | whole,
        weights=weights,
        files={"tokenizer_config.json": {"eos_token": SPECIAL}},
    )
    source = DirectorySource(path, silent)
    assert source.vocabulary.eos_ids == ([257, 256, 259] if outer is None else [outer, 259])
    assert source.vocabulary.bos_id == 3


@pytest.mark.parametrize(
    ("mark", "kind", "others", "written", "ends"),
    [
        ("<|eot_id|>", CONTROL, (), "<|eot_id|>", [259, 260]),
        ("<end_of_turn>", CONTROL, (), "<end_of_turn>", [259, 260]),
        ("<|eot_id|>", CONTROL, (), "<|end|>", [259]),  # not in the template
        ("<|eot_id|>", USER_DEFINED, (), "<|eot_id|>", [259]),  # text, as the file has it
        ("<|x|>", CONTROL, (), "<|x|>", [259]),
        ("<|im_end|>", CONTROL, ("<|return|>",), "<|im_end|>", [259, 260]),
    ],
)
def test_a_gguf_ends_where_llama_cpp_ends_by_name(
    mark: str, kind: int, others: tuple[str, ...], written: str, ends: list[int]
) -> None:
    tokens = [*TOKENS, mark, *others]
    assert gguf_vocabulary(tokens, kind, written).eos_ids == ends


def test_a_part_of_an_answer_of_gpt_oss_is_no_end() -> None:
    tokens = [*(token for token in TOKENS if token != SPECIAL), "<|return|>", SPECIAL]
    assert gguf_vocabulary(tokens, CONTROL, SPECIAL).eos_ids == [259]


def gguf_vocabulary(tokens: list[str], last: int, template: str) -> GgufVocabulary:
    """A GGUF's vocabulary, with the end 259 and a kind for tokens behind it."""
    kinds = [1] * 259 + [CONTROL] + [last] * (len(tokens) - 260)
    metadata = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": kinds, "eos_token_id": 259,
        "merges": [" ".join(pair) for pair in MERGES],
    }  # fmt: skip
    prefixed = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    return GgufVocabulary(prefixed | {"tokenizer.chat_template": template}, Path("a.gguf"))
