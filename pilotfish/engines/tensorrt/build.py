"""Load an artifact's engine from the cache, or build it on this machine.

A build reads `model.onnx` with TensorRT's parser and times kernels on this GPU, which takes
minutes. NVIDIA's builder for RTX has built our graphs without a GPU; no engine has run yet: see
docs/engines.md.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pilotfish.base.reading import reading_file, utf8_path
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.cache import replace_file
from pilotfish.engines.cudart import Cuda, Gpu
from pilotfish.engines.engine_errors import BuildError, ProviderError
from pilotfish.engines.manifest import OPSET24
from pilotfish.engines.tensorrt.cache import EngineCache, EngineKey
from pilotfish.engines.tensorrt.fixing import fix_size, input_width
from pilotfish.engines.tensorrt.gates import (
    check_form,
    has_opset24,
    is_strongly_typed,
    last_error,
    logger,
    network_flags,
    tensorrt_version,
)
from pilotfish.engines.tensorrt.profiles import CHUNK, Profiles

if TYPE_CHECKING:
    import tensorrt as trt

log = logging.getLogger("pilotfish.engines")

Progress = Callable[[str, int, "int | None"], None]

CAPACITY = "C"  # symbolic name of the cache's capacity in graphs


@dataclass(frozen=True)
class EngineRequest:
    """A description of a wanted engine: artifact, TensorRT version, GPU, slots and context.

    Attributes:
        head: whether the engine computes the head, whose graph is in the first stage's folder.
    """

    tensorrt: str  # version
    gpu: Gpu
    artifact: Artifact
    slots: int
    context: int
    head: bool = False

    @classmethod
    def for_this_machine(
        cls, cuda: Cuda, artifact: Artifact, slots: int, context: int | None
    ) -> EngineRequest:
        """Make a request for this machine; the default context is the model's.

        Raises:
            ProviderError: if TensorRT is not installed.
        """
        longest = artifact.manifest.dimensions.context
        context = min(context or longest, longest)
        return cls(tensorrt_version(), cuda.describe(), artifact, slots, context)

    @classmethod
    def for_head(cls, cuda: Cuda, artifact: Artifact) -> EngineRequest:
        """Make a request for the engine of a first stage's head, for any number of slots.

        Raises:
            ProviderError: if TensorRT is not installed.
        """
        return cls(tensorrt_version(), cuda.describe(), artifact, 1, CHUNK, head=True)

    @property
    def graph_path(self) -> Path:
        """The path of the graph to build."""
        return self.artifact.head_path if self.head else self.artifact.graph_path

    @property
    def profiles(self) -> Profiles:
        """The profiles; opset 24's TensorScatter needs a cache of fixed length.

        Raises:
            BuildError: if the head's graph cannot be read.
        """
        if self.head:
            with reading_file(lambda problem: BuildError(f"TensorRT cannot read it: {problem}")):
                model = self.graph_path.read_bytes()
            try:
                return Profiles.for_head(input_width(model))
            except ValueError as error:
                raise BuildError(f"{self.graph_path}: {error}") from None
        manifest = self.artifact.manifest
        fixed = manifest.opset == OPSET24
        return Profiles.for_slots(manifest, self.slots, self.context, fixed=fixed)

    @property
    def key(self) -> EngineKey:
        """The cache key of the engine."""
        manifest = self.artifact.manifest
        return EngineKey(
            tensorrt=self.tensorrt,
            gpu=self.gpu.name,
            compute=self.gpu.compute,
            artifact=cached_name(self.artifact, head=self.head),
            dialect=manifest.dialect,
            precision=manifest.precision,
            slots=self.slots,
            context=self.context,
            profiles=self.profiles.digest,
        )

    def with_key(self, key: EngineKey) -> EngineRequest:
        """Return the same request with the slots and context of another key."""
        return replace(self, slots=key.slots, context=key.context)


@dataclass(frozen=True)
class LoadedEngine:
    """An engine that TensorRT has loaded, its request, and its place in the cache."""

    engine: trt.ICudaEngine
    request: EngineRequest
    path: Path
    runtime: trt.Runtime  # must live as long as the engine


def find_engine(request: EngineRequest, *, flexible: bool) -> LoadedEngine | None:
    """Find the smallest cached engine with enough slots and context; None if there is none.

    If `flexible`, an engine for any context is acceptable, and the engine for the longest context
    is chosen. Engines that TensorRT refuses to load are deleted.
    """
    cache = EngineCache()
    fitting = [
        key
        for key in cache.keys(request.key)
        if key.slots >= request.slots and (flexible or key.context >= request.context)
    ]
    if flexible:
        fitting.sort(key=lambda key: -key.context)
    for key in fitting:
        engine = _load_engine(request.with_key(key))
        if engine:
            return engine
    return None


def ensure_engine(
    request: EngineRequest, progress: Progress | None = None
) -> tuple[LoadedEngine, bool]:
    """Load or build exactly this engine; return it and whether it was built now.

    Raises:
        BuildError: if TensorRT cannot build the engine, or cannot load the result.
    """
    cache, key = EngineCache(), request.key
    engine = _load_engine(request)
    if engine:
        return engine, False
    with cache.lock(key):
        engine = _load_engine(request)  # the previous lock holder may have built it
        if engine:
            return engine, False
        timing = cache.timing(key)
        earlier_timings = timing.read_bytes() if timing.is_file() else b""
        plan, measured = _interruptible(
            lambda stop: build(request, earlier_timings, progress, stop)
        )
        cache.write(key, plan)
        if measured:
            replace_file(timing, measured)
    engine = _load_engine(request)
    if not engine:
        raise BuildError(
            "TensorRT built an engine, but cannot load it again: "
            + (last_error() or "check that the GPU works")
        )
    return engine, True


def _load_engine(request: EngineRequest) -> LoadedEngine | None:
    """Load an engine from the cache; None if it is missing, damaged, or refused by TensorRT."""
    cache, key = EngineCache(), request.key
    plan = cache.read(key)
    if plan is None:
        return None
    import tensorrt as trt

    runtime = trt.Runtime(logger())
    engine: trt.ICudaEngine | None = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        log.warning(
            "TensorRT refuses the engine %s, so the engine must be built again", cache.path(key)
        )
        cache.discard(key)
        return None
    return LoadedEngine(engine, request, cache.path(key), runtime)


def build(
    request: EngineRequest, earlier_timings: bytes, progress: Progress | None, stop: threading.Event
) -> tuple[bytes, bytes]:
    """Build the engine; return its plan and its kernel timings.

    Args:
        earlier_timings: kernel timings of an earlier build.
        stop: set to abort the build, if this TensorRT version can.
    """
    import tensorrt as trt

    profiles, messages = request.profiles, logger()
    builder = trt.Builder(messages)
    network = builder.create_network(network_flags())
    # the parser owns the weights, so it must exist until the build ends
    parser = trt.OnnxParser(network, messages)
    _parse(request, parser, profiles)
    config = builder.create_builder_config()
    if request.artifact.manifest.precision == "fp16" and not is_strongly_typed():
        config.set_flag(trt.BuilderFlag.FP16)
    for each in profiles.all:
        profile = builder.create_optimization_profile()
        for name in each.maximum:
            shapes = (each.minimum[name], each.optimum[name], each.maximum[name])
            profile.set_shape(name, *(trt.Dims(list(shape)) for shape in shapes))
        if config.add_optimization_profile(profile) < 0:
            raise BuildError(
                f"TensorRT refuses the profile {each.name}: run the command with "
                "-v and see TensorRT's log for the reason"
            )
    timings = config.create_timing_cache(earlier_timings)
    if timings is None or not config.set_timing_cache(timings, ignore_mismatch=False):
        # the earlier timings are damaged, or of another driver
        timings = config.create_timing_cache(b"")
        config.set_timing_cache(timings, ignore_mismatch=False)
    if hasattr(trt, "IProgressMonitor"):
        monitor = _monitor(progress, stop)
        config.progress_monitor = monitor
    elif progress:
        progress("building the engine", 0, None)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BuildError(
            "TensorRT built no engine: run the command with -v (pilotfish -v …) "
            "and see TensorRT's log for the reason"
        )
    return bytes(plan), bytes(timings.serialize())


def _parse(request: EngineRequest, parser: trt.OnnxParser, profiles: Profiles) -> None:
    """Read the graph into the network, with a fixed capacity if required."""
    check_form(request.artifact.manifest, opset24=has_opset24(parser))
    with reading_file(lambda problem: BuildError(f"TensorRT cannot open this path: {problem}")):
        path = utf8_path(request.graph_path)
    if len(profiles.capacities) == 1 and request.artifact.manifest.opset == OPSET24:
        model = fix_size(request.graph_path.read_bytes(), CAPACITY, profiles.capacities[0])
        read = parser.parse(model, path)  # the path is needed to find the weights
    else:
        read = parser.parse_from_file(path)
    if not read:
        errors = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise BuildError(f"TensorRT {request.tensorrt} cannot read {path}: {'; '.join(errors)}")


def _monitor(progress: Progress | None, stop: threading.Event) -> trt.IProgressMonitor:
    """Make a monitor that reports a build's outermost phases; TensorRT's threads call it."""
    import tensorrt as trt

    total: dict[str, int] = {}

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # a library without types
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                total[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if progress and phase_name in total:
                progress(phase_name, step + 1, total[phase_name])
            return not stop.is_set()

        def phase_finish(self, phase_name: str) -> None:
            if progress and phase_name in total:
                progress(phase_name, total[phase_name], total[phase_name])

    return Monitor()


def _interruptible(work: Callable[[threading.Event], tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """Run `work` on a thread, so that Ctrl-C works: the builder runs for minutes in C++."""
    stop = threading.Event()
    outcome: list[tuple[bytes, bytes]] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work(stop))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="tensorrt-build", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
    except BaseException:
        stop.set()
        raise
    if failure:
        raise failure[0]
    return outcome[0]


def cached_name(artifact: Artifact, *, head: bool = False) -> str:
    """Return the name under which an artifact's engines, or those of its head, are cached."""
    return artifact.manifest.digest + "-head" * head


def check_engine_exists(artifact: Artifact, *, head: bool = False) -> None:
    """Raise ProviderError if no engine of the artifact, or of its head, is cached.

    This needs no GPU.
    """
    if not EngineCache().knows(cached_name(artifact, head=head)):
        raise ProviderError(
            f"no engine of this artifact was built on this machine: run "
            f"pilotfish export engine {artifact.path}"
        )


def engine_for(request: EngineRequest, *, flexible: bool, may_build: bool) -> LoadedEngine:
    """Return an engine for a decoder.

    Raises:
        ProviderError: if none is cached and `may_build` is false.
    """
    engine = find_engine(request, flexible=flexible)
    if engine:
        return engine
    if not may_build:
        raise ProviderError(
            f"no engine for {request.slots} slots of {request.context} tokens was built on "
            f"this machine: run pilotfish export engine {request.artifact.path}"
        )
    what = request.graph_path if request.head else request.artifact.path
    log.warning("building a TensorRT engine of %s: this takes minutes, once", what)
    return ensure_engine(request)[0]
