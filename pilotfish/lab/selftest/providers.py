"""The providers, the variants in which each is checked, and the tolerances."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from pilotfish.engines.backends import PROVIDERS
from pilotfish.engines.cudart import Cuda
from pilotfish.engines.engine_errors import EngineError
from pilotfish.engines.manifest import OPSET24, Manifest, Precision
from pilotfish.engines.runtime import (
    CPU,
    LINEAR_ATTENTION_SINCE,
    OPSET24_SINCE,
    runtime_version,
)
from pilotfish.engines.tensorrt.edition import edition_of
from pilotfish.engines.tensorrt.gates import BITS, OPSET24_OPERATORS, has

# Order of the checks: the most reliable and fastest providers first, because the time limit cuts
# off the last ones.
ORDER = ("cpu", "cuda", "tensorrt", "tensorrt-rtx", "tensorrt-ep")
BUILDING = (
    "tensorrt",
    "tensorrt-rtx",
    "tensorrt-ep",
)  # providers that build an engine for a new artifact (slow)
# Dialect of the reference on the CPU: plain operators.
REFERENCE = "opset17"
QUANTISED_REFERENCE = "opset24"  # the plainest dialect with quantised weights


class Variant(NamedTuple):
    """A dialect and precision in which models are exported.

    every: whether all tiny models are exported in this variant, or only the first.
    """

    dialect: str
    precision: Precision
    every: bool = True

    def __str__(self) -> str:
        """Format the variant for folder names and progress reports."""
        return f"{self.dialect}-{self.precision}"


# Quantised weights in NVIDIA's form, which all providers run.
NVIDIA_FORM = Variant("tensorrt", "int4", every=False)
VARIANTS: dict[str, tuple[Variant, ...]] = {
    "cpu": (
        Variant("opset24", "fp32"),
        Variant("opset17", "fp32"),
        Variant("contrib", "fp32"),
        NVIDIA_FORM,
    ),
    "cuda": (
        Variant("opset24", "fp32"),
        Variant("opset24", "fp16"),
        Variant("opset17", "fp32"),
        NVIDIA_FORM,
    ),
    # Each artifact needs an engine build. So all tiny models are checked in one dialect, and only
    # one model in each other dialect and precision.
    "tensorrt": (
        Variant("opset17", "fp32"),
        Variant("opset17", "fp16", every=False),
        Variant("opset24", "fp16", every=False),
        NVIDIA_FORM,
    ),
    "tensorrt-rtx": (
        Variant("opset24", "fp32"),
        Variant("opset24", "fp16", every=False),
        Variant("opset17", "fp16", every=False),
        NVIDIA_FORM,
    ),
    "tensorrt-ep": (
        Variant("opset17", "fp32"),
        Variant("opset17", "fp16", every=False),
        NVIDIA_FORM,
    ),
}
# Providers that support recurrent states.
STATEFUL_PROVIDERS = ("cpu",)
# Variant in which the default model is checked: the variant in which a target would be exported for
# this provider.
CHECKED = {
    "cpu": Variant("opset24", "fp32"),
    "cuda": Variant("opset24", "fp16"),
    "tensorrt": Variant("opset17", "fp16"),
    "tensorrt-rtx": Variant("opset24", "fp16"),
    "tensorrt-ep": Variant("opset17", "fp16"),
}
# Variants in which the default model is also timed: the variants in which a drafter would be
# exported.
TIMED = {"cpu": (Variant("contrib", "int4"),), "cuda": (Variant("opset24", "fp32"),)}

# Tolerances: largest allowed ‖Δ‖/‖logits‖ of a row. A wrong key, value or mask causes 0.1 or more;
# another order of summation causes 10⁻⁶ (CPU) or 7·10⁻⁷ (H100); TF32 on an H100 causes 10⁻³
FP32 = 1e-4
TF32 = 5e-3  # by default, TensorRT multiplies fp32 numbers as TF32, with a mantissa of 10 bits
FP16 = 2e-2  # half precision causes 10⁻³ over all rows (H100); one row may be twice the limit 10⁻²
QUANTISED = 0.1  # the CPU rounds activations to 8 bits, which causes 4·10⁻²


def tolerance(provider: str, precision: str) -> float:
    """Return the tolerance: the largest relative difference of a row that rounding can cause."""
    if precision == "fp16":
        return FP16
    if precision in BITS:
        return QUANTISED
    return TF32 if provider in BUILDING else FP32


def why_unable(provider: str, manifest: Manifest) -> str | None:
    """Return the reason why the installed libraries cannot run the artifact; None if they can."""
    if manifest.states is not None and (problem := _why_stateless(provider, manifest)):
        return problem
    if manifest.opset != OPSET24:
        return None
    edition = edition_of(provider)
    if edition:
        if has(edition.load(), "opset 24"):
            return None
        return (
            f"{edition.title} {edition.version()} lacks the operators "
            f"{', '.join(OPSET24_OPERATORS)}: use TensorRT 10.15 or later"
        )
    if runtime_version() >= OPSET24_SINCE:
        return None
    return f"{manifest.dialect} needs ONNX Runtime {'.'.join(map(str, OPSET24_SINCE))}"


def _why_stateless(provider: str, manifest: Manifest) -> str | None:
    if provider not in STATEFUL_PROVIDERS:
        supported = " and ".join(STATEFUL_PROVIDERS)
        return f"{manifest.model} has recurrent states: it runs on {supported}"
    if manifest.states and manifest.states.heads and runtime_version() < LINEAR_ATTENTION_SINCE:
        return f"linear attention needs ONNX Runtime {'.'.join(map(str, LINEAR_ATTENTION_SINCE))}"
    return None


def why_absent(provider: str) -> str | None:
    """Return the reason why a provider is absent; None if libraries and hardware are present."""
    try:
        if edition := edition_of(provider):
            edition.load()
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
    """Return the GPU's name and the versions that the provider's libraries report."""
    if provider == "cpu":
        return {"onnxruntime": ".".join(map(str, runtime_version()))}
    cuda = Cuda()
    gpu = cuda.describe()
    facts = {"gpu": gpu.name, "compute capability": gpu.compute, **cuda.versions()}
    if edition := edition_of(provider):
        return facts | {provider: edition.version()}
    return facts | {"onnxruntime": ".".join(map(str, runtime_version()))}


def _missing_provider(provider: str) -> str | None:
    """Return an error message if the installed ONNX Runtime lacks the provider; else None."""
    import onnxruntime

    module, _, name = PROVIDERS[provider].partition(":")
    wanted = getattr(getattr(import_module(module), name), "provider", CPU)
    if wanted in onnxruntime.get_available_providers():
        return None
    return f"this onnxruntime is built without {wanted}: install onnxruntime-gpu in its place"
