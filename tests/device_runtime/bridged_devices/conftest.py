"""Tiny models of four vocabularies, edges with them, and links that break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pilotfish import EdgeServer
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire import messages as m
from tests import conftest
from tests.bridge.test_drafter import OWN, THEIRS
from tests.device_runtime.bridged_devices.asking import (
    CONTEXT,
    OTHERS,
    STRANGE,
    Models,
    change,
)
from tests.device_runtime.test_bad_edge import Answer, LyingEdge
from tests.support.relay import Relay
from tests.support.tiny import tiny_artifact


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    vocabularies = {"draft": OWN, "target": THEIRS, "other": OTHERS, "strange": STRANGE}
    for seed, (name, tokens) in enumerate(vocabularies.items()):
        path = folder / name
        sizes: dict[str, Any] = {"seed": seed, "context": CONTEXT, "sharpness": 0.8}
        tiny_artifact(path, tokens=tokens, eos=f"<end of {name}>", **sizes)
        if name != "draft":  # answers never end by themselves
            change(path, eos_ids=[])
    return Models(*(folder / name for name in vocabularies))


@pytest.fixture(scope="package")
def server(models: Models) -> Iterator[EdgeServer]:
    with EdgeServer(models.target, threads=1, sessions=200) as opened:
        yield opened


@pytest.fixture(scope="package")
def other_server(models: Models) -> Iterator[EdgeServer]:
    with EdgeServer(models.other, threads=1, sessions=200) as opened:
        yield opened


@pytest.fixture(scope="package")
def strange_server(models: Models) -> Iterator[EdgeServer]:
    with EdgeServer(models.strange, threads=1) as opened:
        yield opened


@pytest.fixture
def relay(server: EdgeServer) -> Iterator[Relay]:
    opened = Relay(server.endpoint)
    yield opened
    opened.close()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def liar(pair: conftest.Pair) -> Iterator[Callable[..., LyingEdge]]:
    """Makes edges that say to have a model, or otherwise, and answer nothing else."""
    edges: list[LyingEdge] = []

    def make(path: Path, **changes: Any) -> LyingEdge:
        vocabulary = Vocabulary.from_artifact(Artifact.open(path))
        offer = {
            "vocab_size": vocabulary.vocab_size,
            "eos_ids": vocabulary.eos_ids,
            "tokenizer": vocabulary.fingerprint,
            "vocabulary": vocabulary.digest,
            "vocabulary_bytes": len(vocabulary.encode()),
        }

        def answers(request: m.DeviceMessage) -> list[Answer]:
            if not isinstance(request, m.Hello):
                return []
            return [[msgspec.structs.replace(edge.welcome(), **{**offer, **changes})]]

        edge = LyingEdge(pair, answers)
        edge.start()
        edges.append(edge)
        return edge

    yield make
    for edge in edges:
        edge.stop()
