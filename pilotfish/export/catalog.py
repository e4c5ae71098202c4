"""List the artifacts in a folder, for `pilotfish export list`."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import ArtifactError, EngineFileError
from pilotfish.engines.manifest import MANIFEST_NAME
from pilotfish.engines.tensorrt.engine_file import HEAD, engine_files, read_header


class ListedArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact in the list.

    `size` is the total size of the files, bytes. `stage` describes the part of the model; None for
    a whole model. `mask_token` is the mask token of a model that drafts several tokens in one pass;
    None for other models. `engines` describes the engines in the folder.
    """

    path: str
    model: str
    precision: str
    dialect: str
    size: int
    stage: str | None = None
    mask_token: int | None = None
    engines: list[str] = []


def list_artifacts(folder: str | os.PathLike[str]) -> list[ListedArtifact]:
    """List the artifacts in and below `folder`, sorted by path.

    The list omits damaged artifacts, and hidden directories such as unfinished exports.

    Raises:
        ArtifactError: if the folder does not exist.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ArtifactError(f"{root} is not a folder: name a folder of artifacts")
    entries = []
    for name, children, files in os.walk(root):
        children[:] = [child for child in children if not child.startswith(".")]
        if MANIFEST_NAME not in files:
            continue
        children.clear()  # artifacts are not nested
        try:
            entries.append(_entry(Artifact.open(name, stage=True)))
        except ArtifactError:
            continue
    return sorted(entries, key=lambda entry: entry.path)


def _entry(artifact: Artifact) -> ListedArtifact:
    manifest = artifact.manifest
    return ListedArtifact(
        path=str(artifact.path),
        model=manifest.model,
        precision=manifest.precision,
        dialect=manifest.dialect,
        size=sum((artifact.path / name).stat().st_size for name in manifest.files),
        stage=None if manifest.stage is None else str(manifest.stage),
        mask_token=manifest.mask_token,
        engines=list(map(_describe_engine, engine_files(artifact))),
    )


def _describe_engine(path: Path) -> str:
    try:
        key = read_header(path).key
    except EngineFileError:
        return f"{path.name} (damaged)"
    target = f"{key.gpu} {key.compute}".strip()
    if key.artifact.endswith(HEAD):
        return f"{key.provider} for {target}, the head"
    return f"{key.provider} for {target}, {key.slots} × {key.context} tokens"
