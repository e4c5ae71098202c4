"""The artifacts in the cache, and the records of what they were made of.

An artifact's folder in the cache has a record beside the manifest. The artifact of a request is
found again by this record:

- the default model is pinned, so its artifact changes only with the exporter;
- of a file or a folder, the record has names, sizes and times of change of all files that determine
  the model;
- of a hub id, the record has the commit; the newest artifact is found, whatever its commit.

The module is light, since commands import it before they know whether there is anything to export.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Literal

import msgspec

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.cache import artifacts_directory, use_until_exit
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.manifest import FORMAT, MANIFEST_NAME, Precision
from pilotfish.export.source_names import (
    CHECKPOINT_FILES,
    DEFAULT,
    DEFAULTS,
    HUB_ID,
    MODEL_SHA256,
)

RECORD_NAME = "made-of.json"
EXPORTER = 1  # to be raised whenever the same source becomes other weights or another graph
_MOST_SLUG = 48


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a command wants: a model in a form.

    source: "default", a hub id, or the absolute path of a GGUF file or of a checkpoint's folder.
    form: a precision; or "drafter", which keeps the blocks of a quantised source and else is int8.
    opset17: whether the runtime is too old for the graphs that "auto" chooses for whole weights.
    first_layers, skipped_layers: as in `export_model`.
    """

    source: str
    form: Precision | Literal["drafter"]
    opset17: bool = False
    first_layers: int | None = None
    skipped_layers: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name by which commands take the model: its source, or "default-28"."""
        if self.source == DEFAULT and self.first_layers is None:
            for name, skipped_layers in DEFAULTS.items():
                if self.skipped_layers == skipped_layers:
                    return name
        return self.source

    @property
    def slug(self) -> str:
        """The beginning of the folder's name."""
        path = Path(self.source.partition("@")[0] if HUB_ID.fullmatch(self.source) else self.source)
        name = path.stem if path.suffix == ".gguf" else path.name
        layers = "" if self.first_layers is None else f"-{self.first_layers}-layers"
        if self.skipped_layers:
            layers = f"-without-{'-'.join(map(str, self.skipped_layers))}"
        return f"{re.sub(r'[^a-z0-9.]+', '-', name.lower())[:_MOST_SLUG]}-{self.form}{layers}"


class MadeOf(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a cached artifact: the request, and the state of the source that it met.

    identity: a hash of the source's state; a hub's commit. made_s: Unix time.
    """

    request: ModelRequest
    identity: str
    exporter: int
    made_s: float

    def answers(self, request: ModelRequest) -> bool:
        """Whether this version of the exporter made the artifact for such a request."""
        return self.exporter == EXPORTER and self.request == request


class CachedModel(msgspec.Struct, frozen=True):
    """An artifact in the cache. record: None if an earlier version made it, or another command."""

    artifact: Artifact
    record: MadeOf | None


def read_cached(folder: Path) -> CachedModel:
    """Open an artifact in the cache, or a stage of one; raise `ArtifactError` if it is damaged."""
    artifact = Artifact.open(folder, stage=True)
    try:
        record = msgspec.json.decode((folder / RECORD_NAME).read_bytes(), type=MadeOf)
    except (OSError, msgspec.MsgspecError):
        record = None
    return CachedModel(artifact, record)


def find_model(request: ModelRequest, commit: str | None = None) -> Path | None:
    """Return the folder of the request's artifact, marked as in use; None if there is none.

    commit: the commit of a hub id; None: the newest artifact of any commit.
    """
    identity = commit if HUB_ID.fullmatch(request.source) else identity_of(request.source)
    made = []
    for model in cached_models(f"{request.slug}-*"):
        record = model.record
        if record is not None and record.answers(request) and identity in (None, record.identity):
            made.append((record.made_s, model.artifact.path))
    if not made:
        return None
    _, folder = max(made)
    return folder if use_until_exit(folder / MANIFEST_NAME) else None


def cached_models(pattern: str = "[!.]*") -> list[CachedModel]:
    """Open the undamaged artifacts in the cache with such a folder name."""
    models = []
    for folder in sorted(artifacts_directory().glob(pattern)):
        try:
            models.append(read_cached(folder))
        except ArtifactError:
            continue
    return models


def identity_of(source: str) -> str:
    """Hash what the default model, a file or a folder has now: names, sizes and times of change."""
    if source == DEFAULT:
        return MODEL_SHA256[:16]
    facts = []
    for file in files_of(Path(source)):
        status = file.stat()
        facts.append([str(file.relative_to(source)), status.st_size, status.st_mtime_ns])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def files_of(path: Path) -> list[Path]:
    """List the files that determine a model: a GGUF file, or those of a checkpoint's folder."""
    if not path.is_dir():
        return [path]
    files = {file for pattern in CHECKPOINT_FILES for file in path.glob(pattern)}
    return sorted(file for file in files if file.is_file())


def folder_key(request: ModelRequest, identity: str) -> str:
    """Hash everything that determines the artifact, for the end of its folder's name."""
    facts = [msgspec.to_builtins(request), identity, EXPORTER, FORMAT]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
