"""Layers whose caches differ in shape, and layers that read the caches of others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.split import split_artifact
from pilotfish.export.weights import TOKEN_TABLE
from tests.support.prefill import prefill
from tests.support.runnable import runnable
from tests.support.tiny import SHARING, RandomSource, tiny_artifact, tiny_config

TEXT = np.random.default_rng(0).integers(0, 128, 150)  # beyond a cache's first 64 cells
PIECES = (1, 30, 2, 17, 60, 40)
SHAPES = {"gemma4-e2b": [(2, 16), (2, 32)], "gemma3n": [(2, 16)] * 2, "gemma4": [(2, 16), (1, 32)]}


@pytest.mark.parametrize("family", SHAPES)
def test_each_layer_that_writes_has_a_cache_of_its_own_shape(tmp_path: Path, family: str) -> None:
    artifact = tiny_artifact(tmp_path / "a", architecture=family)
    inputs = onnx.load(artifact.graph_path, load_external_data=False).graph.input
    shapes = [item.type.tensor_type.shape.dim for item in inputs if item.name.startswith("past.")]
    result = [(dims[1].dim_value, dims[3].dim_value) for dims in shapes]
    assert result == [shape for shape in SHAPES[family] for _ in ("key", "value")]
    cached = artifact.manifest.cached
    assert [(each.kv_heads, each.head_dim) for each in cached] == SHAPES[family]


def test_models_whose_layers_are_alike_say_nothing_of_it(tmp_path: Path) -> None:
    artifact = tiny_artifact(tmp_path / "a")
    assert "caches" not in (artifact.path / "manifest.json").read_text()
    assert [each.layer for each in artifact.manifest.cached] == [0, 1]


@pytest.mark.parametrize("dialect", runnable())
@pytest.mark.parametrize("family", SHAPES)
def test_pieces_rollbacks_kept_paths_and_slots(tmp_path: Path, family: str, dialect: str) -> None:
    artifact = tiny_artifact(tmp_path / "a", architecture=family, dialect=dialect)
    decoder = Decoder(artifact, slots=3)
    whole = prefill(decoder, 0, TEXT, rows=len(TEXT)).logits.copy()

    def same(result: np.ndarray, at: int) -> None:
        np.testing.assert_allclose(result, whole[at : at + len(result)], atol=1e-4)

    done = 0
    for size in PIECES:  # a piece, and wrong drafts behind it, while another slot reads, too
        drafted = np.concatenate([TEXT[done : done + size], TEXT[:3]])
        out, _ = decoder.forward([Pass(2, drafted), Pass(1, TEXT[done : done + 1])])
        same(out.logits[:size], done)
        decoder.rollback(2, done + size)
        decoder.rollback(1, 0)
        done += size
    # The 40 tokens before the end as a branch of a tree, each behind a wrong twin; then it is kept.
    decoder.rollback(2, 100)
    nodes = np.stack([TEXT[100:140][::-1], TEXT[100:140]], axis=1).reshape(-1)
    parents = np.repeat(np.arange(-1, 79, 2), 2)
    out = decoder.forward([Pass(2, nodes, parents=parents)])[0]
    same(out.logits[1::2], 100)
    decoder.keep_path(2, range(1, 80, 2))
    same(decoder.forward([Pass(2, TEXT[140:])])[0].logits, 140)


@pytest.mark.parametrize("family", SHARING)
def test_stages_of_it_are_refused(tmp_path: Path, family: str) -> None:
    model = tiny_artifact(tmp_path / "a", architecture=family, dialect="opset17")
    with pytest.raises(
        ExportError, match=r"read the keys and values of earlier layers.* run the model whole"
    ):
        split_artifact(model.path, tmp_path / "cut", stages=2)


@pytest.mark.parametrize(
    "caches",
    [
        [],
        [{"layer": 4, "kv_heads": 2, "head_dim": 16}],
        [{"layer": 1, "kv_heads": 2, "head_dim": 16}, {"layer": 0, "kv_heads": 2, "head_dim": 16}],
        [{"layer": 0, "kv_heads": 0, "head_dim": 16}],
    ],
)
def test_a_manifest_with_impossible_caches_is_refused(tmp_path: Path, caches: object) -> None:
    model = tiny_artifact(tmp_path / "a", architecture="gemma4-e2b")
    path = model.path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"caches": caches}))
    with pytest.raises(ArtifactError, match="caches"):
        Artifact.open(model.path)


class InParts(RandomSource):
    """Has a table that is not to be read at once."""

    def tensor(self, name: str) -> np.ndarray:
        assert name != TOKEN_TABLE
        return super().tensor(name)

    def rows(self, name: str):
        yield from np.array_split(super().tensor(name), 7)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_the_table_of_all_layers_is_never_whole_in_memory(tmp_path: Path, precision) -> None:
    config = tiny_config("gemma4-e2b")
    kinds = {"at-once": RandomSource, "in-parts": InParts}
    digests = [
        export_model(
            kind(config, 0), tmp_path / name, precision=precision, dialect="opset24"
        ).manifest.files["model.onnx.data"]
        for name, kind in kinds.items()
    ]
    assert digests[0] == digests[1]
