"""Read the manifest of an artifact, and check what its types cannot express."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from pilotfish.base.reading import read_content, reading_file
from pilotfish.base.struct_types import gathered
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.manifest import (
    FORMAT,
    GENAI,
    GENAI_NAME,
    GGUF_NAME,
    GRAPH_NAME,
    HEAD_NAME,
    HEAD_TOKENS_NAME,
    LLAMACPP,
    MANIFEST_NAME,
    TOKENIZER_NAME,
    CachedLayer,
    Manifest,
    RecurrentStates,
)
from pilotfish.engines.stage_range import StageRange


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of `directory`, and check what its types cannot express."""
    path = directory / MANIFEST_NAME
    with reading_file(lambda problem: ArtifactError(f"{path} cannot be read: {problem}")):
        try:
            data = read_content(path)
        except (FileNotFoundError, NotADirectoryError):
            state = (
                "holds no manifest.json" if directory.is_dir()
                else "is not a folder" if directory.exists()
                else "does not exist"
            )  # fmt: skip
            raise ArtifactError(
                f"{directory} is not an artifact: it {state}. "
                "Make one with `pilotfish export model SOURCE --out DIR`"
            ) from None
    with reading_file(partial(_invalid_error, directory)):
        number = msgspec.json.decode(data, type=gathered(FormatNumber)).format
        if number != FORMAT:
            raise ArtifactError(
                f"The manifest of {directory} has format {number}, but this version reads "
                f"format {FORMAT}: "
                "export the model again, or install the version that made it"
            )
        manifest = msgspec.json.decode(data, type=gathered(Manifest))
    _check_consistency(directory, manifest)
    return manifest


class FormatNumber(msgspec.Struct):
    """The format number of a file; a newer format may have any other fields."""

    format: int


def _check_consistency(directory: Path, manifest: Manifest) -> None:
    """Refuse a manifest with fields that contradict each other."""
    problem = None
    if manifest.vocab_size > manifest.padded_vocab_size:
        problem = "vocab_size exceeds padded_vocab_size"
    elif any(token >= manifest.vocab_size for token in manifest.eos_ids):
        problem = "an eos id is outside the vocabulary"
    elif manifest.bos_id is not None and manifest.bos_id >= manifest.vocab_size:
        problem = "bos_id is outside the vocabulary"
    elif any(Path(name).name != name for name in manifest.files):
        problem = "files must be plain names, without a path"
    elif manifest.states is not None and not _states_fit(manifest.states, manifest):
        problem = "states contradicts the dimensions"
    elif manifest.dialect == GENAI and (manifest.trees or manifest.stage or manifest.states):
        problem = "a graph of ONNX Runtime GenAI must not have trees, stage or states"
    elif manifest.caches is not None and not _caches_fit(manifest.caches, manifest):
        problem = "caches contradicts the dimensions"
    elif manifest.head_tokens is not None and not _head_fits(manifest.head_tokens, manifest):
        problem = "head_tokens contradicts the model"
    elif mask_problem := _mask_problem(manifest):
        problem = mask_problem
    elif missing := _required_files(manifest) - manifest.files.keys():
        problem = f"files does not name {', '.join(sorted(missing))}"
    elif manifest.stage is not None and not _stage_fits(manifest.stage, manifest.dimensions.layers):
        problem = (
            f"{manifest.stage} is not a part of a model of {manifest.dimensions.layers} layers"
        )
    if problem:
        raise _invalid_error(directory, problem)


def _mask_problem(manifest: Manifest) -> str | None:
    """Return how the fields of the mask token contradict each other; None if they do not."""
    if (mask := manifest.mask_token) is None:
        return None if manifest.drafts_per_pass is None else "drafts_per_pass needs a mask_token"
    return None if mask < manifest.padded_vocab_size else "mask_token has no embedding"


def _invalid_error(directory: Path, problem: str) -> ArtifactError:
    return ArtifactError(
        f"{directory / MANIFEST_NAME} is not valid ({problem}): export the model again, or "
        "restore a copy of this file"
    )


def _required_files(manifest: Manifest) -> set[str]:
    """Return the files that an artifact must have."""
    stage = manifest.stage
    if manifest.dialect == LLAMACPP:
        return {GGUF_NAME, TOKENIZER_NAME}
    if manifest.dialect == GENAI:
        return {GRAPH_NAME, GENAI_NAME, TOKENIZER_NAME}
    if manifest.head_tokens is not None:
        return {GRAPH_NAME, HEAD_TOKENS_NAME, TOKENIZER_NAME}
    if stage is None:
        return {GRAPH_NAME, TOKENIZER_NAME}
    return {GRAPH_NAME, TOKENIZER_NAME, HEAD_NAME} if stage.first else {GRAPH_NAME}


def _states_fit(states: RecurrentStates, manifest: Manifest) -> bool:
    """Whether a model of these dimensions can have such states."""
    sizes = (states.heads, states.key_dim, states.value_dim)
    ascending = states.layers == sorted(set(states.layers))
    inside = states.layers[-1] < manifest.dimensions.layers
    return ascending and inside and all(sizes) == any(sizes) and manifest.stage is None


def _caches_fit(caches: list[CachedLayer], manifest: Manifest) -> bool:
    """Whether a model of these dimensions can have such caches."""
    layers = [each.layer for each in caches]
    inside = all(layer < manifest.dimensions.layers for layer in layers)
    some = bool(layers) or manifest.states is not None
    return some and inside and layers == sorted(set(layers))


def _head_fits(tokens: int, manifest: Manifest) -> bool:
    """Whether this model can have a head cut to `tokens` tokens."""
    whole = manifest.dialect not in {LLAMACPP, GENAI} and manifest.stage is None
    return whole and tokens < manifest.vocab_size


def _stage_fits(stage: StageRange, layers: int) -> bool:
    """Whether a model of `layers` layers can have this stage."""
    before, after = (
        stage.index - 1,
        stage.count - stage.index,
    )  # number of other stages, each of which has at least one layer
    return (
        before <= stage.first_layer
        and 0 <= after <= layers - stage.end
        and stage.first == (stage.first_layer == 0)
        and stage.last == (stage.end == layers)
    )
