"""Cutting an artifact into stages: what is in each folder, and what is refused."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
from onnx import external_data_helper, numpy_helper

from pilotfish.engines.artifact import Artifact, open_stages
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.manifest import MANIFEST_NAME, Manifest
from pilotfish.engines.stage_range import StageRange, check_chain
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.export import atomic
from pilotfish.export.atomic import replacing
from pilotfish.export.borders import Dependencies
from pilotfish.export.data_file import DataFile
from pilotfish.export.export_errors import ExportError
from pilotfish.export.split import plan_cuts, split_artifact
from tests.conftest import Pair
from tests.support.staged import of_every_kind
from tests.support.tiny import FAMILIES, tiny_artifact

MIB = 2**20
# Computed, not the model's: each stage that reads them has them.
COMPUTED = ("rotary.", "query_growth", "ones.")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Four layers."""
    return tiny_artifact(tmp_path_factory.mktemp("whole") / "model", layers=4, dialect="opset17")


def weights(path: Path) -> dict[str, bytes]:
    """The external weights of a graph, by name."""
    graph = onnx.load(path).graph
    outer = onnx.load(path, load_external_data=False).graph.initializer
    names = {each.name for each in outer if external_data_helper.uses_external_data(each)}
    return {
        each.name: numpy_helper.to_array(each).tobytes()
        for each in graph.initializer
        if each.name in names
    }


# What is in each folder


@of_every_kind
def test_every_weight_is_in_one_stage_and_graphs_are_sound(
    tmp_path: Path, family: str, dialect: str, precision: Any
) -> None:
    model = tiny_artifact(
        tmp_path / "a", architecture=family, dialect=dialect, precision=precision, layers=3
    )
    stages = split_artifact(model.path, tmp_path / "cut", stages=3)
    wanted, result, shared = weights(model.graph_path), {}, set()
    for stage in stages:
        stage.verify()
        onnx.checker.check_model(str(stage.graph_path), full_check=True)
        ours = weights(stage.graph_path)
        shared |= ours.keys() & result.keys()
        result |= ours
    onnx.checker.check_model(str(stages[0].head_path), full_check=True)
    head = weights(stages[0].head_path)
    tables = ("model.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    tied = {*tables, *(f"{table}.offsets" for table in tables)}
    assert head.keys() & result.keys() <= tied
    assert result | head == wanted
    assert all(name.startswith(COMPUTED) for name in shared)
    # Every byte is once on disk, but for those tables and the padding between weights.
    sizes = [file.stat().st_size for stage in stages for file in stage.path.glob("*.data")]
    repeated = 2 * sum(len(wanted[name]) for name in shared)
    padding = 4096 * sum(map(len, (wanted, *[shared] * 2)))
    net = sum(map(len, wanted.values())) + repeated
    assert net <= sum(sizes) <= net + padding


def test_graphs_take_and_give_what_they_are_said_to(tmp_path: Path, whole: Artifact) -> None:
    stages = split_artifact(whole.path, tmp_path / "cut", layers=[1, 2, 1])
    layout = ["unpack", "pack", "write_indices", "attention_mask"]
    ends = [
        (["input_ids"], [], "next_states"),
        (["states"], [], "next_states"),
        (["states"], ["logit_rows"], "hidden_states"),
    ]
    for stage, (first, rows, answer) in zip(stages, ends, strict=True):
        graph = onnx.load(stage.graph_path, load_external_data=False).graph
        caches = [
            f"{layer}.{what}" for layer in range(stage.manifest.layers) for what in ("key", "value")
        ]
        inputs = [*first, "position_ids", *rows, *layout, *(f"past.{name}" for name in caches)]
        assert [item.name for item in graph.input] == inputs
        outputs = [*(f"present.{name}" for name in caches), answer]
        assert [item.name for item in graph.output] == outputs
    head = onnx.load(stages[0].head_path, load_external_data=False).graph
    assert [item.name for item in (*head.input, *head.output)] == ["hidden_states", "logits"]


def test_manifests_say_which_part_of_what_they_are(tmp_path: Path, whole: Artifact) -> None:
    stages = split_artifact(whole.path, tmp_path / "cut", layers=[1, 3])
    digest = whole.manifest.digest
    assert [stage.manifest.stage for stage in stages] == [
        StageRange(index=1, count=2, first_layer=0, layers=1, whole=digest),
        StageRange(index=2, count=2, first_layer=1, layers=3, whole=digest),
    ]
    assert [stage.path.name for stage in stages] == ["stage-1", "stage-2"]
    for stage in stages:
        same = msgspec.structs.replace(stage.manifest, files=whole.manifest.files, stage=None)
        assert same == whole.manifest
        assert stage.manifest.origin == whole.manifest.origin  # one decision head serves both
        assert (stage.path / MANIFEST_NAME).read_bytes() == stage.manifest.encode()
    assert len({digest, *(stage.manifest.digest for stage in stages)}) == 3
    assert Vocabulary.from_artifact(stages[0]).fingerprint == whole.manifest.tokenizer_fingerprint
    assert not stages[1].tokenizer_path.exists()


def test_manifests_of_whole_models_are_what_they_were(whole: Artifact) -> None:
    fields = json.loads((whole.path / MANIFEST_NAME).read_bytes())
    later = {"stage", "head", "window", "chat_templates", "states", "caches", "cost", "trees"}
    later |= {"hidden_states", "head_tokens", "mask_token", "drafts_per_pass", "warnings"}
    later |= {"calibrated_matrices"}
    assert list(fields) == [name for name in Manifest.__struct_fields__ if name not in later]
    assert (whole.path / MANIFEST_NAME).read_bytes() == whole.manifest.encode()
    listed = "".join(f"{name} {sha}\n" for name, sha in sorted(fields["files"].items()))
    assert whole.manifest.digest == hashlib.sha256(listed.encode()).hexdigest()[:16]


def test_the_same_cut_has_the_same_bytes(tmp_path: Path, whole: Artifact) -> None:
    item, two = (split_artifact(whole.path, tmp_path / name, stages=3) for name in "ab")
    assert [each.manifest for each in item] == [each.manifest for each in two]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"stages": 1}, [4]),
        ({"stages": 3}, [2, 1, 1]),
        ({"stages": 4}, [1, 1, 1, 1]),
        ({"layers": [1, 3]}, [1, 3]),
        ({"layers": [3, 1], "stages": 2}, [3, 1]),
    ],
)
def test_layers_are_shared_out(
    whole: Artifact, options: dict[str, Any], sizes: Sequence[int]
) -> None:
    cuts = plan_cuts(whole, **options)
    assert [cut.layers for cut in cuts] == sizes
    check_chain(cuts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "1 to 4 stages, not 0"),
        ({"stages": 0}, "1 to 4 stages, not 0"),
        ({"stages": 5}, "1 to 4 stages, not 5"),
        ({"stages": -1}, "1 to 4 stages"),
        ({"layers": []}, "do not add up to the model's 4"),
        ({"layers": [2, 1]}, "2,1 layers do not add up to the model's 4"),
        ({"layers": [4, 0]}, "less than 1 layer"),
        ({"layers": [5, -1]}, "less than 1 layer"),
        ({"layers": [2, 2], "stages": 3}, "for 2 stages, but 3 are requested"),
    ],
)
def test_layers_that_do_not_fit_are_refused(
    whole: Artifact, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ExportError, match=words):
        plan_cuts(whole, **options)


# What cannot be cut


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_contrib_is_refused_and_could_not_be_cut(
    tmp_path: Path, family: str, precision: Any
) -> None:
    model = tiny_artifact(
        tmp_path / "a", architecture=family, dialect="contrib", precision=precision
    )
    with pytest.raises(ExportError, match="--dialect opset24"):
        split_artifact(model.path, tmp_path / "cut", stages=2)
    graph = onnx.load(model.graph_path, load_external_data=False).graph
    if not family.startswith(("opt", "cohere", "gemma4")):  # whose norms are not fused there
        with pytest.raises(ExportError, match="more than one value"):
            Dependencies(graph).borders(2)


def damaged(artifact: Artifact, name: str, data: bytes) -> None:
    """Put other bytes there, under a manifest that knows of them."""
    (artifact.path / name).write_bytes(data)
    files = artifact.manifest.files | {name: hashlib.sha256(data).hexdigest()}
    manifest = msgspec.structs.replace(artifact.manifest, files=files)
    (artifact.path / MANIFEST_NAME).write_bytes(manifest.encode())


def test_an_artifact_that_is_damaged_is_not_cut(tmp_path: Path) -> None:
    model = tiny_artifact(tmp_path / "a")
    data = model.path / "model.onnx.data"
    good = data.read_bytes()
    data.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ArtifactError, match="SHA-256"):
        split_artifact(model.path, tmp_path / "cut", stages=2)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_graph_that_is_not_ours_is_not_cut(tmp_path: Path) -> None:
    model = tiny_artifact(tmp_path / "a")
    graph = onnx.load(model.graph_path, load_external_data=False)
    damaged(model, "model.onnx", b"not a graph")
    with pytest.raises(ExportError, match=r"model\.onnx is not a graph"):
        split_artifact(model.path, tmp_path / "cut", stages=2)
    other = onnx.ModelProto()
    other.CopyFrom(graph)
    for info in other.graph.input:
        info.name = info.name.replace("past.1.", "former.1.")
    for node in other.graph.node:
        node.input[:] = [name.replace("past.1.", "former.1.") for name in node.input]
    damaged(model, "model.onnx", other.SerializeToString())
    with pytest.raises(ExportError, match="cache of layer 1"):
        split_artifact(model.path, tmp_path / "cut", stages=2)
    for weight in graph.graph.initializer:
        for entry in weight.external_data:
            if entry.key == "location":
                entry.value = "../secret"
    damaged(model, "model.onnx", graph.SerializeToString())
    with pytest.raises(ExportError, match="not in the artifact"):
        split_artifact(model.path, tmp_path / "cut", stages=2)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# The folder


def test_out_is_replaced_as_a_whole(tmp_path: Path, whole: Artifact) -> None:
    out = tmp_path / "cut"
    split_artifact(whole.path, out, stages=4)
    assert len(split_artifact(whole.path, out, stages=2)) == 2
    assert sorted(path.name for path in out.iterdir()) == ["stage-1", "stage-2"]
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]


def test_an_interrupted_cut_leaves_what_was_there(
    tmp_path: Path, whole: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "cut"
    before = [stage.manifest for stage in split_artifact(whole.path, out, stages=2)]
    put, left = DataFile.put, [20]

    def full(self: DataFile, tensor: Any, payload: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError("the disk is full")
        put(self, tensor, payload)

    monkeypatch.setattr(DataFile, "put", full)
    with pytest.raises(OSError, match="full"):
        split_artifact(whole.path, out, stages=4)
    assert [stage.manifest for stage in open_stages(out)] == before
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]


def test_every_file_is_on_the_disk_before_the_folder_appears(
    tmp_path: Path, whole: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, seen = atomic._sync, []

    def spied(path: Path) -> None:
        seen.append(path.name if path.is_dir() else f"{path.parent.name}/{path.name}")
        assert (tmp_path / "cut").exists() == (path == tmp_path)
        sync(path)

    monkeypatch.setattr(atomic, "_sync", spied)
    stages = split_artifact(whole.path, tmp_path / "cut", stages=2)
    files = {f"{path.parent.name}/{path.name}" for each in stages for path in each.path.iterdir()}
    assert files | {"stage-1", "stage-2"} <= set(seen)


@pytest.mark.parametrize("held", ["chapter1.txt", "stage-9", "artifact"])
def test_what_is_not_stages_is_not_overwritten(tmp_path: Path, whole: Artifact, held: str) -> None:
    out = tmp_path / "thesis"
    if held == "artifact":
        tiny_artifact(out)
    else:
        split_artifact(whole.path, out, stages=2)
        (out / held).write_text("years of work")
    there = sorted(path.relative_to(out) for path in out.rglob("*"))
    with pytest.raises(ExportError, match="thesis contains something"):
        split_artifact(whole.path, out, stages=2)
    assert sorted(path.relative_to(out) for path in out.rglob("*")) == there


def test_a_file_and_an_artifact_are_told_apart_from_stages(tmp_path: Path, whole: Artifact) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="file contains something"):
        split_artifact(whole.path, tmp_path / "file", stages=2)
    split_artifact(whole.path, tmp_path / "cut", stages=2)
    with (
        pytest.raises(ExportError, match="cut contains something"),
        replacing(tmp_path / "cut"),
    ):
        raise AssertionError("stages are no artifact")


def test_progress_is_told_in_bytes(tmp_path: Path, whole: Artifact) -> None:
    messages: list[tuple[str, int, int | None]] = []
    split_artifact(
        whole.path, tmp_path / "cut", stages=3, progress=lambda *step: messages.append(step)
    )
    steps = [(done, total) for label, done, total in messages if label == "weights"]
    total = steps[0][1]
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert steps[-1] == (total, total)
    assert {each for _, each in steps} == {total}


@pytest.mark.slow
def test_weights_stream_through(default_artifacts: Pair, tmp_path: Path) -> None:
    """Half a gigabyte of real weights, never more than the largest of them in memory."""
    target = default_artifacts.target
    code = (
        "import resource\n"
        "from pilotfish.export.split import split_artifact\n"
        "size = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = size()\n"
        f"split_artifact({str(target)!r}, {str(tmp_path / 'cut')!r}, stages=4)\n"
        "print(size() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    whole = (target / "model.onnx.data").stat().st_size
    largest = 49152 * 576 * 4
    assert int(done.stdout) < largest + 64 * MIB < 0.4 * whole
