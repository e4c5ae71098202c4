"""The installed TensorRT, and the differences between its versions 8.6 to 11.

Versions are recognised by their features, not by their number:

    8.6     networks need EXPLICIT_BATCH; fp16 needs a flag; integers are 32 bits wide
    10      STRONGLY_TYPED (types come from the graph) and IProgressMonitor are new
    10.15   the parser knows the operators of opset 24; get_aliased_input_tensor is new
    11      EXPLICIT_BATCH and the flag FP16 are gone

Each function imports TensorRT when it needs it: the package is large, and mostly not installed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pilotfish.base.extras import install_command
from pilotfish.engines.engine_errors import BuildError, ProviderError
from pilotfish.engines.manifest import GENAI, LLAMACPP, OPSET24, Manifest

if TYPE_CHECKING:
    import tensorrt as trt

log = logging.getLogger("pilotfish.tensorrt")
_loggers: dict[type[trt.ILogger], trt.ILogger] = {}

# Operators of opset 24, in the dialects opset24 and tensorrt, that older parsers lack.
OPSET24_OPERATORS = ("TensorScatter", "RMSNormalization", "RotaryEmbedding")
FLOATS = ("fp32", "fp16")
BITS = ("int8", "int4", "stored")  # precisions with quantised weights
JETSON = Path("/etc/nv_tegra_release")


def tensorrt_version() -> str:
    """Return the version of the installed TensorRT.

    Raises:
        ProviderError: if it is not installed; the message says how to install it.
    """
    try:
        import tensorrt as trt
    except ImportError as error:
        source = (
            "it comes with JetPack: sudo apt install python3-libnvinfer (for the system's Python)"
            if JETSON.exists()
            else f"{install_command('tensorrt')} and NVIDIA's driver; on a Jetson: sudo "
            "apt install python3-libnvinfer"
        )
        raise ProviderError(f"TensorRT cannot be imported ({error}): {source}") from None
    version: str = trt.__version__
    return version


def logger() -> trt.ILogger:
    """Return a logger that writes TensorRT's messages to our log, with errors as warnings.

    Callers decide how severe an error is. The result is always the same object: TensorRT needs one
    logger for as long as any of its objects exists.
    """
    import tensorrt as trt

    if trt.ILogger not in _loggers:
        _loggers[trt.ILogger] = _new_logger()
    return _loggers[trt.ILogger]


def last_error() -> str:
    """Return the last error that TensorRT logged in this process; "" if there was none."""
    message: str = logger().last_error
    return message


def _new_logger() -> trt.ILogger:
    import tensorrt as trt

    class Log(trt.ILogger):  # type: ignore[misc]  # a class of a library that has no types
        last_error = ""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            if severity in {trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR}:
                self.last_error = msg
                log.warning("%s", msg)
            elif severity != trt.ILogger.VERBOSE:
                log.debug("%s", msg)

    return Log()


def is_strongly_typed() -> bool:
    """Whether networks can take their types from the graph."""
    import tensorrt as trt

    return hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")


def network_flags() -> int:
    """Return the flags for the creation of networks."""
    import tensorrt as trt

    flags = trt.NetworkDefinitionCreationFlag
    return 1 << int(flags.STRONGLY_TYPED if is_strongly_typed() else flags.EXPLICIT_BATCH)


def array_dtype(dtype: trt.DataType) -> np.dtype[Any]:
    """Return the numpy dtype of a TensorRT dtype."""
    import tensorrt as trt

    names = {"FLOAT": np.float32, "HALF": np.float16, "INT32": np.int32, "INT64": np.int64}
    for name, ours in names.items():
        if hasattr(trt.DataType, name) and dtype == getattr(trt.DataType, name):
            return np.dtype(ours)
    raise ProviderError(
        f"the engine has an input or output of type {dtype}, which none of our "
        "graphs has: build it again"
    )


def has_opset24(parser: trt.OnnxParser) -> bool:
    """Whether the parser knows the operators of opset 24 in our graphs."""
    return all(parser.supports_operator(name) for name in OPSET24_OPERATORS)


def check_form(manifest: Manifest, *, opset24: bool) -> None:
    """Check that TensorRT can read the artifact.

    Args:
        opset24: whether this TensorRT knows the operators of opset 24.

    Raises:
        BuildError: if not; the message names the dialect to export instead.
    """
    if manifest.states is not None:
        raise BuildError(
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
            f"TensorRT {tensorrt_version()} does not support the dialect {manifest.dialect}, which "
            "needs 10.15 or later"
        )
    elif manifest.dialect == "opset24" and manifest.precision in BITS:
        raise BuildError(
            "TensorRT takes quantised weights only in the form of the dialect tensorrt: export the "
            f"model with --dialect tensorrt --precision {manifest.precision}"
        )
    else:
        return
    precision = manifest.precision if manifest.precision in FLOATS else "fp16"
    advice = f"--dialect opset17 --precision {precision}"
    if manifest.precision in BITS and opset24:
        advice += f", or --dialect tensorrt --precision {manifest.precision}"
    raise BuildError(f"{problem}: export the model with {advice}")
