"""Available providers, the variants that each is given, and their tolerances."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from pilotfish.engines.backends import PROVIDERS
from pilotfish.engines.cudart import Cuda
from pilotfish.engines.engine_errors import EngineError
from pilotfish.engines.manifest import Manifest, Precision
from pilotfish.engines.runtime import (
    LINEAR_ATTENTION_SINCE,
    OPSET24_SINCE,
    runtime_version,
)
from pilotfish.engines.tensorrt.gates import OPSET24_OPERATORS, tensorrt_version

# The surest and quickest first: the time limit cuts off the end.
ORDER = ("cpu", "cuda", "tensorrt", "tensorrt-ep")
BUILDING = ("tensorrt", "tensorrt-ep")  # these build an engine when they first open an artifact
# Dialect of the reference: plain operators, on the CPU, a new chain for every answer.
REFERENCE = "opset17"


class Variant(NamedTuple):
    """A form of a model to export. `every`: for all tiny models, not only for the first."""

    dialect: str
    precision: Precision
    every: bool = True

    def __str__(self) -> str:
        """Format as in folder names and progress."""
        return f"{self.dialect}-{self.precision}"


VARIANTS: dict[str, tuple[Variant, ...]] = {
    "cpu": (Variant("opset24", "fp32"), Variant("opset17", "fp32"), Variant("contrib", "fp32")),
    "cuda": (Variant("opset24", "fp32"), Variant("opset24", "fp16"), Variant("opset17", "fp32")),
    # Each takes a build: all kinds of attention in one dialect, other dialects and precisions once.
    "tensorrt": (
        Variant("opset17", "fp32"),
        Variant("opset17", "fp16", every=False),
        Variant("opset24", "fp16", every=False),
    ),
    "tensorrt-ep": (Variant("opset17", "fp32"), Variant("opset17", "fp16", every=False)),
}
# Providers that support recurrent states.
STATEFUL_PROVIDERS = ("cpu",)
# Variant in which the default model is checked: that of a target on this provider.
CHECKED = {
    "cpu": Variant("opset24", "fp32"),
    "cuda": Variant("opset24", "fp16"),
    "tensorrt": Variant("opset17", "fp16"),
    "tensorrt-ep": Variant("opset17", "fp16"),
}
# Variants in which it is also timed: those of a drafter.
TIMED = {"cpu": (Variant("contrib", "int4"),), "cuda": (Variant("opset24", "fp32"),)}

# ‖Δ‖/‖logits‖ of the worst row. A wrong key, value or mask changes it by 0.1 or more.
FP32 = 1e-4  # sums in another order: 10⁻⁶ on the CPU, 7·10⁻⁷ on an H100 without TF32, 10⁻³ with it
TF32 = 5e-3  # TensorRT multiplies fp32 as TF32, with 10 bits, by default
FP16 = 2e-2  # half precision: 10⁻³ over all rows on an H100, limit 10⁻²; one row may be twice that


def tolerance(provider: str, precision: str) -> float:
    """Return the largest difference of a row that rounding explains."""
    if precision == "fp16":
        return FP16
    return TF32 if provider in BUILDING else FP32


def why_unable(provider: str, manifest: Manifest) -> str | None:
    """Return why the installed libraries cannot run the artifact; None if they can."""
    if manifest.states is not None and (problem := _why_stateless(provider, manifest)):
        return problem
    if manifest.dialect != "opset24":
        return None
    if provider == "tensorrt":
        import tensorrt as trt

        if hasattr(
            trt.ICudaEngine, "get_aliased_input_tensor"
        ):  # added together with the operators
            return None
        return f"TensorRT {trt.__version__} lacks {', '.join(OPSET24_OPERATORS)}: 10.15 has them"
    if runtime_version() >= OPSET24_SINCE:
        return None
    return f"opset24 needs ONNX Runtime {'.'.join(map(str, OPSET24_SINCE))}"


def _why_stateless(provider: str, manifest: Manifest) -> str | None:
    if provider not in STATEFUL_PROVIDERS:
        supported = " and ".join(STATEFUL_PROVIDERS)
        return f"{manifest.model} has recurrent states: it runs on {supported}"
    if manifest.states and manifest.states.heads and runtime_version() < LINEAR_ATTENTION_SINCE:
        return f"linear attention needs ONNX Runtime {'.'.join(map(str, LINEAR_ATTENTION_SINCE))}"
    return None


def why_absent(provider: str) -> str | None:
    """Return why a provider is absent; None if its libraries and its hardware are present."""
    try:
        if provider == "tensorrt":
            tensorrt_version()
        else:
            runtime_version()
            if missing := _missing_provider(provider):
                return missing
        if provider != "cpu":
            Cuda()
    except EngineError as error:
        return str(error)
    return None


def describe(provider: str) -> dict[str, str]:
    """Return GPU and versions, as reported by the provider's libraries."""
    if provider == "cpu":
        return {"onnxruntime": ".".join(map(str, runtime_version()))}
    cuda = Cuda()
    gpu = cuda.describe()
    facts = {"gpu": gpu.name, "compute capability": gpu.compute, **cuda.versions()}
    if provider == "tensorrt":
        return facts | {"tensorrt": tensorrt_version()}
    return facts | {"onnxruntime": ".".join(map(str, runtime_version()))}


def _missing_provider(provider: str) -> str | None:
    """Return an error if the installed ONNX Runtime lacks a provider; else None."""
    import onnxruntime

    module, _, name = PROVIDERS[provider].partition(":")
    wanted = getattr(getattr(import_module(module), name), "provider", "CPUExecutionProvider")
    if wanted in onnxruntime.get_available_providers():
        return None
    return f"this onnxruntime is built without {wanted}: install onnxruntime-gpu in its place"
