"""Tokens that templates write by a name, tokens beside a tokenizer.json, and end tokens."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, processors

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.sources import open_source
from pilotfish.export.sources.huggingface import DirectorySource
from pilotfish.export.tokenizers.roles import named_tokens, tokenizer_class
from tests.support.genai_folders import genai_folder
from tests.support.small_checkpoints import (
    LLAMA,
    SPECIAL,
    tokenizer_json,
    write_directory,
    write_gguf,
)

END, TEXT, MARK = 259, "<|text|>", "<|im_end|>"
CHATML = "{% for m in messages %}{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
ONE = [{"role": "user", "content": "hi"}]


def silent(label: str, done: int, total: int | None) -> None:
    pass


def with_tokens(*added: str, bos: str | None = None) -> str:
    """The small tokenizer.json with further special tokens: ids 260 on."""
    tokenizer = Tokenizer.from_str(tokenizer_json())
    tokenizer.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in added])
    if bos is not None:
        id = tokenizer.token_to_id(bos)
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, id)])
    text: str = tokenizer.to_str()
    return text


def checkpoint(
    path: Path,
    settings: dict[str, Any] | None = None,
    *,
    tokens: tuple[str, ...] = (TEXT, MARK),
    config: dict[str, Any] | None = None,
    **files: Any,
) -> Path:
    """A directory with these tokens besides the small tokenizer's, and these settings."""
    stated = {"tokenizer_class": "PreTrainedTokenizerFast"} | (settings or {})
    named = {name.replace("__", "."): content for name, content in files.items()}
    files = {"tokenizer_config.json": stated, **named}
    write_directory(path, LLAMA | {"bos_token_id": 260} | (config or {}), files=files)
    if "tokenizer.json" not in files:
        (path / "tokenizer.json").write_text(with_tokens(*tokens))
    return path


def source_of(
    path: Path, *args: Any, ignored: tuple[str, ...] = (), **info: Any
) -> DirectorySource:
    return DirectorySource(checkpoint(path, *args, **info), silent, ignored=ignored)


def token(content: str, **flags: bool) -> dict[str, Any]:
    names = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return {"content": content} | {name: flags.get(name, False) for name in names}


@pytest.mark.parametrize(
    ("settings", "roles", "class_name", "named"),
    [
        ({}, {}, "", {}),
        ({"bos_token": "<s>"}, {}, "", {"bos_token": "<s>"}),
        ({"bos_token": {"content": "<s>", "lstrip": False}}, {}, "", {"bos_token": "<s>"}),
        # null is no token, although the class or an older file has one
        ({"bos_token": None}, {}, "LlamaTokenizer", {"eos_token": "</s>", "unk_token": "<unk>"}),
        ({"eos_token": None}, {}, "Qwen2Tokenizer",
         dict.fromkeys(("pad_token", "unk_token"), "<|endoftext|>")),
        ({"eos_token": "a"}, {"eos_token": "b"}, "", {"eos_token": "b"}),
        ({"eos_token": "a", "added_tokens_decoder": {}}, {"eos_token": "b"}, "",
         {"eos_token": "a"}),
        ({"image_token": "<i>", "chat_token": 3, "eot_token": None}, {}, "",
         {"image_token": "<i>"}),
        ({"extra_special_tokens": {"image_token": "<i>", "boi": "<b>"}}, {}, "",
         {"image_token": "<i>", "boi": "<b>"}),
        ({"extra_special_tokens": ["<i>"], "additional_special_tokens": {"x": "y"}}, {}, "", {}),
        ({}, {"image_token": "<i>", "additional_special_tokens": ["<j>"]}, "",
         {"image_token": "<i>"}),
    ],
)  # fmt: skip
def test_names_of_tokens(
    settings: dict[str, Any], roles: dict[str, Any], class_name: str, named: dict[str, str]
) -> None:
    assert named_tokens(settings, roles, class_name) == named


def test_padding_of_the_tokenizer_is_the_pad_token() -> None:
    assert named_tokens({}, {}, "", "<p>") == {"pad_token": "<p>"}
    assert named_tokens({"pad_token": None}, {}, "", "<p>") == {}


@pytest.mark.parametrize(
    ("stated", "model_type", "byte_level", "results"),
    [
        ("LlamaTokenizerFast", "llama", False, "LlamaTokenizer"),
        ("LlamaTokenizerFast", "llama", True, ""),  # Llama 3's kind under the old name
        ("LlamaTokenizerFast", "mistral", False, ""),
        ("PreTrainedTokenizerFast", "qwen2", True, "Qwen2Tokenizer"),
        ("PreTrainedTokenizerFast", "qwen3", True, "PreTrainedTokenizer"),
        (None, "gemma", False, "GemmaTokenizer"),
        (None, "llama", False, ""),
        (3, None, False, ""),
    ],
)
def test_the_class_that_reads_a_tokenizer(
    stated: object, model_type: object, byte_level: bool, results: str
) -> None:
    settings = {} if stated is None else {"tokenizer_class": stated}
    assert tokenizer_class(settings, {"model_type": model_type}, byte_level=byte_level) == results


def test_a_template_writes_the_tokenizers_own(tmp_path: Path) -> None:
    written = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ image_token }}" + PLAIN
    settings = {"bos_token": None, "eos_token": MARK, "extra_special_tokens": {"image_token": TEXT}}
    path = checkpoint(tmp_path / "model", settings, chat_template__jinja=written)
    export_model(str(path), tmp_path / "artifact")
    artifact = Artifact.open(tmp_path / "artifact")
    wanted = {"eos_token": MARK, "image_token": TEXT}
    assert artifact.manifest.special_tokens == wanted
    vocabulary = Vocabulary.from_artifact(artifact)
    arrived = Vocabulary.decode(vocabulary.encode(), vocabulary.model)
    for each in (vocabulary, arrived):
        assert each.special_tokens == wanted
        assert each.template is not None
        assert each.template.render(ONE) == f"|{MARK}||{TEXT}hi"


def test_models_of_older_releases_have_the_two_tokens_that_these_knew(tmp_path: Path) -> None:
    written = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}" + PLAIN
    settings = {"bos_token": None, "pad_token": TEXT}
    path = checkpoint(tmp_path / "model", settings, chat_template__jinja=written)
    export_model(str(path), tmp_path / "artifact")
    file = tmp_path / "artifact" / "manifest.json"
    fields = json.loads(file.read_text())
    del fields["special_tokens"]
    file.write_text(json.dumps(fields))
    vocabulary = Vocabulary.from_artifact(Artifact.open(tmp_path / "artifact"))
    assert b"special_tokens" not in vocabulary.encode()
    assert vocabulary.template is not None
    assert vocabulary.template.render(ONE) == f"{TEXT}|{SPECIAL}|hi"


def test_a_vocabulary_from_a_newer_or_a_lying_edge(tmp_path: Path) -> None:
    export_model(str(checkpoint(tmp_path / "model", {"pad_token": TEXT})), tmp_path / "artifact")
    vocabulary = Vocabulary.from_artifact(Artifact.open(tmp_path / "artifact"))
    plain = msgspec.msgpack.decode(vocabulary.encode())
    later = msgspec.msgpack.encode({**plain, "of a later release": 1})
    assert Vocabulary.decode(later, vocabulary.model) == vocabulary
    for named in (
        {"a" * 65: "b"}, {"a": "b" * 1025}, {"a": 1}, {str(i): "" for i in range(1025)}, ["a"],
    ):  # fmt: skip
        with pytest.raises(ArtifactError, match="this is not a vocabulary"):
            Vocabulary.decode(msgspec.msgpack.encode({**plain, "special_tokens": named}), "m")


@pytest.mark.parametrize("form", ["string", "object", "map"])
def test_an_end_that_only_the_tokenizer_names(tmp_path: Path, form: str) -> None:
    settings = {"eos_token": {"string": MARK, "object": token(MARK)}.get(form)}
    roles = {"special_tokens_map.json": {"eos_token": MARK}} if form == "map" else {}
    path = checkpoint(tmp_path / "a", settings)
    for name, content in roles.items():
        (path / name).write_text(json.dumps(content))
    assert DirectorySource(path, silent).vocabulary.eos_ids == [END, 261]
    none = source_of(tmp_path / "b", {"eos_token": MARK}, config={"eos_token_id": None})
    assert none.vocabulary.eos_ids == [261]


def test_a_begin_that_only_the_tokenizer_names(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"bos_token": MARK}, config={"bos_token_id": None})
    assert source.vocabulary.bos_id == 261


@pytest.mark.parametrize(
    ("ends", "template", "message"),
    [
        (END, "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", None),
        (END, PLAIN, None),
        (END, "{{ raise_exception('no') }}", None),
        (END, None, None),
        (
            END,
            CHATML,
            r"puts <\|im_end\|> after an answer, but this token is not an end token \(<\|end\|>\)",
        ),
        (None, CHATML, r"no file names an end token \(the chat template puts <\|im_end\|> after"),
        (None, None, "no file names an end token, so answers end only at"),
    ],
)
def test_answers_that_would_not_end_are_warned_of(
    tmp_path: Path,
    ends: int | None,
    template: str | None,
    message: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = {} if template is None else {"chat_template__jinja": template}
    path = checkpoint(tmp_path / "model", config={"eos_token_id": ends}, **files)
    with caplog.at_level(logging.WARNING, "pilotfish.export"):
        export_model(str(path), tmp_path / "artifact")
    warnings = Artifact.open(tmp_path / "artifact").manifest.warnings
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == warnings
    if message is None:
        assert warnings == []
    else:
        [warning] = warnings
        assert re.search(message, warning)


def test_a_gguf_without_an_end(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", settings={"tokenizer.chat_template": CHATML})
    source = open_source(str(path))
    assert source.vocabulary.special_tokens["eos_token"] == SPECIAL
    for dialect in ("opset24", "llamacpp"):
        none = write_gguf(tmp_path / "none.gguf", ends=False)
        export_model(str(none), tmp_path / dialect, dialect=dialect)
        manifest = Artifact.open(tmp_path / dialect).manifest
        assert manifest.special_tokens is not None
        assert "eos_token" not in manifest.special_tokens
        assert "no file names an end token" in manifest.warnings[0]


BROKEN = "fine\n{% for m in messages %}{{ m.content }"


@pytest.mark.parametrize("kind", ["directory", "gguf", "llamacpp", "genai"])
def test_a_template_that_does_not_compile_is_refused(tmp_path: Path, kind: str) -> None:
    dialect = kind if kind in ("llamacpp", "genai") else "opset24"
    if kind == "genai":
        path = genai_folder(tmp_path / "folder")
        (path / "chat_template.jinja").write_text(BROKEN)
    elif kind == "directory":
        path = checkpoint(tmp_path / "model", chat_template__jinja=BROKEN)
    else:
        path = write_gguf(tmp_path / "a.gguf", settings={"tokenizer.chat_template": BROKEN})
    with pytest.raises(ExportError, match=r"template does not compile: line 2: unexpected '}'"):
        export_model(str(path), tmp_path / "out", dialect=dialect)
    assert not (tmp_path / "out").exists()
    export_model(str(path), tmp_path / "out", dialect=dialect, ignore_keys=["chat_template"])
    manifest = Artifact.open(tmp_path / "out").manifest
    assert (manifest.chat_template, manifest.chat_templates) == (None, {})
    assert manifest.source.ignored_keys == ["chat_template"]


def test_the_template_for_tools_must_compile_and_others_need_not(tmp_path: Path) -> None:
    listed = [
        {"name": "default", "template": PLAIN},
        {"name": "rag", "template": BROKEN},
        {"name": "tool_use", "template": PLAIN},
    ]
    path = checkpoint(tmp_path / "model", {"chat_template": listed})
    export_model(str(path), tmp_path / "out")
    listed[2]["template"] = BROKEN
    checkpoint(tmp_path / "model", {"chat_template": listed})
    with pytest.raises(ExportError, match="the chat template tool_use does not compile: line 2"):
        export_model(str(path), tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "template", "refused"),
    [
        ({"pad_token": "[PAD]"}, PLAIN, None),  # not written, so that no prompt has it
        (
            {"pad_token": "[PAD]"},
            "{{ pad_token }}",
            "writes pad_token, .* not have this token, '.PAD",
        ),
        ({"additional_special_tokens": ["[X]"]}, "a[X]", r"writes \[X\], .* not have this token"),
        ({"pad_token": MARK}, "{{ pad_token }}", None),
    ],
)
def test_a_template_that_writes_what_the_tokenizer_lacks(
    tmp_path: Path, settings: dict[str, Any], template: str, refused: str | None
) -> None:
    path = checkpoint(tmp_path, settings, chat_template__jinja=template)
    if refused is None:
        assert "[PAD]" not in DirectorySource(path, silent).vocabulary.special_tokens.values()
        return
    with pytest.raises(ExportError, match=refused):
        DirectorySource(path, silent)
    DirectorySource(path, silent, ignored=["chat_template"])


@pytest.mark.parametrize(
    ("class_name", "template", "refused"),
    [
        ("Qwen2Tokenizer", CHATML, True),
        ("Qwen2Tokenizer", PLAIN, False),
        ("PreTrainedTokenizerFast", CHATML, False),
    ],
)
def test_a_token_that_a_class_would_not_add(
    tmp_path: Path, class_name: str, template: str, refused: bool
) -> None:
    decoder = {"260": token(TEXT, special=True)}
    settings = {"tokenizer_class": class_name, "added_tokens_decoder": decoder}
    path = checkpoint(tmp_path, settings, chat_template__jinja=template)
    if refused:
        with pytest.raises(ExportError, match=r"writes <\|im_end\|>, which tokenizer\.json adds"):
            DirectorySource(path, silent)
    else:
        assert DirectorySource(path, silent).vocabulary.chat_template == template


def test_tokens_that_stand_beside_a_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(with_tokens(TEXT))
    plain = tokenizer.to_str()
    (tmp_path / "same").mkdir()
    assert source_of(tmp_path / "same", tokenizer__json=plain).vocabulary.tokenizer_json == plain
    added = {TEXT: 260, "<a>": 261, MARK: 262}
    source = source_of(
        tmp_path / "json", {"eos_token": MARK}, tokenizer__json=plain, added_tokens__json=added
    )
    result = Tokenizer.from_str(source.vocabulary.tokenizer_json)
    flags = result.get_added_tokens_decoder()
    assert [result.token_to_id(name) for name in added] == [260, 261, 262]
    assert (flags[261].special, flags[261].normalized) == (False, True)
    assert (flags[262].special, flags[262].normalized) == (True, False)
    assert source.vocabulary.vocab_size == 263


def test_settings_have_the_last_word_about_added_tokens(tmp_path: Path) -> None:
    decoder = {"260": token(TEXT, lstrip=True), "261": token(MARK, special=True, rstrip=True)}
    source = source_of(tmp_path, {"added_tokens_decoder": decoder}, added_tokens__json={"<a>": 262})
    flags = Tokenizer.from_str(source.vocabulary.tokenizer_json).get_added_tokens_decoder()
    assert (flags[260].special, flags[260].lstrip, flags[261].rstrip) == (False, True, True)
    assert 262 not in flags


def test_a_token_of_the_vocabulary_that_has_a_role_is_special(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"eos_token": "the"})
    flags = Tokenizer.from_str(source.vocabulary.tokenizer_json).get_added_tokens_decoder()
    assert flags[source.vocabulary.eos_ids[-1]].content == "the"
    assert flags[source.vocabulary.eos_ids[-1]].special


def test_an_added_token_that_would_get_another_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="'<a>' would get the id 262, not 270: let save_pretr"):
        source_of(tmp_path, added_tokens__json={"<a>": 270})


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"split_special_tokens": True}, "split_special_tokens"),
        ({"add_prefix_space": True}, "add_prefix_space"),
    ],
)
def test_settings_that_readers_follow_differently(
    tmp_path: Path, settings: dict[str, Any], key: str
) -> None:
    with pytest.raises(ExportError, match=rf"{key} .* --ignore-key {key}"):
        source_of(tmp_path / "a", settings)
    export_model(str(checkpoint(tmp_path / "b", settings)), tmp_path / "out", ignore_keys=[key])
    assert Artifact.open(tmp_path / "out").manifest.source.ignored_keys == [key]
    assert source_of(tmp_path / "c", dict.fromkeys(settings, False)).vocabulary.bos_id == 260


def test_a_folder_of_genai_names_its_tokens_too(tmp_path: Path) -> None:
    folder = genai_folder(tmp_path / "folder")
    text = (folder / "tokenizer.json").read_text("utf-8")
    word = next(iter(Tokenizer.from_str(text).get_added_tokens_decoder().values())).content
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": word}))
    (folder / "chat_template.jinja").write_text("{{ pad_token }}")
    export_model(str(folder), tmp_path / "out", dialect="genai")
    vocabulary = Vocabulary.from_artifact(Artifact.open(tmp_path / "out"))
    assert vocabulary.template is not None
    assert vocabulary.template.render(ONE) == word
