"""Artifacts: the manifest, its checks, and the list of what lies below a folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.manifest import Dimensions, Manifest, Source
from pilotfish.export.catalog import list_artifacts

FILES = {"model.onnx": b"graph", "model.onnx.data": b"weights", "tokenizer.json": b"{}"}
MANIFEST = Manifest(
    model="tiny",
    source=Source(kind="random", location="seed 1"),
    architecture="llama",
    precision="fp32",
    dialect="opset24",
    opset=24,
    dimensions=Dimensions(
        layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, context=32
    ),
    vocab_size=10,
    padded_vocab_size=16,
    kv_dtype="float32",
    bos_id=None,
    eos_ids=[2],
    chat_template=None,
    tokenizer_fingerprint="0" * 64,
    files={name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()},
)


def write(path: Path, **change: Any) -> Path:
    path.mkdir(parents=True)
    for name, data in FILES.items():
        (path / name).write_bytes(data)
    (path / "manifest.json").write_bytes(msgspec.structs.replace(MANIFEST, **change).encode())
    return path


def test_open_gives_back_what_was_written(tmp_path: Path) -> None:
    artifact = Artifact.open(str(write(tmp_path / "a")))
    assert artifact.manifest == MANIFEST
    assert artifact.path == tmp_path / "a"
    assert artifact.graph_path.read_bytes() == b"graph"
    assert artifact.tokenizer_path.read_bytes() == b"{}"
    artifact.verify()


def test_a_mask_token_may_be_a_padding_row(tmp_path: Path) -> None:
    manifest = Artifact.open(write(tmp_path / "a", mask_token=15)).manifest
    assert (manifest.mask_token, manifest.readable_tokens) == (15, 16)
    assert MANIFEST.readable_tokens == 10
    assert msgspec.structs.replace(MANIFEST, mask_token=3).readable_tokens == 10


def test_verify_names_the_file_that_changed(tmp_path: Path) -> None:
    artifact = Artifact.open(write(tmp_path / "a"))
    (tmp_path / "a" / "model.onnx.data").write_bytes(b"weightz")
    with pytest.raises(ArtifactError, match=r"model\.onnx\.data"):
        artifact.verify()


def test_what_is_not_an_artifact_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"does not exist.*pilotfish export model"):
        Artifact.open(tmp_path / "none")
    with pytest.raises(ArtifactError, match=r"holds no manifest\.json.*pilotfish export model"):
        Artifact.open(tmp_path)
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(ArtifactError, match="cannot be read"):
        Artifact.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": 17}, "vocab_size exceeds"),
        ({"eos_ids": [16]}, "eos id"),
        ({"bos_id": 16}, "bos_id"),
        ({"bos_id": 10}, "bos_id"),  # the first that is outside
        ({"mask_token": 16}, "mask_token"),
        ({"drafts_per_pass": 8}, "drafts_per_pass needs a mask_token"),
        ({"files": {**MANIFEST.files, "../x": "0" * 64}}, "plain names"),
        ({"files": {"model.onnx": "0" * 64}}, r"tokenizer\.json"),
        ({"precision": "fp8"}, "precision"),
        ({"tokenizer_fingerprint": "abc"}, "tokenizer_fingerprint"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"dimensions": msgspec.structs.replace(MANIFEST.dimensions, layers=2**31)}, "layers"),
        ({"dimensions": msgspec.structs.replace(MANIFEST.dimensions, context=2**31)}, "context"),
    ],
)
def test_manifests_that_contradict_themselves(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ArtifactError, match=named):
        Artifact.open(write(tmp_path / "a", **change))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b'{"format": 1}', b"{" * 9999])
def test_damaged_manifests(tmp_path: Path, data: bytes) -> None:
    (write(tmp_path / "a") / "manifest.json").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"manifest\.json is not valid"):
        Artifact.open(tmp_path / "a")


def test_unknown_fields_and_newer_formats(tmp_path: Path) -> None:
    path = write(tmp_path / "a") / "manifest.json"
    values = json.loads(path.read_bytes())
    path.write_text(json.dumps(values | {"format": 2, "shape": "new"}))
    with pytest.raises(ArtifactError, match="format 2, but this version reads format 1"):
        Artifact.open(tmp_path / "a")
    path.write_text(json.dumps(values | {"shape": "new"}))
    with pytest.raises(ArtifactError, match="shape"):
        Artifact.open(tmp_path / "a")


def test_missing_file_is_named(tmp_path: Path) -> None:
    (write(tmp_path / "a") / "model.onnx.data").unlink()
    with pytest.raises(ArtifactError, match=r"lacks model\.onnx\.data"):
        Artifact.open(tmp_path / "a")


def test_catalog(tmp_path: Path) -> None:
    write(tmp_path / "b" / "target")
    write(tmp_path / "a", precision="int4", dialect="contrib")
    write(tmp_path / "b" / ".target.partial")
    (write(tmp_path / "broken") / "tokenizer.json").unlink()
    (tmp_path / "empty").mkdir()
    entries = list_artifacts(tmp_path)
    assert [(e.path, e.model, e.precision, e.dialect, e.size) for e in entries] == [
        (str(tmp_path / "a"), "tiny", "int4", "contrib", 14),
        (str(tmp_path / "b" / "target"), "tiny", "fp32", "opset24", 14),
    ]
    assert [entry.path for entry in list_artifacts(tmp_path / "a")] == [str(tmp_path / "a")]
    with pytest.raises(ArtifactError, match="is not a folder"):
        list_artifacts(tmp_path / "none")
