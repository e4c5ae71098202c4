"""The backends by provider name. To add a backend, add a file, and a line here.

A provider is chosen only after it has run the model. The log of `pilotfish.engines` gets the name
of the chosen provider, and the reason why each other provider was not chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.backends.backend import Answers, Backend, Binding, Load, kv_names
from pilotfish.engines.engine_errors import ProviderError
from pilotfish.engines.gpus import IdleGpu, find_idle_gpu

__all__ = [
    "AUTO", "PROVIDERS", "Answers", "Backend", "Binding", "Load", "OpenedBackend", "kv_names",
    "no_provider_error", "open_backend",
]  # fmt: skip

log = logging.getLogger("pilotfish.engines")

PROVIDERS = {  # best first
    "tensorrt": "pilotfish.engines.backends.tensorrt:TensorRTBackend",
    "tensorrt-rtx": "pilotfish.engines.backends.tensorrt:TensorRTForRtxBackend",
    "tensorrt-ep": "pilotfish.engines.backends.tensorrt_ep:TensorRTProviderBackend",
    "cuda": "pilotfish.engines.backends.cuda:CudaBackend",
    "cpu": "pilotfish.engines.backends.cpu:CpuBackend",
}
# Providers that "auto" tries. "tensorrt-ep" is not among them, because it builds engines at load,
# for minutes.
AUTO = ("tensorrt", "tensorrt-rtx", "cuda", "cpu")


class OpenedBackend(NamedTuple):
    """A backend that has run the model, and its provider.

    idle_gpu: the GPU that the backend leaves idle; None if there is none, or the CPU was chosen.
    """

    backend: Backend
    provider: str
    idle_gpu: IdleGpu | None


def open_backend(
    load: Load,
    provider: str,
    probe: Callable[[Backend], None],
    providers: Mapping[str, str] = PROVIDERS,
) -> OpenedBackend:
    """Load a model on the first provider that passes `probe`.

    Args:
        provider: a name of `providers`, or "auto": the best provider that works without building an
        engine.
        probe: function that runs the model on a backend, and raises if that fails.
        providers: class path of each backend by provider name; PROVIDERS for graphs that Pilotfish
        exported.

    Raises:
        ProviderError: if no runtime is installed, or no requested provider works.
        ArtifactError: if no provider works because a file is damaged.
    """
    if provider != "auto" and provider not in providers:
        raise ProviderError(f"unknown provider {provider!r}: choose auto, {', '.join(providers)}")
    best = tuple(name for name in AUTO if name in providers)
    names = best if provider == "auto" else (provider,)
    reasons: list[str] = []
    for name in names:
        try:
            backend = _load_class(providers[name])(load)
            probe(backend)
        except Exception as error:  # runtimes raise many error classes
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            reasons.append(f"{name}: {reason}")
            log.info("provider %s cannot be used: %s", name, reason)
            continue
        idle_gpu = None
        if (provider, name) == ("auto", "cpu"):
            idle_gpu = find_idle_gpu(reasons or ["a graph of this kind runs there only"])
        log.info("provider %s: it ran the model%s", name, _fallback_note(reasons))
        return OpenedBackend(backend, name, idle_gpu)
    raise no_provider_error(load.artifact, load.artifact.graph_path, names, reasons)


def no_provider_error(
    artifact: Artifact, graph: Path, wanted: Sequence[str], reasons: Sequence[str]
) -> ProviderError:
    """Build the error for a graph that none of the `wanted` providers could run.

    The CPU can run any intact graph: if it failed, the files are verified.

    Raises:
        ArtifactError: if a file is damaged.
    """
    if "cpu" in wanted:
        artifact.verify()
    return ProviderError(f"no provider can run {graph}: {'; '.join(reasons)}")


def _load_class(place: str) -> Callable[[Load], Backend]:
    module, _, attribute = place.partition(":")
    kind: Callable[[Load], Backend] = getattr(import_module(module), attribute)
    return kind


def _fallback_note(reasons: list[str]) -> str:
    return f" (fell back: {'; '.join(reasons)})" if reasons else ""
