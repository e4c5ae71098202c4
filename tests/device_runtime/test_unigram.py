"""A drafter and a target of one Unigram vocabulary answer together; of two, they do not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import PilotfishError
from pilotfish.export.model import export_model
from tests.support.sentencepieces import unigram
from tests.support.tiny import RandomSource, tiny_artifact, tiny_config

CHOICE = {"enum": ["hello world", "a b c"]}
TEMPLATE = "<s>{% for m in messages %}{{ m.content }}{% endfor %}"


def artifact(path: Path, seed: int, template: str = TEMPLATE) -> Path:
    """Export a random model of the Unigram vocabulary."""
    tokenizer = unigram()
    config = tiny_config(vocab_size=tokenizer.vocab_size + 8)
    source = RandomSource(
        config, seed, vocab=tokenizer.vocab_size, sharpness=2.0, template=template
    )
    source.change_vocabulary(tokenizer_json=tokenizer._json, eos_ids=[2])
    export_model(source, path)
    return path


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EdgeServer]:
    with EdgeServer(artifact(tmp_path_factory.mktemp("target"), 1), threads=1) as server:
        yield server


@pytest.mark.parametrize("template", [TEMPLATE, "{{ messages[0].content }}"])
def test_one_vocabulary(edge: EdgeServer, tmp_path: Path, template: str) -> None:
    """Also where the edge's chat template is another: then the drafter's own is used."""
    draft = artifact(tmp_path / "draft", 2, template)
    with Device(draft, edge.endpoint, threads=1) as device:
        fields = {"max_tokens": 24}
        drafted = device.generate("The quick brown fox", protocol="greedy", window=3, **fields)
        alone = device.generate("The quick brown fox", protocol="stream", **fields)
        assert drafted.tokens == alone.tokens
        assert drafted.text == alone.text == device.tokenizer.decode(alone.tokens)
        assert device.prompt("a </s>").ids.tolist().count(2) == 0
        held = device.generate("Say it.", protocol="greedy", max_tokens=40, schema=CHOICE)
        assert json.loads(held.text) in CHOICE["enum"]


def test_another_vocabulary(edge: EdgeServer, tmp_path: Path) -> None:
    tiny_artifact(tmp_path / "draft")
    with (
        pytest.raises(PilotfishError, match="a Unigram vocabulary cannot be sent"),
        Device(tmp_path / "draft", edge.endpoint, threads=1) as device,
    ):
        device.generate("a", protocol="greedy", max_tokens=4)
