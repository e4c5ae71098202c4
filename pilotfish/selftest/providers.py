"""Which providers are there, what each is given to run, and how far it may be from the CPU."""

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

# The surest and quickest first, for what is left out for want of time is at the end.
ORDER = ("cpu", "cuda", "tensorrt", "tensorrt-ep")
BUILDING = ("tensorrt", "tensorrt-ep")  # when they open an artifact for the first time
# The reference: plain operators, a new chain for every answer, on the CPU.
REFERENCE = "opset17"


class Variant(NamedTuple):
    """A form in which a model is exported. `every`: of all tiny models, else of the first alone."""

    dialect: str
    precision: Precision
    every: bool = True

    def __str__(self) -> str:
        """Name it as folders and progress do."""
        return f"{self.dialect}-{self.precision}"


VARIANTS: dict[str, tuple[Variant, ...]] = {
    "cpu": (Variant("opset24", "fp32"), Variant("opset17", "fp32"), Variant("contrib", "fp32")),
    "cuda": (Variant("opset24", "fp32"), Variant("opset24", "fp16"), Variant("opset17", "fp32")),
    # Each takes a build: kinds of attention in one dialect, the other dialect and precision once.
    "tensorrt": (
        Variant("opset17", "fp32"),
        Variant("opset17", "fp16", every=False),
        Variant("opset24", "fp16", every=False),
    ),
    "tensorrt-ep": (Variant("opset17", "fp32"), Variant("opset17", "fp16", every=False)),
}
# Providers that keep the states of layers without keys and values.
KEEPING_STATES = ("cpu",)
# In which form the default model is checked: as a target on this provider would be.
CHECKED = {
    "cpu": Variant("opset24", "fp32"),
    "cuda": Variant("opset24", "fp16"),
    "tensorrt": Variant("opset17", "fp16"),
    "tensorrt-ep": Variant("opset17", "fp16"),
}
# In which it is timed besides: as a drafter would be.
TIMED = {"cpu": (Variant("contrib", "int4"),), "cuda": (Variant("opset24", "fp32"),)}

# ‖Δ‖/‖logits‖ of the worst row. What a wrong key, value or mask changes is 0.1 and more.
FP32 = 1e-4  # sums in another order: 10⁻⁶ on the CPU, 7·10⁻⁷ on an H100 without TF32, 10⁻³ with it
TF32 = 5e-3  # TensorRT multiplies fp32 in TF32, of 10 bits, unless it is told otherwise
FP16 = 2e-2  # half precision: 10⁻³ over all rows on an H100, limit 10⁻²; one row may be twice that


def tolerance(provider: str, precision: str) -> float:
    """Return the largest difference of a row that rounding explains."""
    if precision == "fp16":
        return FP16
    return TF32 if provider in BUILDING else FP32


def unable(provider: str, manifest: Manifest) -> str | None:
    """Say why the libraries that are there cannot run such an artifact; None if they can."""
    if manifest.states is not None and (reason := _keeps_no_states(provider, manifest)):
        return reason
    if manifest.dialect != "opset24":
        return None
    if provider == "tensorrt":
        import tensorrt as trt

        if hasattr(trt.ICudaEngine, "get_aliased_input_tensor"):  # came with the operators
            return None
        return f"TensorRT {trt.__version__} lacks {', '.join(OPSET24_OPERATORS)}: 10.15 has them"
    if runtime_version() >= OPSET24_SINCE:
        return None
    return f"opset24 needs ONNX Runtime {'.'.join(map(str, OPSET24_SINCE))}"


def _keeps_no_states(provider: str, manifest: Manifest) -> str | None:
    if provider not in KEEPING_STATES:
        able = " and ".join(KEEPING_STATES)
        return f"{manifest.model} keeps states besides keys and values: it runs on {able}"
    if manifest.states and manifest.states.heads and runtime_version() < LINEAR_ATTENTION_SINCE:
        return f"linear attention needs ONNX Runtime {'.'.join(map(str, LINEAR_ATTENTION_SINCE))}"
    return None


def why_absent(provider: str) -> str | None:
    """Say why a provider is not there; None if its libraries and its hardware are."""
    try:
        if provider == "tensorrt":
            tensorrt_version()
        else:
            runtime_version()
            if missing := _not_built_in(provider):
                return missing
        if provider != "cpu":
            Cuda()
    except EngineError as error:
        return str(error)
    return None


def describe(provider: str) -> dict[str, str]:
    """Return GPU and versions, as the libraries of this provider tell them."""
    if provider == "cpu":
        return {"onnxruntime": ".".join(map(str, runtime_version()))}
    cuda = Cuda()
    gpu = cuda.describe()
    told = {"gpu": gpu.name, "compute capability": gpu.compute, **cuda.versions()}
    if provider == "tensorrt":
        return told | {"tensorrt": tensorrt_version()}
    return told | {"onnxruntime": ".".join(map(str, runtime_version()))}


def _not_built_in(provider: str) -> str | None:
    """Say that the installed ONNX Runtime was built without a provider."""
    import onnxruntime

    module, _, name = PROVIDERS[provider].partition(":")
    wanted = getattr(getattr(import_module(module), name), "provider", "CPUExecutionProvider")
    if wanted in onnxruntime.get_available_providers():
        return None
    return f"this onnxruntime is built without {wanted}: install onnxruntime-gpu in its place"
