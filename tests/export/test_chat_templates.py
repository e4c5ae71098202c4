"""Named chat templates: read from every form of a model, kept in the manifest, used with tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.sources.gguf import GgufSource
from pilotfish.export.sources.huggingface import DirectorySource
from pilotfish.export.sources.huggingface_tokenizer import read_templates
from pilotfish.export.sources.layer_selection import keep_first_layers
from tests.support.small_checkpoints import write_directory, write_gguf
from tests.support.tiny import tiny_artifact

TOOLS = "{% if tools %}<tool_call>{{ tools[0]['function']['name'] }}\"arguments\"{% endif %}"
SEVERAL = [
    {"name": "default", "template": "usual"},
    {"name": "tool_use", "template": TOOLS},
    {"name": "rag", "template": "sources"},
]
NAMED = {"tool_use": TOOLS, "rag": "sources"}


def silent(label: str, done: int, total: int | None) -> None:
    pass


def test_a_list_in_the_settings(tmp_path: Path) -> None:
    files = {"tokenizer_config.json": {"chat_template": SEVERAL}}
    source = DirectorySource(write_directory(tmp_path, files=files), silent)
    assert (source.vocabulary.chat_template, source.vocabulary.chat_templates) == ("usual", NAMED)
    cut = keep_first_layers(source, 1)
    assert (cut.vocabulary.chat_template, cut.vocabulary.chat_templates) == ("usual", NAMED)


def test_files_of_their_own_come_first(tmp_path: Path) -> None:
    settings = {"chat_template": SEVERAL}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text("newer")
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "rag.jinja").write_text("newer sources")
    (folder / "thinking.jinja").write_text("think")
    (folder / "readme.md").write_text("no template")
    # the list does not count then, nor does what it names besides: so transformers does
    assert read_templates(tmp_path) == ("newer", {"rag": "newer sources", "thinking": "think"})
    (folder / "rag.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ExportError, match=r"rag\.jinja"):
        read_templates(tmp_path)


def test_templates_may_be_listed_by_name(tmp_path: Path) -> None:
    listed = {each["name"]: each["template"] for each in SEVERAL}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "a processor's"}))
    assert read_templates(tmp_path) == ("usual", NAMED)


@pytest.mark.parametrize(
    "stated", [None, 3, [], ["x"], [{"name": 1, "template": "t"}], [{"name": "default"}], {}]
)
def test_what_is_no_template_is_none(tmp_path: Path, stated: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stated}))
    assert read_templates(tmp_path) == (None, {})


def test_gguf(tmp_path: Path) -> None:
    settings = {
        "tokenizer.chat_template": "usual",
        "tokenizer.chat_templates": ["tool_use", "rag", "absent"],
        "tokenizer.chat_template.tool_use": TOOLS,
        "tokenizer.chat_template.rag": "sources",
    }
    source = GgufSource(write_gguf(tmp_path / "a.gguf", settings=settings), silent)
    assert (source.vocabulary.chat_template, source.vocabulary.chat_templates) == ("usual", NAMED)


def test_the_manifest_keeps_them(tmp_path: Path) -> None:
    files = {"tokenizer_config.json": {"chat_template": SEVERAL}}
    source = DirectorySource(write_directory(tmp_path / "model", files=files), silent)
    export_model(source, tmp_path / "artifact")
    manifest = Artifact.open(tmp_path / "artifact").manifest
    assert (manifest.chat_template, manifest.chat_templates) == ("usual", NAMED)
    tiny_artifact(tmp_path / "one")
    assert "chat_templates" not in json.loads((tmp_path / "one" / "manifest.json").read_text())


def test_a_vocabulary_crosses_with_the_one_that_is_used(tmp_path: Path) -> None:
    artifact = tiny_artifact(tmp_path, templates=NAMED)
    vocabulary = Vocabulary.from_artifact(artifact)
    arrived = Vocabulary.decode(vocabulary.encode(), vocabulary.model)
    assert arrived.chat_templates == {"tool_use": TOOLS}
    assert arrived.with_tools.chat_template == TOOLS
    assert arrived.with_tools.tokenizer is arrived.tokenizer
    plain = Vocabulary.from_artifact(tiny_artifact(tmp_path / "plain"))
    assert plain.with_tools is plain
    assert b"chat_templates" not in plain.encode()  # as older ends have it
    assert plain.digest != vocabulary.digest


def test_one_that_knows_no_tools_is_not_used(tmp_path: Path) -> None:
    vocabulary = Vocabulary.from_artifact(
        tiny_artifact(tmp_path, templates={"tool_use": "{{ messages }}"})
    )
    assert vocabulary.with_tools is vocabulary
