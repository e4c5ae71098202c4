"""What the cache has: artifacts, their stages and engines, and the downloads that they are made of.

`list_contents` lists it, `remove` removes entries, unless a process uses them. The hub's own cache
is shared with other programs. From there, only models that an artifact was made of are listed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import msgspec

from pilotfish.base.home import user_folder
from pilotfish.engines.cache import artifacts_directory, cache_directory, unused
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.manifest import MANIFEST_NAME
from pilotfish.export.cached_models import CachedModel, read_cached
from pilotfish.export.source_names import DEFAULT, DEFAULTS, HUB_ID, MODEL_FILE

Kind = Literal["artifact", "stages", "engines", "download"]
_DERIVED: tuple[Kind, ...] = ("stages", "engines")


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder in the cache.

    name: what `remove` takes. made_of: the model's source; None: unknown. precision, dialect: of an
    undamaged artifact. size: bytes. made_s: Unix time of the export; None: unknown. used_s: Unix
    time of the last start of a command with it. in_use: whether a process uses it; None: unknown.
    """

    kind: Kind
    name: str
    path: str
    size: int
    used_s: float
    made_of: str | None = None
    precision: str | None = None
    dialect: str | None = None
    made_s: float | None = None
    in_use: bool | None = None


def list_contents() -> list[CacheEntry]:
    """List the cache: artifacts by name, then what was made of them, then downloads."""
    artifacts, models = [], {}
    for folder in sorted(artifacts_directory().glob("[!.]*")):
        try:
            model = read_cached(folder)
        except ArtifactError:
            artifacts.append(_entry("artifact", folder))
            continue
        models[model.artifact.manifest.digest] = model
        artifacts.append(_artifact_entry(folder, model))
    return [*artifacts, *_derived(models), *_downloads(artifacts)]


def entries_named(name: str, contents: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Return the entries of this name, or of this source: "default", a hub id, or a path."""
    paths = _paths(name)
    return [
        entry
        for entry in contents
        if name in (entry.name, entry.made_of)
        or entry.made_of in paths
        or not paths.isdisjoint(_paths(entry.path))
    ]


def related_to(
    artifacts: Sequence[CacheEntry], contents: Sequence[CacheEntry]
) -> Iterator[CacheEntry]:
    """Yield what was made of these artifacts, and the downloads that they were made of."""
    names = {artifact.name for artifact in artifacts}
    downloaded = {_downloaded(artifact) for artifact in artifacts}
    for entry in contents:
        if entry.made_of in (downloaded if entry.kind == "download" else names):
            yield entry


def remove(entry: CacheEntry) -> bool:
    """Remove an entry; return False, and remove nothing, if a process uses it."""
    path = Path(entry.path)
    if path.is_dir():
        return remove_unused(path)
    path.unlink(missing_ok=True)
    return True


def remove_unused(folder: Path) -> bool:
    """Remove the folder of an artifact, or of its stages or engines, unless a process uses it.

    Returns False, and removes nothing, if a process uses it. No process begins to use it meanwhile.
    """
    with ExitStack() as locks:
        for manifest in (folder / MANIFEST_NAME, *folder.glob(f"*/{MANIFEST_NAME}")):
            if not locks.enter_context(unused(manifest)):
                return False
        hidden = folder.with_name(f".{folder.name}.removed-{os.getpid()}")
        folder.rename(hidden)  # first, so that no command finds half of it
    shutil.rmtree(hidden)
    return True


def remove_leftovers() -> None:
    """Remove what killed removals left; to be called before this process removes anything."""
    folders = [artifacts_directory(), *(cache_directory() / kind for kind in _DERIVED)]
    for folder in (*folders, *filter(None, [hub_cache()])):
        for leftover in folder.glob(".*.removed-*"):
            process = leftover.name.rpartition("-")[2]
            if process == str(os.getpid()) or not Path(f"/proc/{process}").exists():
                shutil.rmtree(leftover, ignore_errors=True)  # it may be another user's


def hub_cache() -> Path | None:
    """Return the hub's cache folder, by its client's rules; None without a home folder."""
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named)
    if home := os.environ.get("HF_HOME"):
        return Path(home) / "hub"
    folder = user_folder("XDG_CACHE_HOME", ".cache")
    return None if folder is None else folder / "huggingface" / "hub"


def _artifact_entry(folder: Path, model: CachedModel) -> CacheEntry:
    manifest, record = model.artifact.manifest, model.record
    return msgspec.structs.replace(
        _entry("artifact", folder),
        made_of=manifest.source.location if record is None else record.request.name,
        precision=manifest.precision,
        dialect=manifest.dialect,
        made_s=None if record is None else record.made_s,
        in_use=not _is_free(folder / MANIFEST_NAME),
    )


def _derived(models: dict[str, CachedModel]) -> Iterator[CacheEntry]:
    """Yield the folders of stages and of engines, which are named after the artifact's digest."""
    for kind in _DERIVED:
        for folder in sorted((cache_directory() / kind).glob("[!.]*")):
            model = models.get(folder.name.partition("-")[0]) if folder.is_dir() else None
            made_of = None if model is None else model.artifact.path.name
            yield msgspec.structs.replace(_entry(kind, folder), made_of=made_of)


def _downloads(artifacts: Sequence[CacheEntry]) -> Iterator[CacheEntry]:
    """Yield the downloaded sources of artifacts, and the default model's file."""
    default = cache_directory() / MODEL_FILE
    if default.is_file():
        yield msgspec.structs.replace(_entry("download", default), made_of=DEFAULT)
    hub = hub_cache()
    for hub_id in sorted(set(filter(None, map(_downloaded, artifacts))) - {DEFAULT}):
        folder = None if hub is None else hub / f"models--{hub_id.replace('/', '--')}"
        if folder is not None and folder.is_dir():
            yield msgspec.structs.replace(_entry("download", folder), made_of=hub_id)


def _downloaded(artifact: CacheEntry) -> str | None:
    """Return what was downloaded for an artifact: "default", or a hub id without a revision."""
    if artifact.made_of in DEFAULTS:
        return DEFAULT
    match = HUB_ID.fullmatch(artifact.made_of or "")
    return match["id"] if match else None


def _paths(name: str) -> set[str]:
    """Return the absolute path of a name, with links and without; the cache may be a link."""
    return {os.path.abspath(name), os.path.realpath(name)}


def _entry(kind: Kind, path: Path) -> CacheEntry:
    return CacheEntry(
        kind=kind, name=path.name, path=str(path), size=_size(path), used_s=path.stat().st_mtime
    )


def _is_free(manifest: Path) -> bool:
    with unused(manifest) as free:
        return free


def _size(path: Path) -> int:
    """Return the size of a file, or of all files in a folder; links count nothing."""
    if path.is_file():
        return path.stat().st_size
    return sum(
        os.lstat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(path)
        for name in names
        if not os.path.islink(os.path.join(folder, name))
    )
