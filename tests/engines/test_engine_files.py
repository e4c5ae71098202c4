"""Engine files: what is checked without a GPU and without TensorRT, and its sentences."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.cudart import Gpu
from pilotfish.engines.engine_errors import EngineFileError
from pilotfish.engines.tensorrt.build import EngineRequest
from pilotfish.engines.tensorrt.cache import EngineCache
from pilotfish.engines.tensorrt.edition import RTX, STANDARD
from pilotfish.engines.tensorrt.engine_file import (
    HEADER_LIMIT,
    EngineKey,
    check_engine,
    read_header,
    read_plan,
    shipped_engines,
    shipped_path,
    write_engine,
)
from pilotfish.engines.tensorrt.targets import USUAL
from tests.support.tiny import tiny_artifact

VERSION = "1.7.1.116"
PLAN = bytes(range(256)) * 8


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return tiny_artifact(tmp_path_factory.mktemp("engines") / "a", dialect="opset24")


@pytest.fixture
def engine(artifact: Artifact, tmp_path: Path) -> Path:
    path = tmp_path / key_of(artifact).name
    write_engine(path, key_of(artifact), PLAN)
    return path


def key_of(artifact: Artifact, compute: str = USUAL, **changes: Any) -> EngineKey:
    request = EngineRequest(VERSION, Gpu("", compute), artifact, 2, 64, edition=RTX)
    return msgspec.structs.replace(request.key, **changes)


def test_an_intact_engine_serves_what_it_was_built_for(artifact: Artifact, engine: Path) -> None:
    header = check_engine(
        engine, artifact, tensorrt=VERSION, gpu=Gpu("RTX 4090", "8.9"), slots=2, context=64
    )
    assert header.key == key_of(artifact)
    assert read_plan(engine, header) == PLAN
    assert json.loads(engine.read_bytes().partition(b"\n")[0])["format"] == "pilotfish-engine"


def cut(data: bytes) -> bytes:
    return data[:-100]


def flipped(data: bytes) -> bytes:
    return data[:-50] + bytes([data[-50] ^ 1]) + data[-49:]


def longer(data: bytes) -> bytes:
    return data + b"more"


def with_header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """Rewrite the first line; the plan stays."""

    def spoil(data: bytes) -> bytes:
        line, _, plan = data.partition(b"\n")
        header = json.loads(line)
        change(header)
        return json.dumps(header).encode() + b"\n" + plan

    return spoil


def of_key(**fields: Any) -> Callable[[bytes], bytes]:
    return with_header(lambda header: header["key"].update(fields))


NOT_ONE = "is not an engine file: copy the file again, or build it again: pilotfish export engine"


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        pytest.param(cut, "holds 1,948 of the 2,048 bytes of its engine: copy", id="truncated"),
        pytest.param(longer, "holds 2,052 of the 2,048 bytes of its engine: copy", id="longer"),
        pytest.param(flipped, "is damaged, because its SHA-256 differs", id="one bit"),
        pytest.param(lambda _: b"", "is empty: copy the file again", id="empty"),
        pytest.param(lambda _: b"\n", NOT_ONE, id="an empty line"),
        pytest.param(lambda _: b"ftrt" + bytes(5000), NOT_ONE, id="a plan alone"),
        pytest.param(lambda data: b" " * (1 << 20) + data, NOT_ONE, id="a header of 1 MB"),
        pytest.param(lambda _: b'{"a":' * 10_000, NOT_ONE, id="deep"),
        pytest.param(lambda _: b"\xff\xfe{}\n", NOT_ONE, id="no UTF-8"),
        pytest.param(lambda _: b"null\nplan", NOT_ONE, id="null"),
        pytest.param(with_header(lambda h: h.pop("key")), NOT_ONE, id="no key"),
        pytest.param(with_header(lambda h: h.update(size=-1)), NOT_ONE, id="negative size"),
        pytest.param(with_header(lambda h: h.update(size=1e30)), NOT_ONE, id="a size of 1e30"),
        pytest.param(with_header(lambda h: h.update(sha256="0")), NOT_ONE, id="short hash"),
        pytest.param(of_key(slots=10**30), NOT_ONE, id="slots beyond all numbers"),
        pytest.param(of_key(slots=0), NOT_ONE, id="no slots"),
        pytest.param(of_key(tensorrt="\x1b[2J"), NOT_ONE, id="control characters"),
        pytest.param(of_key(gpu="\x1b[2J"), NOT_ONE, id="control characters in the GPU"),
        pytest.param(of_key(tensorrt="1.7\n"), NOT_ONE, id="a line feed at the end"),
        pytest.param(of_key(compute="8.6\n"), NOT_ONE, id="a line feed after the capabilities"),
        pytest.param(of_key(compute="٨.٦"), NOT_ONE, id="digits of another script"),
        pytest.param(of_key(compute="8"), NOT_ONE, id="no compute capability"),
        pytest.param(of_key(artifact="../../x"), NOT_ONE, id="a path as name"),
        pytest.param(of_key(more=1), NOT_ONE, id="an unknown field"),
        pytest.param(
            with_header(lambda h: h.update(version=2, key=[1])),
            r"a newer Pilotfish \(version 2 of the file; .*\): update Pilotfish, or build it again",
            id="newer",
        ),
        pytest.param(
            of_key(artifact="0123456789abcdef"),
            "was built from another artifact .digest 0123456789abcdef; this artifact's is "
            "[0-9a-f]{16}.: build it again: pilotfish export engine",
            id="another artifact",
        ),
        pytest.param(of_key(provider="tensorrt"), "but is not: build it again", id="provider"),
        pytest.param(
            of_key(tensorrt="1.6.0"),
            "was built by TensorRT for RTX 1.6.0, which is not the installed version 1.7.1.116: "
            "build it again with the installed version: pilotfish export engine .* --provider "
            "tensorrt-rtx --slots 2 --context 64$",
            id="another version",
        ),
        pytest.param(
            of_key(compute="8.6,12.0"),
            "was built for GPUs of compute capability 8.6,12.0, and this machine's GPU, RTX 4090, "
            r"has 8.9: build it again: pilotfish .* --slots 2 --context 64 --compute 8\.9$",
            id="another GPU",
        ),
        pytest.param(
            of_key(slots=1),
            "was built for 1 slot of 64 tokens, and 2 slots of 64 tokens are wanted: build a "
            "larger one: pilotfish .* --slots 2 --context 64$",
            id="fewer slots",
        ),
        pytest.param(of_key(context=32), "--slots 2 --context 64$", id="a shorter context"),
        pytest.param(of_key(profiles="0" * 16), "ran other shapes: build it again", id="shapes"),
    ],
)
def test_an_engine_that_cannot_serve_is_refused_in_a_sentence(
    artifact: Artifact, engine: Path, spoil: Callable[[bytes], bytes], sentence: str
) -> None:
    engine.write_bytes(spoil(engine.read_bytes()))
    with pytest.raises(EngineFileError, match=sentence) as caught:
        check_engine(
            engine, artifact, tensorrt=VERSION, gpu=Gpu("RTX 4090", "8.9"), slots=2, context=64
        )
    message = str(caught.value)
    assert str(engine) in message
    assert "\n" not in message
    assert str(artifact.path) in message
    assert caught.value.exit_code == 65


def test_a_header_that_does_not_end_is_not_read_to_its_end(
    artifact: Artifact, engine: Path
) -> None:
    with engine.open("r+b") as file:
        file.truncate(0)
        file.truncate(1 << 40)  # a sparse file of a terabyte
    with pytest.raises(EngineFileError, match="not an engine file"):
        check_engine(engine, artifact)
    assert HEADER_LIMIT < 1 << 20


def test_a_wish_for_any_context_names_the_slots_alone(artifact: Artifact, engine: Path) -> None:
    with pytest.raises(EngineFileError, match=r"of 64 tokens, and 3 slots are wanted: build"):
        check_engine(engine, artifact, slots=3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda path: path.unlink(), "cannot be read: No such file or directory: copy"),
        (lambda path: os.truncate(path, 1000), "cannot be read: Invalid argument: copy"),
    ],
)
def test_a_file_that_changes_during_the_check_is_a_sentence(
    artifact: Artifact,
    engine: Path,
    change: Callable[[Path], None],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = Path.open

    def open_later(path: Path, *args: Any, **options: Any) -> Any:
        if path == engine and options.get("buffering") == 0:  # to read the plan
            change(path)
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", open_later)
    with pytest.raises(EngineFileError, match=sentence):
        check_engine(engine, artifact)


@pytest.mark.parametrize(
    ("compute", "instead"),
    [
        ("9.0", "9.0: on an H100 or H200, use --provider cuda, which needs no engine$"),
        ("8.7", "8.7: build on the Jetson Orin itself, with JetPack's TensorRT"),
    ],
)
def test_a_gpu_that_no_engine_can_be_for_is_told_what_to_use(
    artifact: Artifact, engine: Path, compute: str, instead: str
) -> None:
    with pytest.raises(EngineFileError, match=f"this machine's GPU, X, has {instead}"):
        check_engine(engine, artifact, gpu=Gpu("X", compute))


def test_a_missing_engine_is_a_sentence(artifact: Artifact, engine: Path) -> None:
    engine.unlink()
    with pytest.raises(EngineFileError, match=r"cannot be read: No such file"):
        check_engine(engine, artifact)
    engine.mkdir()
    with pytest.raises(EngineFileError, match="is not a file"):
        read_header(engine)
    engine.rmdir()
    os.mkfifo(engine)
    with pytest.raises(EngineFileError, match="is not a file: copy the file again"):
        check_engine(engine, artifact)


@pytest.mark.parametrize(
    ("compute", "fitting", "unfit"),
    [
        (USUAL, ["8.0", "8.6", "8.9", "12.0", "12.1", "13.0"], ["7.5", "8.7", "9.0", "11.0"]),
        ("8.6", ["8.6"], ["8.0", "8.60", "12.0"]),
        ("12.0", ["12.0"], ["12.1"]),
        ("8.9,12.1", ["8.9", "12.1"], ["12.0"]),
    ],
)
def test_compute_capabilities(
    artifact: Artifact, compute: str, fitting: list[str], unfit: list[str]
) -> None:
    key = key_of(artifact, compute)
    assert all(key.runs_on(Gpu("any", each)) for each in fitting)
    assert not any(key.runs_on(Gpu("any", each)) for each in unfit)


def test_an_engine_of_tensorrt_is_for_one_model_of_gpu(artifact: Artifact) -> None:
    key = EngineRequest("10.3", Gpu("Orin", "8.7"), artifact, 1, 64).key
    assert key.runs_on(Gpu("Orin", "8.7"))
    assert not key.runs_on(Gpu("Orin", "8.9"))
    assert not key.runs_on(Gpu("Xavier", "8.7"))


def test_the_artifact_does_not_mind_its_engines(tmp_path: Path) -> None:
    artifact = tiny_artifact(tmp_path / "a", dialect="opset24")
    digest = artifact.manifest.digest
    write_engine(shipped_path(artifact, key_of(artifact)), key_of(artifact), PLAN)
    (tmp_path / "a" / "engines" / "tensorrt-rtx-other.engine").write_bytes(b"rubbish")
    again = Artifact.open(tmp_path / "a")
    again.verify()
    assert again.manifest.digest == digest


def test_engines_of_the_two_libraries_and_of_heads_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    artifact = tiny_artifact(tmp_path / "a", dialect="opset24")
    keys = [
        key_of(artifact),
        msgspec.structs.replace(key_of(artifact), artifact=artifact.manifest.digest + "-head"),
        EngineRequest("10.16", Gpu("Orin", "8.7"), artifact, 1, 64).key,
    ]
    for key in keys:
        write_engine(shipped_path(artifact, key), key, PLAN)
        EngineCache().write(key, PLAN)
    whole, head, standard = (shipped_path(artifact, key) for key in keys)
    assert shipped_engines(artifact, RTX.provider) == [whole]
    assert shipped_engines(artifact, RTX.provider, head=True) == [head]
    assert shipped_engines(artifact, STANDARD.provider) == [standard]
    cache, name = EngineCache(), artifact.manifest.digest
    assert cache.paths(name, RTX.provider) == [cache.path(keys[0])]
    assert cache.paths(name, STANDARD.provider) == [cache.path(keys[2])]
    whole.write_bytes(b"")  # a file whose kind cannot be read is neither's, so both hear of it
    assert whole in shipped_engines(artifact, RTX.provider, head=True)
