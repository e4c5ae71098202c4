"""An edge with another vocabulary, edges that lie, and a cache of this test's own."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pilotfish import EdgeServer
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire import messages as m
from tests.conftest import Pair
from tests.device_runtime.test_bad_edge import Answer, LyingEdge
from tests.device_runtime.vocabulary_wire.arriving import (
    GOOD,
    PARTS,
    Script,
)
from tests.support.tiny import tiny_artifact


@pytest.fixture(scope="package")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A model of another vocabulary, with a chat template so long that there are several parts."""
    artifact = tiny_artifact(
        tmp_path_factory.mktemp("foreign") / "target", tokens=[*"abcdeĠ", "ab"], eos="<stop>"
    )
    path = artifact.path / "manifest.json"
    prose = random.Random(1).randbytes((PARTS - 1) * m.PART_BYTES // 2).hex()
    manifest = json.loads(path.read_text())
    manifest["chat_template"] = "{# " + prose + " #}" + manifest["chat_template"]
    path.write_text(json.dumps(manifest))
    return Artifact.open(artifact.path)


@pytest.fixture(scope="package")
def wanted(foreign: Artifact) -> Vocabulary:
    return Vocabulary.from_artifact(foreign)


@pytest.fixture(scope="package")
def other_edge(foreign: Artifact) -> Iterator[EdgeServer]:
    with EdgeServer(foreign.path, threads=1, sessions=4) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where vocabularies are kept; nothing is there yet."""
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vocabularies"


@pytest.fixture
def liar(pair: Pair) -> Iterator[Callable[..., LyingEdge]]:
    """Edges that offer a vocabulary, and answer a fetch by a script."""
    opened: list[LyingEdge] = []

    def make(script: Script, held: Vocabulary = GOOD, **changes: Any) -> LyingEdge:
        def answer(request: m.DeviceMessage) -> list[Answer]:
            return [[welcome]] if isinstance(request, m.Hello) else script(request)

        edge = LyingEdge(pair, answer)
        blob = held.encode()
        offer = {
            "tokenizer": GOOD.fingerprint,
            "vocabulary": hashlib.sha256(blob).hexdigest(),
            "vocabulary_bytes": len(blob),
        }
        welcome = msgspec.structs.replace(edge.welcome(), **{**offer, **changes})
        edge.start()
        opened.append(edge)
        return edge

    yield make
    for each in opened:
        each.stop()
