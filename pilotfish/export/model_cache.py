"""The artifact of a model that a command names: from the cache, or exported into it.

In: a model by its name ("default", a hub id), a GGUF file or a checkpoint's folder; and its role.
Out: the folder of its artifact. `cached_models` finds it by the record of its source: a changed
checkpoint is exported anew, and its former artifact is removed. The hub is asked only if the cache
has no artifact, or to refresh one: so a command starts without a network, and never with other
weights than last time.

The module is light, since commands import it before they know whether there is anything to export.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from pilotfish.engines.cache import (
    artifacts_directory,
    cache_directory,
    locked,
    replace_file,
    use_until_exit,
)
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.gpus import gpu_nodes
from pilotfish.engines.manifest import MANIFEST_NAME, STORED, Precision
from pilotfish.engines.runtime import OPSET24_SINCE, runtime_version
from pilotfish.engines.tensorrt.edition import EDITIONS
from pilotfish.export.cache_contents import remove_unused
from pilotfish.export.cached_models import (
    EXPORTER,
    RECORD_NAME,
    MadeOf,
    ModelRequest,
    cached_models,
    find_model,
    folder_key,
    identity_of,
)
from pilotfish.export.export_errors import CacheFullError, DownloadError, ExportError
from pilotfish.export.source_names import (
    CONFIG,
    DEFAULT,
    DEFAULTS,
    GGUF_MAGIC,
    HUB_ID,
)

if TYPE_CHECKING:
    from pilotfish.export.sources import Progress, WeightSource

log = logging.getLogger("pilotfish.export")

Role = Literal["target", "drafter"]


def fetch_model(
    source: str | os.PathLike[str],
    role: Role,
    *,
    provider: str = "auto",
    refresh: bool = False,
    progress: Progress | None = None,
    notify: Callable[[str], None] = log.info,
) -> Path:
    """Return the folder of a model's artifact; export the model into the cache if it is missing.

    Args:
        source: an artifact's folder, which is returned; a GGUF file or a checkpoint's folder;
            "default", "default-28" or a hub id, unless a file or folder has that name.
        role: "target": fp32, or fp16 for a GPU. "drafter": fp16 for a GPU; else the stored blocks
            of a quantised source, or int8. The default model has its own: `default_precision`.
        provider: the provider that will run the model.
        refresh: ask the hub for the newest commit of a hub id, although there is an artifact.
        progress: called as progress(label, done, total).
        notify: called with a sentence for the user, such as what is exported and why.

    Raises:
        ArtifactError: if `source` is none of these.
        ExportError: if the model cannot be fetched or exported.
    """
    name = os.fspath(source)
    request = request_of(name, role, provider)
    if request is None:
        path = Path(name)
        if cache_directory().resolve() in path.resolve().parents:
            use_until_exit(path / MANIFEST_NAME)
        return path
    refresh = refresh and HUB_ID.fullmatch(request.source) is not None
    return find_or_export(request, refresh=refresh, progress=progress, notify=notify)


def request_of(name: str, role: Role, provider: str = "auto") -> ModelRequest | None:
    """Return what the name of a model asks of the cache; None: an existing file or folder.

    Raises `ArtifactError` if it is the name of nothing.
    """
    path = Path(name)
    if os.path.exists(path):  # Path.exists raises if the name is too long
        return _request(str(path.resolve()), role, provider) if _is_weights(path) else None
    if name in DEFAULTS:
        precision = default_precision(role, provider)
        return request_default(precision, skipped_layers=DEFAULTS[name])
    if not HUB_ID.fullmatch(name) or path.suffix == ".gguf":
        raise _unknown(name)
    return _request(name, role, provider)


def default_precision(role: Role, provider: str = "auto") -> Precision:
    """Return the precision of the default model in a role, for the provider that will run it.

    Its file has 4-bit blocks, which int4 keeps. So its α is higher than int8's, its pass faster
    than that of stored, and int4 is the fastest drafter on a CPU end to end (docs/engines.md). No
    provider of a GPU takes int4's dialect, so a drafter for a GPU is fp16.
    """
    if role == "target":
        return "fp32"
    return "fp16" if _runs_on_gpu(provider) else "int4"


def request_default(
    precision: Precision, first_layers: int | None = None, skipped_layers: tuple[int, ...] = ()
) -> ModelRequest:
    """Return the request for the default model in a precision."""
    return ModelRequest(
        source=DEFAULT,
        form=precision,
        opset17=_needs_opset17(precision),
        first_layers=first_layers,
        skipped_layers=skipped_layers,
    )


def find_or_export(
    request: ModelRequest,
    *,
    refresh: bool = False,
    progress: Progress | None = None,
    notify: Callable[[str], None] = log.info,
) -> Path:
    """Return the artifact's folder for a request, exported if the cache lacks it; mark it as used.

    Of several processes, one exports, and the others wait for it.
    """
    folder = None if refresh else find_model(request)
    if folder is None:
        waiting = partial(notify, f"another process exports {request.source}: waiting for it")
        with locked(artifacts_directory() / f".{request.slug}.lock", waiting):
            folder = None if refresh else find_model(request)
            if folder is None:
                folder = _export(request, progress, notify)
    return folder


def _request(source: str, role: Role, provider: str) -> ModelRequest:
    """Return the request for weights that are not the default model's."""
    whole: Precision | Literal["drafter"] = "fp32" if role == "target" else "drafter"
    form = "fp16" if _runs_on_gpu(provider) else whole
    return ModelRequest(source=source, form=form, opset17=_needs_opset17(form))


def _needs_opset17(form: str) -> bool:
    return form in ("fp32", "fp16") and runtime_version() < OPSET24_SINCE


def _runs_on_gpu(provider: str) -> bool:
    """Whether this machine has a GPU, and the provider will use it."""
    if provider == "cpu" or not gpu_nodes():
        return False
    if provider != "auto":
        return True
    with suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("onnxruntime-gpu"))
    return any(edition.is_installed for edition in EDITIONS)


def _is_weights(path: Path) -> bool:
    """Whether a file or folder has weights to export; an artifact has none."""
    if path.is_dir():
        return (path / CONFIG).is_file() and not (path / MANIFEST_NAME).exists()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def _unknown(name: str) -> ArtifactError:
    """Build the error for a name of nothing."""
    return ArtifactError(
        f"{name!r} does not exist as a file or folder, and is neither {' nor '.join(DEFAULTS)}, "
        "nor a hub id such as Qwen/Qwen2.5-0.5B-Instruct. A model is one of these, a GGUF file, a "
        "checkpoint's folder (config.json and safetensors), or the folder of an artifact, which "
        f"`pilotfish export model SOURCE --out DIR` makes.{_near_names(name)}"
    )


def _near_names(name: str) -> str:
    """Return a sentence with names in the cache and in the name's folder that are alike, or ""."""
    from difflib import get_close_matches

    names = [model.record.request.name for model in cached_models() if model.record]
    near = get_close_matches(name, [*DEFAULTS, *names], 2)
    path = Path(name)
    with suppress(OSError):
        files = get_close_matches(path.name, os.listdir(path.parent), 2)
        near += [str(path.parent / file) for file in files]
    return f" Did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""


# Exporting


def _export(
    request: ModelRequest, progress: Progress | None, notify: Callable[[str], None]
) -> Path:
    """Export a request's model into the cache; return the folder, marked as in use."""
    from pilotfish.export.model import export_model
    from pilotfish.export.sources import open_source
    from pilotfish.export.sources.checkpoint import Checkpoint

    source = request.source
    is_hub = HUB_ID.fullmatch(source) is not None
    before = "" if is_hub else identity_of(source)
    try:
        weights = open_source(source, progress)
    except DownloadError as error:
        if not is_hub:
            raise
        raise DownloadError(
            f"{source} is not a file or folder here, and {error}.{_near_names(source)}"
        ) from error
    identity = weights.description.revision or before
    folder = artifacts_directory() / f"{request.slug}-{folder_key(request, identity)}"
    if is_hub and find_model(request, identity) == folder:
        notify(f"the artifact of {source} is up to date")
        return folder
    precision = _precision(request, weights)
    size = f" ({_megabytes(weights.hashed_files())})" if isinstance(weights, Checkpoint) else ""
    notify(f"exporting {source}{size} in {precision}, once: later starts take {folder}")
    began_s = time.monotonic()
    try:
        artifact = export_model(
            weights,
            folder,
            precision=precision,
            first_layers=request.first_layers,
            skipped_layers=request.skipped_layers,
            progress=progress,
        )
        if not is_hub and identity_of(source) != before:
            shutil.rmtree(folder)
            raise ExportError(f"{source} was changed while it was exported: repeat the command")
        record = MadeOf(request=request, identity=identity, exporter=EXPORTER, made_s=time.time())
        replace_file(folder / RECORD_NAME, msgspec.json.encode(record))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _full(source, folder) from error
    use_until_exit(folder / MANIFEST_NAME)
    size = _megabytes(list(artifact.paths.values()))
    notify(f"exported {size} in {time.monotonic() - began_s:.0f} s")
    _remove_former(request, folder, notify)
    return folder


def _precision(request: ModelRequest, weights: WeightSource) -> Precision:
    """Return the precision; only the opened weights say whether they have blocks to keep."""
    if request.form != "drafter":
        return request.form
    try:
        return STORED if weights.blocks() else "int8"
    except ExportError:  # blocks for which there is no kernel
        return "int8"


def _megabytes(files: Sequence[Path]) -> str:
    return f"{sum(file.stat().st_size for file in files) / 1e6:,.0f} MB"


def _full(source: str, folder: Path) -> CacheFullError:
    free = shutil.disk_usage(folder.parent).free
    return CacheFullError(
        f"the disk is full ({free / 1e6:,.0f} MB are free), so the artifact of {source} could not "
        f"be written to {folder.parent}: remove models (`pilotfish models list`, `pilotfish models "
        "remove NAME`), or set PILOTFISH_CACHE to a folder on another disk"
    )


def _remove_former(request: ModelRequest, folder: Path, notify: Callable[[str], None]) -> None:
    """Remove the artifacts of the source's former states, unless a process uses them."""
    for model in cached_models(f"{request.slug}-*"):
        path, record = model.artifact.path, model.record
        if path == folder or record is None or not record.answers(request):
            continue
        with suppress(OSError):  # another user's artifact: the new one is there all the same
            if remove_unused(path):
                notify(f"removed {path}, which was made of a former state of {request.source}")
