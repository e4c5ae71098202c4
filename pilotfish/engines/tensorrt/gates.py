"""The differences between TensorRT's versions 8.6 to 11 and TensorRT for RTX: a table.

A version is recognised by the names that its module has, not by its number. To add a difference,
add a row to GATES.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from pilotfish.engines.engine_errors import FormError, ProviderError
from pilotfish.engines.manifest import GENAI, LLAMACPP, OPSET24, Manifest


@dataclass(frozen=True)
class Gate:
    """A difference between versions.

    Attributes:
        sign: name in the module, whose presence shows the difference.
        since, until: first version of the standard TensorRT that has it, and first that lacks it
            again; None: no version has it, or the latest has it.
        rtx: whether TensorRT for RTX has it.
        effect: what Pilotfish does where it is present.
    """

    sign: str
    since: tuple[int, int] | None
    until: tuple[int, int] | None
    rtx: bool
    effect: str

    def is_open(self, trt: Any) -> bool:
        """Whether the module of a TensorRT has this difference."""
        return (
            reduce(lambda at, name: getattr(at, name, None), self.sign.split("."), trt) is not None
        )


GATES = {
    "explicit batch": Gate(
        "NetworkDefinitionCreationFlag.EXPLICIT_BATCH", (8, 6), (11, 0), False,
        "networks need this flag, unless they are strongly typed",
    ),
    "fp16 flag": Gate(
        "BuilderFlag.FP16", (8, 6), (11, 0), False,
        "artifacts in fp16 set this flag, unless networks are strongly typed",
    ),
    "strong types": Gate(
        "NetworkDefinitionCreationFlag.STRONGLY_TYPED", (10, 0), None, True,
        "networks take their types from the graph",
    ),
    "wide integers": Gate(
        "DataType.INT64", (10, 0), None, True,
        "the engine's integers have 64 bits; else 32",
    ),
    "progress": Gate(
        "IProgressMonitor", (10, 0), None, True,
        "a build reports progress, and Ctrl-C aborts it",
    ),
    "opset 24": Gate(
        "ICudaEngine.get_aliased_input_tensor", (10, 15), None, True,
        "the parser knows the operators of opset 24; engines write their cache in place",
    ),
    "targets": Gate(
        "IBuilderConfig.set_compute_capability", None, None, True,
        "an engine is built for compute capabilities, without a GPU; no kernels are timed",
    ),
    "runtime cache": Gate(
        "IRuntimeConfig.create_runtime_cache", None, None, True,
        "the GPU's kernels are compiled at load, and kept for the next load",
    ),
}  # fmt: skip
# Operators of opset 24, in the dialects opset24 and tensorrt, that older parsers lack.
OPSET24_OPERATORS = ("TensorScatter", "RMSNormalization", "RotaryEmbedding")
FLOATS = ("fp32", "fp16")
BITS = ("int8", "int4", "stored")  # precisions with quantised weights


def has(trt: Any, gate: str) -> bool:
    """Whether the module of a TensorRT has a difference of GATES."""
    return GATES[gate].is_open(trt)


def network_flags(trt: Any) -> int:
    """Return the flags for the creation of networks."""
    flags = trt.NetworkDefinitionCreationFlag
    flag = flags.STRONGLY_TYPED if has(trt, "strong types") else flags.EXPLICIT_BATCH
    return 1 << int(flag)


def array_dtype(trt: Any, dtype: Any) -> np.dtype[Any]:
    """Return the numpy dtype of a TensorRT dtype."""
    names = {"FLOAT": np.float32, "HALF": np.float16, "INT32": np.int32, "INT64": np.int64}
    for name, ours in names.items():
        if hasattr(trt.DataType, name) and dtype == getattr(trt.DataType, name):
            return np.dtype(ours)
    raise ProviderError(
        f"the engine has an input or output of type {dtype}, which none of our "
        "graphs has: build it again"
    )


def has_opset24(parser: Any) -> bool:
    """Whether the parser knows the operators of opset 24 in our graphs."""
    return all(parser.supports_operator(name) for name in OPSET24_OPERATORS)


def check_form(manifest: Manifest, *, opset24: bool, name: str = "TensorRT") -> None:
    """Check that TensorRT can read the artifact.

    Args:
        opset24: whether this TensorRT knows the operators of opset 24.
        name: name and version of this TensorRT, for the message.

    Raises:
        FormError: if not; the message names the dialect to export instead.
    """
    if manifest.states is not None:
        raise FormError(
            f"{manifest.model} has recurrent states, which only the CPU supports so far"
        )
    if manifest.dialect == LLAMACPP:
        problem = "TensorRT cannot read a GGUF file"
    elif manifest.dialect == GENAI:
        problem = "TensorRT knows no operator of ONNX Runtime GenAI's graphs"
    elif manifest.dialect == "contrib":
        problem = "TensorRT knows no operator of the dialect contrib"
    elif manifest.opset == OPSET24 and not opset24:
        problem = (
            f"{name} does not support the dialect {manifest.dialect}, which needs 10.15 or later"
        )
    elif manifest.dialect == "opset24" and manifest.precision in BITS:
        raise FormError(
            "TensorRT takes quantised weights only in the form of the dialect tensorrt: export the "
            f"model with --dialect tensorrt --precision {manifest.precision}"
        )
    else:
        return
    precision = manifest.precision if manifest.precision in FLOATS else "fp16"
    advice = f"--dialect opset17 --precision {precision}"
    if manifest.precision in BITS and opset24:
        advice += f", or --dialect tensorrt --precision {manifest.precision}"
    raise FormError(f"{problem}: export the model with {advice}")
