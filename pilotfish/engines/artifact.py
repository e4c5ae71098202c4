"""Artifacts: directories that hold a graph, its weights, a tokenizer and `manifest.json`.

`Artifact.open` reads and checks the manifest (`engines.manifest`). A stage of a model
(`engines.stage_range`) is an artifact, too; `Artifact.open` accepts it only with `stage=True`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from io import RawIOBase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.reading import read_content, reading_file
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.manifest import (
    GENAI_NAME,
    GGUF_NAME,
    GRAPH_NAME,
    HEAD_NAME,
    HEAD_TOKENS_NAME,
    TOKENIZER_NAME,
    Manifest,
)
from pilotfish.engines.manifest_file import read_manifest
from pilotfish.engines.stage_range import check_chain


class Artifact:
    """An opened artifact directory. Build one with `Artifact.open`.

    Attributes:
        head_tokens: i64 [N], ascending: token ids of the logits' columns, for a cut head; None for
        a whole head.
    """

    def __init__(
        self, path: Path, manifest: Manifest, head_tokens: NDArray[np.int64] | None = None
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.head_tokens = head_tokens

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, stage: bool = False) -> Artifact:
        """Read and check the manifest, and check that every file exists.

        Weights can be many gigabytes, so their hashes are not checked here: `verify` does that. The
        hash of a cut head's token list is checked, because a wrong list would change every answer.

        Args:
            stage: accept a stage of a model as well as a whole one.

        Raises:
            ArtifactError: if the directory is not an artifact, comes from a newer version, or lacks
                a file; or if it is a stage of a model and `stage` is false.
        """
        directory = Path(path)
        manifest = read_manifest(directory)
        if not stage:
            check_whole(directory, manifest)
        for name in manifest.files:
            if not os.path.isfile(directory / name):  # Path.is_file raises if the name is too long
                raise ArtifactError(
                    f"{directory} lacks {name}, which its manifest names: export the model again"
                )
        return cls(directory, manifest, _read_head_tokens(directory, manifest))

    @property
    def graph_path(self) -> Path:
        """The path of the ONNX graph; the graph's external data are in the same folder."""
        return self.path / GRAPH_NAME

    @property
    def genai_path(self) -> Path:
        """The path of `genai_config.json`, in an artifact of the dialect genai."""
        return self.path / GENAI_NAME

    @property
    def gguf_path(self) -> Path:
        """The path of the GGUF file, in an artifact of the dialect llamacpp."""
        return self.path / GGUF_NAME

    @property
    def paths(self) -> dict[str, Path]:
        """The paths of all files except the manifest, by their names in the manifest."""
        return {name: self.path / name for name in self.manifest.files}

    @property
    def tokenizer_path(self) -> Path:
        """The path of the model's `tokenizer.json`."""
        return self.path / TOKENIZER_NAME

    @property
    def head_path(self) -> Path:
        """The path of the head's graph; only a first stage has this file."""
        return self.path / HEAD_NAME

    def verify(self) -> None:
        """Compare every file with its SHA-256 in the manifest.

        Raises:
            ArtifactError: if a file differs; the message names the first such file.
        """
        for name, expected in self.manifest.files.items():
            if file_sha256(self.path / name) != expected:
                raise self.altered_error(name)

    def altered_error(self, name: str) -> ArtifactError:
        """Build the error for a file with another hash than the manifest states."""
        return _altered_error(self.path / name)


def open_stages(folder: str | os.PathLike[str]) -> list[Artifact]:
    """Open all stages in `folder` (made by `pilotfish export split`), in the model's order.

    Raises:
        ArtifactError: if the folder holds no stage, or if a stage is missing, is damaged, or comes
        from another split.
    """
    artifacts = [Artifact.open(path, stage=True) for path in Path(folder).glob("stage-*")]
    places = {artifact.manifest.stage: artifact for artifact in artifacts}
    cuts = sorted((cut for cut in places if cut is not None), key=lambda cut: cut.index)
    if not artifacts or None in places or len(cuts) < len(artifacts):
        raise ArtifactError(
            f"{folder} has no stages of a model: make them with `pilotfish export split`"
        )
    check_chain(cuts)
    return [places[cut] for cut in cuts]


def check_whole(path: Path, manifest: Manifest) -> None:
    """Raise `ArtifactError` if the artifact is only a stage of a model."""
    if manifest.stage is not None:
        raise ArtifactError(
            f"{path} is {manifest.stage} of {manifest.model}, and a stage cannot run alone: "
            "name the artifact that it was cut from"
        )


def check_head(artifact: Artifact) -> None:
    """Raise `ArtifactError` if the model's head was cut to a part of the vocabulary."""
    if artifact.head_tokens is not None:
        raise ArtifactError(
            f"{artifact.path} computes logits for only {len(artifact.head_tokens)} of its "
            "tokens (it was exported with --keep-tokens), so it can only draft: name an "
            "artifact with the whole head"
        )


def _read_head_tokens(directory: Path, manifest: Manifest) -> NDArray[np.int64] | None:
    """Read the token ids of a cut head's logits, i64 [N]; None for a whole head."""
    if manifest.head_tokens is None:
        return None
    path = directory / HEAD_TOKENS_NAME
    with reading_file(lambda problem: ArtifactError(f"{path} cannot be read: {problem}")):
        data = read_content(path)
    if hashlib.sha256(data).hexdigest() != manifest.files[HEAD_TOKENS_NAME]:
        raise _altered_error(path)
    tokens = np.frombuffer(data[: len(data) // 4 * 4], "<u4").astype(np.int64)
    right = len(data) == 4 * manifest.head_tokens and bool((np.diff(tokens) > 0).all())
    if not right or tokens[-1] >= manifest.vocab_size:
        raise ArtifactError(
            f"{path} is not an ascending list of {manifest.head_tokens} token ids below "
            f"{manifest.vocab_size}: export the model again"
        )
    return tokens


def _altered_error(path: Path) -> ArtifactError:
    return ArtifactError(
        f"{path} is not the file that was exported (its SHA-256 differs): export the model "
        "again, or restore a copy of this file"
    )


def file_sha256(path: Path, on_chunk: Callable[[int], None] | None = None) -> str:
    """Compute a file's SHA-256 as lower-case hex.

    Call `on_chunk` with each chunk's size (bytes).
    """
    with path.open("rb", buffering=0) as file:
        return sha256_of(file, on_chunk)


def sha256_of(
    file: RawIOBase, on_chunk: Callable[[int], None] | None = None, chunk_bytes: int = 1 << 22
) -> str:
    """Compute the SHA-256 of the rest of an unbuffered file, mostly without holding the GIL."""
    digest, chunk = hashlib.sha256(), memoryview(bytearray(chunk_bytes))
    while size := file.readinto(chunk):
        digest.update(chunk[:size])
        if on_chunk:
            on_chunk(size)
    return digest.hexdigest()
