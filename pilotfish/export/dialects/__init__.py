"""Dialects: sets of operators that a runtime supports.

To add a dialect, add a file and a line here.
"""

from __future__ import annotations

from pilotfish.engines.manifest import Precision
from pilotfish.engines.runtime import OPSET24_SINCE
from pilotfish.export.dialects.contrib import Contrib
from pilotfish.export.dialects.dialect import Dialect
from pilotfish.export.dialects.opset17 import Opset17
from pilotfish.export.dialects.opset24 import Opset24
from pilotfish.export.dialects.tensorrt import TensorRT
from pilotfish.export.export_errors import ExportError

__all__ = ["DIALECTS", "Dialect", "choose_dialect"]

DIALECTS: dict[str, type[Dialect]] = {
    dialect.name: dialect for dialect in (Opset24, Opset17, Contrib, TensorRT)
}


def choose_dialect(name: str, precision: Precision, runtime: tuple[int, ...]) -> type[Dialect]:
    """Return the named dialect, or choose one for this precision and ONNX Runtime version.

    "auto" chooses contrib for quantised models: they are mostly drafters, and contrib is the
    fastest dialect for a single slot. Other models are mostly targets, which run several slots at
    once.

    Raises:
        ExportError: if the name is unknown, or the dialect cannot express the precision.
    """
    if name == "auto":
        if precision in Contrib.precisions and precision != "fp32":
            name = "contrib"
        else:
            name = "opset24" if runtime >= OPSET24_SINCE else "opset17"
    if name not in DIALECTS:
        raise ExportError(f"unknown dialect {name!r}: choose auto, {', '.join(DIALECTS)}")
    dialect = DIALECTS[name]
    if precision not in dialect.precisions:
        able = [other.name for other in DIALECTS.values() if precision in other.precisions]
        raise ExportError(
            f"{name} cannot express {precision}: choose --dialect {' or '.join(able)}, "
            f"or --precision {' or '.join(dialect.precisions)}"
        )
    return dialect
