"""Find the engine for a decoder: in the artifact's folder, else in the cache, else build it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.cudart import Cuda, Gpu
from pilotfish.engines.engine_errors import (
    BuildError,
    CudaError,
    EngineFileError,
    ProviderError,
)
from pilotfish.engines.gpus import gpu_nodes
from pilotfish.engines.tensorrt.build import EngineRequest, Progress, build_file
from pilotfish.engines.tensorrt.cache import EngineCache
from pilotfish.engines.tensorrt.edition import Edition
from pilotfish.engines.tensorrt.engine_file import (
    EngineKey,
    build_command,
    check_engine,
    engine_name,
    read_header,
    read_plan,
    shipped_engines,
)
from pilotfish.engines.tensorrt.execution import EngineOnGpu
from pilotfish.engines.tensorrt.targets import USUAL

log = logging.getLogger("pilotfish.engines")


@dataclass(frozen=True)
class LoadedEngine:
    """An engine that TensorRT has loaded, its request, and its file."""

    on_gpu: EngineOnGpu
    request: EngineRequest
    path: Path


def open_gpu(
    edition: Edition,
    artifact: Artifact,
    slots: int,
    context: int,
    *,
    head: bool = False,
    whole: bool = True,
) -> Cuda:
    """Open the GPU on which a decoder's engine shall run.

    whole: whether the plans of the artifact's engines are read if there is no GPU.

    Raises:
        EngineFileError: if there is no GPU, and the artifact's engines would not serve anyway.
        CudaError: if there is no GPU.
    """
    try:
        return Cuda()
    except CudaError as error:
        fitting, faults = _shipped(edition, artifact, None, slots, context, head=head, whole=whole)
        if faults and not fitting:
            raise faults[0] from None
        if not gpu_nodes():
            raise CudaError(f"this machine has no NVIDIA GPU ({error})") from None
        raise


def check_engine_exists(edition: Edition, artifact: Artifact, *, head: bool = False) -> None:
    """Raise ProviderError if there is no engine of the artifact, or of its head.

    This needs no GPU.
    """
    cached = EngineCache().paths(engine_name(artifact, head=head), edition.provider)
    if not cached and not shipped_engines(artifact, edition.provider, head=head):
        raise ProviderError(
            f"no engine of this artifact was built on this machine: run "
            f"{edition.command(artifact.path)}"
        )


def engine_for(request: EngineRequest, *, flexible: bool, may_build: bool) -> LoadedEngine:
    """Return an engine for a decoder.

    Args:
        flexible: whether an engine for any context is acceptable; that for the longest is chosen.

    Raises:
        EngineFileError: if none fits, and the artifact's folder has engines that do not.
        ProviderError: if there is none, and `may_build` is false.
    """
    edition, artifact = request.edition, request.artifact
    context = 1 if flexible else request.context
    shipped, faults = _shipped(
        edition, artifact, request.gpu, request.slots, context, head=request.head
    )
    for path, key in _in_order(shipped, flexible=flexible):
        try:
            return _load_shipped(request, path, key)
        except EngineFileError as error:
            faults.append(error)
    engine = find_engine(request, flexible=flexible)
    if engine:
        return engine
    if faults:
        raise faults[0]
    if not may_build:
        command = build_command(edition, artifact.path, request.slots, context, USUAL)
        raise ProviderError(
            f"no engine for {request.slots} slots of {request.context} tokens was built on this "
            f"machine: run {command}"
        )
    what = request.graph_path if request.head else artifact.path
    log.warning("building a TensorRT engine of %s: this takes minutes, once", what)
    return ensure_engine(request)[0]


def find_engine(request: EngineRequest, *, flexible: bool) -> LoadedEngine | None:
    """Find the smallest cached engine with enough slots and context; None if there is none.

    If `flexible`, an engine for any context is acceptable, and the engine for the longest context
    is chosen. Engines that TensorRT refuses to load are deleted.
    """
    fitting = []
    name = engine_name(request.artifact, head=request.head)
    for path in EngineCache().paths(name, request.edition.provider):
        try:
            key = check_engine(
                path,
                request.artifact,
                tensorrt=request.tensorrt,
                gpu=request.gpu,
                slots=request.slots,
                context=1 if flexible else request.context,
                head=request.head,
                whole=False,
            ).key
        except EngineFileError as error:
            log.debug("a cached engine is not used: %s", error)
            continue
        fitting.append((path, key))
    for _, key in _in_order(fitting, flexible=flexible):
        engine = _load_cached(request, key)
        if engine:
            return engine
    return None


def ensure_engine(
    request: EngineRequest, progress: Progress | None = None
) -> tuple[LoadedEngine, bool]:
    """Load exactly this engine from the cache, or build it; return whether it was built now.

    Raises:
        BuildError: if TensorRT cannot build the engine, or cannot load the result.
    """
    key = request.key
    engine = _load_cached(request, key)
    if engine:
        return engine, False
    built = build_file(request, EngineCache().path(key), progress)
    engine = _load_cached(request, key)
    if not engine:
        raise BuildError(
            "TensorRT built an engine, but cannot load it again: "
            + (request.edition.last_error() or "check that the GPU works")
        )
    return engine, built


def _shipped(
    edition: Edition,
    artifact: Artifact,
    gpu: Gpu | None,
    slots: int,
    context: int,
    *,
    head: bool,
    whole: bool = False,
) -> tuple[list[tuple[Path, EngineKey]], list[EngineFileError]]:
    """Check the engines in the artifact's folder; return those that fit, and the others' faults."""
    fitting, faults = [], []
    version = edition.version()
    for path in shipped_engines(artifact, edition.provider, head=head):
        try:
            header = check_engine(
                path,
                artifact,
                tensorrt=version,
                gpu=gpu,
                slots=slots,
                context=context,
                head=head,
                whole=whole,
            )
        except EngineFileError as error:
            faults.append(error)
        else:
            fitting.append((path, header.key))
    return fitting, faults


def _in_order(
    engines: list[tuple[Path, EngineKey]], *, flexible: bool
) -> list[tuple[Path, EngineKey]]:
    """Sort engines: the smallest first, or that for the longest context."""
    if flexible:
        return sorted(engines, key=lambda each: (-each[1].context, each[1].slots))
    return sorted(engines, key=lambda each: (each[1].slots, each[1].context))


def _load_shipped(request: EngineRequest, path: Path, key: EngineKey) -> LoadedEngine:
    """Load an engine of the artifact's folder.

    Raises:
        EngineFileError: if the file is damaged, or TensorRT refuses it.
    """
    edition = request.edition
    try:
        plan = read_plan(path, read_header(path))
    except EngineFileError:
        check_engine(path, request.artifact)  # its sentence names the command that mends it
        raise
    engine = EngineOnGpu.deserialize(edition, plan, _kernels(request, key))
    if engine is None:
        reason = edition.last_error() or "it says no reason"
        command = build_command(
            edition, request.artifact.path, key.slots, key.context, request.gpu.compute
        )
        raise EngineFileError(
            f"{edition.title} refuses {path} ({reason}): build it again: {command}"
        )
    return LoadedEngine(engine, _sized(request, key), path)


def _load_cached(request: EngineRequest, key: EngineKey) -> LoadedEngine | None:
    """Load an engine from the cache; None if it is missing, damaged, or refused by TensorRT."""
    cache = EngineCache()
    path = cache.path(key)
    plan = cache.read(key)
    if plan is None:
        return None
    engine = EngineOnGpu.deserialize(request.edition, plan, _kernels(request, key))
    if engine is None:
        log.warning("TensorRT refuses the engine %s, so the engine must be built again", path)
        path.unlink(missing_ok=True)
        return None
    return LoadedEngine(engine, _sized(request, key), path)


def _sized(request: EngineRequest, key: EngineKey) -> EngineRequest:
    """Return the same request with the slots and context of an engine."""
    return replace(request, slots=key.slots, context=key.context)


def _kernels(request: EngineRequest, key: EngineKey) -> Path | None:
    """Return the file of an engine's kernels; None if the edition keeps none."""
    if not request.edition.any_gpu:
        return None
    return EngineCache().kernels(key, request.gpu)
