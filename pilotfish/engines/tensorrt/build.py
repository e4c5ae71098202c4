"""Build an engine of an artifact, and write its file.

A build reads `model.onnx` with TensorRT's parser, which takes minutes. The standard TensorRT times
kernels on this machine's GPU; TensorRT for RTX needs no GPU (docs/engines.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotfish.base.reading import reading_file, utf8_path
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.cache import replace_file
from pilotfish.engines.cudart import Cuda, Gpu
from pilotfish.engines.engine_errors import BuildError
from pilotfish.engines.manifest import OPSET24
from pilotfish.engines.tensorrt.cache import EngineCache, read_cached
from pilotfish.engines.tensorrt.edition import STANDARD, Edition
from pilotfish.engines.tensorrt.engine_file import EngineKey, engine_name, write_engine
from pilotfish.engines.tensorrt.fixing import fix_size
from pilotfish.engines.tensorrt.gates import check_form, has, has_opset24, network_flags
from pilotfish.engines.tensorrt.profiles import CHUNK, Profiles
from pilotfish.engines.tensorrt.targets import set_targets

Progress = Callable[[str, int, "int | None"], None]

CAPACITY = "C"  # symbolic name of the cache's capacity in graphs


@dataclass(frozen=True)
class EngineRequest:
    """A description of a wanted engine: artifact, TensorRT version, GPU, slots and context.

    Attributes:
        tensorrt: TensorRT's version.
        gpu: GPU for which the engine is wanted. An edition whose engines run on any GPU takes only
            its compute capabilities, which may be several: "8.6,8.9".
        head: whether the engine computes the head, whose graph is in the first stage's folder.
    """

    tensorrt: str
    gpu: Gpu
    artifact: Artifact
    slots: int
    context: int
    head: bool = False
    edition: Edition = STANDARD

    @classmethod
    def for_gpu(
        cls,
        gpu: Gpu,
        artifact: Artifact,
        slots: int,
        context: int | None,
        edition: Edition = STANDARD,
    ) -> EngineRequest:
        """Make a request for a GPU; the default context is the model's.

        Raises:
            ProviderError: if the edition is not installed.
        """
        longest = artifact.manifest.dimensions.context
        context = min(context or longest, longest)
        return cls(edition.version(), gpu, artifact, slots, context, edition=edition)

    @classmethod
    def for_this_machine(
        cls,
        cuda: Cuda,
        artifact: Artifact,
        slots: int,
        context: int | None,
        edition: Edition = STANDARD,
    ) -> EngineRequest:
        """Make a request for this machine's GPU; see `for_gpu`."""
        return cls.for_gpu(cuda.describe(), artifact, slots, context, edition)

    @classmethod
    def for_head(cls, gpu: Gpu, artifact: Artifact, edition: Edition = STANDARD) -> EngineRequest:
        """Make a request for the engine of a first stage's head, for any number of slots.

        Raises:
            ProviderError: if the edition is not installed.
        """
        return cls(edition.version(), gpu, artifact, 1, CHUNK, head=True, edition=edition)

    @property
    def graph_path(self) -> Path:
        """The path of the graph to build."""
        return self.artifact.head_path if self.head else self.artifact.graph_path

    @property
    def profiles(self) -> Profiles:
        """The profiles.

        Raises:
            BuildError: if the head's graph cannot be read.
        """
        return Profiles.for_engine(self.artifact, self.slots, self.context, head=self.head)

    @property
    def key(self) -> EngineKey:
        """The key of the engine."""
        manifest = self.artifact.manifest
        return EngineKey(
            provider=self.edition.provider,
            tensorrt=self.tensorrt,
            gpu="" if self.edition.any_gpu else self.gpu.name,
            compute=self.gpu.compute,
            artifact=engine_name(self.artifact, head=self.head),
            dialect=manifest.dialect,
            precision=manifest.precision,
            slots=self.slots,
            context=self.context,
            profiles=self.profiles.digest,
        )


def build_file(request: EngineRequest, path: Path, progress: Progress | None = None) -> bool:
    """Build exactly this engine and write it to `path`; return whether it was built now.

    It is not, if the file is there and intact.

    Raises:
        BuildError: if TensorRT cannot build the engine.
    """
    key = request.key
    cache = EngineCache()
    timing = cache.timing(key)
    with cache.lock(key):
        if read_cached(path, key) is not None:  # the previous lock holder may have built it
            return False
        earlier_timings = timing.read_bytes() if timing.is_file() else b""
        plan, measured = _interruptible(
            lambda stop: build(request, earlier_timings, progress, stop)
        )
        write_engine(path, key, plan)
        if measured:
            replace_file(timing, measured)
    return True


def build(
    request: EngineRequest, earlier_timings: bytes, progress: Progress | None, stop: threading.Event
) -> tuple[bytes, bytes]:
    """Build the engine; return its plan and its kernel timings.

    Args:
        earlier_timings: kernel timings of an earlier build; an edition without timings returns b"".
        stop: set to abort the build, if this TensorRT version can.
    """
    edition, profiles = request.edition, request.profiles
    trt, messages = edition.load(), edition.logger()
    builder = trt.Builder(messages)
    network = builder.create_network(network_flags(trt))
    # the parser owns the weights, so it must exist until the build ends
    parser = trt.OnnxParser(network, messages)
    _parse(request, parser, profiles)
    config = builder.create_builder_config()
    if request.artifact.manifest.precision == "fp16" and not has(trt, "strong types"):
        config.set_flag(trt.BuilderFlag.FP16)
    for each in profiles.all:
        profile = builder.create_optimization_profile()
        for name in each.maximum:
            shapes = (each.minimum[name], each.optimum[name], each.maximum[name])
            try:
                profile.set_shape(name, *(trt.Dims(list(shape)) for shape in shapes))
            except (RuntimeError, ValueError) as error:
                raise BuildError(
                    f"TensorRT refuses the profile {each.name} ({str(error).strip(' .')}): choose "
                    "fewer --slots or a shorter --context"
                ) from None
        if config.add_optimization_profile(profile) < 0:
            raise BuildError(
                f"TensorRT refuses the profile {each.name}: run the command with "
                "-v and see TensorRT's log for the reason"
            )
    timings = None
    if has(trt, "targets"):
        set_targets(trt, config, request.gpu.compute)
    else:
        timings = _use_timings(config, earlier_timings)
    if has(trt, "progress"):
        monitor = _monitor(trt, progress, stop)
        config.progress_monitor = monitor
    elif progress:
        progress("building the engine", 0, None)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BuildError(
            "TensorRT built no engine: run the command with -v (pilotfish -v …) "
            "and see TensorRT's log for the reason"
        )
    return bytes(plan), b"" if timings is None else bytes(timings.serialize())


def _use_timings(config: Any, earlier: bytes) -> Any:
    """Give a build the timings of an earlier one, or none if they do not fit; return the cache."""
    timings = config.create_timing_cache(earlier)
    if timings is None or not config.set_timing_cache(timings, ignore_mismatch=False):
        # the earlier timings are damaged, or of another driver
        timings = config.create_timing_cache(b"")
        config.set_timing_cache(timings, ignore_mismatch=False)
    return timings


def _parse(request: EngineRequest, parser: Any, profiles: Profiles) -> None:
    """Read the graph into the network, with a fixed capacity if required."""
    name = f"{request.edition.title} {request.tensorrt}"
    check_form(request.artifact.manifest, opset24=has_opset24(parser), name=name)
    with reading_file(lambda problem: BuildError(f"TensorRT cannot open this path: {problem}")):
        path = utf8_path(request.graph_path)
    if len(profiles.capacities) == 1 and request.artifact.manifest.opset == OPSET24:
        model = fix_size(request.graph_path.read_bytes(), CAPACITY, profiles.capacities[0])
        read = parser.parse(model, path)  # the path is needed to find the weights
    else:
        read = parser.parse_from_file(path)
    if not read:
        errors = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise BuildError(f"{name} cannot read {path}: {'; '.join(errors)}")


def _monitor(trt: Any, progress: Progress | None, stop: threading.Event) -> Any:
    """Make a monitor that reports a build's outermost phases; TensorRT's threads call it."""
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
