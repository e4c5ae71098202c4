"""Find the dialects and providers that the installed onnxruntime can run."""

from pathlib import Path

import onnxruntime
import pytest

from pilotfish.engines import gpus
from pilotfish.engines.manifest import OPSET24
from pilotfish.engines.runtime import OPSET24_SINCE, runtime_version
from pilotfish.export.dialects import DIALECTS

# With floats, the dialect tensorrt writes opset24's graphs.
DISTINCT = tuple(name for name in DIALECTS if name != "tensorrt")


def runnable():
    """List the dialects that this onnxruntime runs."""
    new = runtime_version() >= OPSET24_SINCE
    return [name for name, dialect in DIALECTS.items() if dialect.opset < OPSET24 or new]


def needs(dialect):
    """Skip the test where the dialect cannot run."""
    if dialect not in runnable():
        pytest.skip(f"this onnxruntime does not run {dialect}")


def hide_gpus(monkeypatch):
    """Leave onnxruntime the CPU alone, as where there is no GPU."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(gpus, "_DEV", Path("/no-devices"))
