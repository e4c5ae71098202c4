"""Cut an artifact into the stages of a pipeline: read an artifact, write a folder of artifacts.

`out`/stage-1, `out`/stage-2, … each have a graph (`export.stage_graphs`), its weights and a
manifest; the manifest's `stage` names the layers and the original artifact. The head (hidden states
to logits) is in the first stage's folder: the last stage's hidden states return to the first stage.
Weights are copied from file to file, each to one stage; rotary tables are copied to every stage
that reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import onnx
from onnx import ModelProto, TensorProto

from pilotfish.engines.artifact import Artifact, check_head, file_sha256, open_stages
from pilotfish.engines.manifest import (
    GENAI,
    GRAPH_NAME,
    HEAD_NAME,
    LLAMACPP,
    MANIFEST_NAME,
    TOKENIZER_NAME,
    Manifest,
)
from pilotfish.engines.stage_range import StageRange
from pilotfish.export.atomic import replacing
from pilotfish.export.checked_weights import check_tensors
from pilotfish.export.data_file import DataFile
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.mapped_file import MappedFile
from pilotfish.export.sources.source import Progress, silent
from pilotfish.export.stage_graphs import StageGraphs

# Dialects whose graphs cannot be cut → the reason, and what to do.
OBSTACLES = {
    GENAI: "is a graph of ONNX Runtime GenAI, which cannot be cut: export the original checkpoint "
    "with --dialect opset24 (or opset17)",
    LLAMACPP: "is a GGUF file for llama.cpp, which cannot be cut: export the model with --dialect "
    "opset24 (or opset17)",
    "contrib": "has dialect contrib, which fuses norms with residual sums across layers: export "
    "the model again with --dialect opset24 (or opset17)",
}

Graphs = Mapping[str, ModelProto]  # file name → graph


def split_artifact(
    path: str | Path,
    out: str | Path,
    *,
    stages: int | None = None,
    layers: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> list[Artifact]:
    """Write the stages of the artifact at `path` to `out`/stage-1, `out`/stage-2, …

    The artifact's hashes are checked first. `out` is written atomically and replaces existing
    stages.

    Args:
        stages: number of stages of equal size; if layers remain, each of the first stages gets one
            more layer.
        layers: number of layers of each stage.
        progress: called as progress(label, done, total), in bytes.

    Raises:
        ArtifactError: if there is no artifact, or its files do not match their hashes.
        ExportError: if the model cannot be cut this way, or `out` has other content than stages.
    """
    artifact = Artifact.open(path)
    report = progress or silent
    cuts = plan_cuts(artifact, stages, layers)
    check_head(artifact)
    if obstacle := _find_obstacle(artifact.manifest):
        raise ExportError(f"{path} {obstacle}")
    with replacing(Path(out), _are_stages, open_stages) as folder:
        report("checking the artifact", 0, None)
        artifact.verify()
        graphs = _cut(artifact, cuts)
        weights = _Weights(artifact, sum(map(_weight_bytes, graphs)), report)
        for cut, stage in zip(cuts, graphs, strict=True):
            directory = folder / f"stage-{cut.index}"
            directory.mkdir()
            files = _write_graphs(directory, stage, weights)
            if cut.first:
                tokenizer = artifact.tokenizer_path.read_bytes()
                (directory / TOKENIZER_NAME).write_bytes(tokenizer)
                files[TOKENIZER_NAME] = artifact.manifest.files[TOKENIZER_NAME]
            manifest = msgspec.structs.replace(artifact.manifest, files=files, stage=cut)
            (directory / MANIFEST_NAME).write_bytes(manifest.encode())
    return open_stages(out)


def _find_obstacle(manifest: Manifest) -> str | None:
    """Return what prevents cutting the model, and what to do; None if it can be cut."""
    if manifest.states is not None:
        return "is a model with recurrent states, which stages do not support: run the model whole"
    if manifest.shares_caches:
        return (
            "has layers that read the keys and values of earlier layers, which may be in another "
            "stage: run the model whole"
        )
    return OBSTACLES.get(manifest.dialect)


def plan_cuts(
    artifact: Artifact, stages: int | None = None, layers: Sequence[int] | None = None
) -> list[StageRange]:
    """Plan the layers of each stage; see `split_artifact` for the arguments.

    Raises:
        ExportError: if the arguments contradict each other or the model.
    """
    total = artifact.manifest.dimensions.layers
    sizes = _even_sizes(total, stages) if layers is None else list(layers)
    if stages not in {None, len(sizes)}:
        raise ExportError(f"layers are given for {len(sizes)} stages, but {stages} are requested")
    if sum(sizes) != total or min(sizes) < 1:
        listed = ",".join(map(str, sizes))
        raise ExportError(
            f"stages of {listed} layers do not add up to the model's {total} layers, or a "
            "stage has less than 1 layer"
        )
    return [
        StageRange(
            index=index + 1,
            count=len(sizes),
            first_layer=sum(sizes[:index]),
            layers=size,
            whole=artifact.manifest.digest,
        )
        for index, size in enumerate(sizes)
    ]


def _even_sizes(total: int, stages: int | None) -> list[int]:
    count = stages or 0
    if not 1 <= count <= total:
        raise ExportError(
            f"a model of {total} layers can be cut into 1 to {total} stages, not {count}"
        )
    least, more = divmod(total, count)
    return [least + 1] * more + [least] * (count - more)


def _are_stages(folder: Path) -> bool:
    """Whether `folder` contains only stages."""
    return all(
        child.name.startswith("stage-") and (child / MANIFEST_NAME).is_file()
        for child in folder.iterdir()
    )


# --- graphs and their weights --------------------------------------------------------------------


def _cut(artifact: Artifact, cuts: Sequence[StageRange]) -> list[dict[str, ModelProto]]:
    """Build the graphs of each stage; their weights still refer to the artifact's data file."""
    try:
        whole = onnx.load(artifact.graph_path, load_external_data=False)
        parts = StageGraphs(whole, artifact.manifest.dimensions.layers)
        stages = [{GRAPH_NAME: parts.stage(cut.first_layer, cut.layers)} for cut in cuts]
        stages[0][HEAD_NAME] = parts.head()
    except ExportError:
        raise
    except Exception as error:  # onnx raises many error classes, and KeyError for a missing name
        raise ExportError(
            f"{artifact.graph_path} is not a graph that `pilotfish export model` wrote: {error}"
        ) from error
    return stages


def _write_graphs(directory: Path, graphs: Graphs, weights: _Weights) -> dict[str, str]:
    """Write a stage's graphs and each of their weights once; return file name → SHA-256."""
    digests: dict[str, str] = {}
    written: dict[str, TensorProto] = {}
    for name, model in graphs.items():
        unwritten = []
        for weight in _external_weights(model):
            if weight.name in written:
                weight.CopyFrom(written[weight.name])
            else:
                unwritten.append(weight)
        if unwritten:
            with (directory / f"{name}.data").open("wb") as file:
                data = DataFile(file, f"{name}.data")
                for weight in unwritten:
                    weights.copy(weight, data)
                    written[weight.name] = weight
            digests[f"{name}.data"] = data.sha256
        (directory / name).write_bytes(model.SerializeToString())
        digests[name] = file_sha256(directory / name)
    return digests


def _external_weights(model: ModelProto) -> list[TensorProto]:
    return [weight for weight in model.graph.initializer if weight.external_data]


def _location(weight: TensorProto) -> tuple[str, int, int]:
    """Return the file name, offset and length (bytes) of an external weight."""
    entries = {entry.key: entry.value for entry in weight.external_data}
    return entries["location"], int(entries["offset"]), int(entries["length"])


def _weight_bytes(graphs: Graphs) -> int:
    """Return the total size of a stage's weights, bytes."""
    sizes = {w.name: _location(w)[2] for model in graphs.values() for w in _external_weights(model)}
    return sum(sizes.values())


class _Weights:
    """A copier of the original artifact's weights, one at a time."""

    def __init__(self, artifact: Artifact, total: int, progress: Progress) -> None:
        self._artifact = artifact
        self._files: dict[str, MappedFile] = {}
        self._done, self._total = 0, total
        self._progress = progress

    def copy(self, weight: TensorProto, data: DataFile) -> None:
        """Append a weight to `data` and update its location."""
        name, offset, length = _location(weight)
        if name not in self._artifact.manifest.files:
            raise ExportError(
                f"{self._artifact.graph_path} reads {name}, which is not in the artifact"
            )
        if name not in self._files:
            self._files[name] = MappedFile(self._artifact.path / name)
        check_tensors([weight], self._artifact.path)
        data.put(weight, [self._files[name].view(offset, length)])
        self._done += length
        self._progress("weights", self._done, self._total)
