"""Tokenizers and chat templates against transformers, and against llama.cpp where it is there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pilotfish.engines.chat import ChatTemplate
from pilotfish.engines.tokenizer import TextStream, Tokenizer
from pilotfish.export.sources.default import fetch_default
from pilotfish.export.sources.gguf import GgufSource
from pilotfish.export.sources.huggingface_tokenizer import read_templates
from pilotfish.export.tokenizers.gguf import GgufVocabulary
from pilotfish.export.tokenizers.pretokenizers import PRETOKENIZERS
from pilotfish.export.tokenizers.sentencepiece import sentencepiece_tokenizer_json
from pilotfish.export.tokenizers.tekken import tekken_tokenizer_json
from tests.support.sentencepieces import trained, write_model
from tests.support.tokenizer_strings import make_strings
from tests.support.vocabularies import HERE, sentencepiece_metadata, smollm2, smollm2_metadata

pytestmark = pytest.mark.reference
TEMPLATES = Path(__file__).parent.parent / "data" / "templates"
TOOL = {"type": "function", "function": {"name": "get", "description": "a <b>", "parameters": {}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b> & 'q' ünï 🐟"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>so</think>Hello"},
        {"role": "user", "content": "  spaced  \n"},
    ],
]


def transformers_tokenizer(text: str, folder: Path, **settings: Any) -> Any:
    """A tokenizer.json as transformers reads it from a model's directory."""
    from transformers import AutoTokenizer

    (folder / "tokenizer.json").write_text(text, "utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("pretokenizer", ["smollm", "gpt-2", "llama-bpe", "qwen2", "llama"])
def test_tokenizer_json_as_transformers_reads_it(pretokenizer: str, tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    if pretokenizer != "llama":
        metadata = smollm2_metadata() | {"tokenizer.ggml.pre": pretokenizer}
    text = GgufVocabulary(metadata, HERE).tokenizer_json
    ours, theirs = Tokenizer.from_json(text), transformers_tokenizer(text, tmp_path)
    assert ours.vocab_size == len(theirs)
    for string in make_strings():
        ids = theirs.encode(string, add_special_tokens=False)
        assert ours.encode(string, special=True) == ids, string
        expected = theirs.decode(ids, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, special=True) == expected
        stream = TextStream(ours, special=True)
        assert "".join(stream.push([id]) for id in ids) + stream.flush() == expected


def test_pair_of_files_as_transformers_reads_it(tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    from pilotfish.export.tokenizers.gpt2 import gpt2_tokenizer_json

    tree = json.loads(GgufVocabulary(smollm2_metadata(), HERE).tokenizer_json)["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(tree["vocab"]), "utf-8")
    merges = "\n".join(" ".join(pair) for pair in tree["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", "utf-8")
    special = {f"{role}_token": "<|endoftext|>" for role in ("bos", "eos", "unk")}
    size = len(tree["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    added = {
        str(size): {"content": "  ", "special": False, "normalized": True, **flags},
        str(size + 1): {"content": "<|mark|>", "special": True, "normalized": False, **flags},
    }
    settings = {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": added, **special}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = Tokenizer.from_json(gpt2_tokenizer_json(tmp_path))
    theirs = GPT2Tokenizer.from_pretrained(tmp_path)
    for string in (*make_strings(), "a<|mark|>  b  c"):
        expected = theirs.encode(string, add_special_tokens=False)
        assert ours.encode(string, special=True) == expected, string


@pytest.mark.parametrize("prefix", [True, False])
def test_tokenizer_model_as_transformers_reads_it(tmp_path: Path, prefix: bool) -> None:
    from transformers import AutoTokenizer

    fields = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_prefix_space": prefix}
    data = trained("bpe", add_dummy_prefix=prefix)
    write_model(tmp_path, data, tokenizer_config=fields, config={"model_type": "llama"})
    ours = Tokenizer.from_json(sentencepiece_tokenizer_json(tmp_path))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size == len(theirs)
    for string in make_strings():
        ids = theirs.encode(string, add_special_tokens=False)
        assert ours.encode(string, special=True) == ids, string


def test_tekken_as_transformers_reads_it(tmp_path: Path) -> None:
    from transformers.integrations.mistral.tokenizer import MistralConverter

    from tests.export.test_tekken import tekken

    named = [{"rank": 0, "token_str": "<unk>"}, {"rank": 1, "token_str": "<s>"}]
    content = tekken() | {"special_tokens": named}
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    ours = Tokenizer.from_json(tekken_tokenizer_json(tmp_path))
    theirs = MistralConverter(str(tmp_path / "tekken.json")).converted()
    for string in make_strings():
        expected = theirs.encode(string, add_special_tokens=False).ids
        assert ours.encode(string, special=True) == expected, string


def test_pretokenizers_as_transformers_has_them() -> None:
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    checked = GGUF_PRE_TOKENIZER_SPLITS.keys() & PRETOKENIZERS.keys()
    assert len(checked) > 15
    for name in checked:
        split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated")
        theirs, ours = pre_tokenizers.Sequence([split, to_bytes]), PRETOKENIZERS[name].build()
        for string in make_strings():
            expected = theirs.pre_tokenize_str(string)
            assert ours.pre_tokenize_str(string) == expected, (name, string)


def test_named_templates_as_transformers_chooses_them(tmp_path: Path) -> None:
    templates = tmp_path / "additional_chat_templates"
    templates.mkdir()
    (tmp_path / "chat_template.jinja").write_text("usual {{ messages[0].content }}")
    (templates / "tool_use.jinja").write_text(
        "{% for t in tools %}{{ t.function.name }}{% endfor %}"
    )
    text = GgufVocabulary(smollm2_metadata(), HERE).tokenizer_json
    theirs = transformers_tokenizer(text, tmp_path)
    usual, named = read_templates(tmp_path)
    assert usual is not None
    for tools, source in ((None, usual), ([TOOL], named["tool_use"])):
        expected = theirs.apply_chat_template(CHATS[0], tokenize=False, tools=tools)
        assert ChatTemplate(source).render(CHATS[0], tools=tools) == expected


@contextmanager
def llama_cpp_tokenizer(path: Path) -> Iterator[Any]:
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs the extra `llamacpp`")
    with closing(llama_cpp.Llama(str(path), vocab_only=True, verbose=False)) as model:
        yield model


def test_smollm2_live() -> None:
    with llama_cpp_tokenizer(fetch_default(lambda label, done, total: None)) as theirs:
        for special in (False, True):
            for string in make_strings():
                expected = theirs.tokenize(string.encode(), add_bos=False, special=special)
                assert smollm2().encode(string, special=special) == expected, string
                assert smollm2().decode(expected) == theirs.detokenize(expected).decode()


def test_sentencepiece_live(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="needs the extra `llamacpp`")
    from tests.reference.make_golden_tokens import write_vocabulary

    metadata = sentencepiece_metadata()
    write_vocabulary(tmp_path / "spm.gguf", metadata, "default")
    ours = Tokenizer.from_json(GgufVocabulary(metadata, HERE).tokenizer_json)
    with llama_cpp_tokenizer(tmp_path / "spm.gguf") as theirs:
        for string in make_strings():
            expected = theirs.tokenize(string.encode(), add_bos=False, special=True)
            assert ours.encode(string, special=True) == expected, string


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5", "qwen3", "llama3", "mistral"])
def test_chat_templates_as_transformers_renders_them(name: str, tmp_path: Path) -> None:
    if name == "smollm2":
        opened = GgufSource(fetch_default(lambda *step: None), lambda *step: None)
        source = opened.vocabulary.chat_template
    else:
        source = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    assert source is not None
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    text = GgufVocabulary(smollm2_metadata(), HERE).tokenizer_json
    theirs = transformers_tokenizer(text, tmp_path, chat_template=source, **tokens)
    ours = ChatTemplate(source, tokens)
    for chat in CHATS[:1] if name == "mistral" else CHATS:  # Mistral knows no system
        for prompt in (False, True):
            for tools in (None, [TOOL]):
                expected = theirs.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=prompt, tools=tools
                )
                assert ours.render(chat, add_generation_prompt=prompt, tools=tools) == expected
