"""Find the dialects and providers that the installed onnxruntime can run."""

from pathlib import Path

import numpy as np
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


def same_up_to_a_gpus_rounding(got, wanted, rounding=1e-5):
    """Assert that logits are equal; where models run on a GPU, up to `rounding`.

    On a GPU, passes of other widths round otherwise.
    """
    on_gpu = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    np.testing.assert_allclose(got, wanted, rtol=0.0, atol=rounding if on_gpu else 0.0)


def hide_gpus(monkeypatch):
    """Leave onnxruntime the CPU alone, as where there is no GPU."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(gpus, "_DEV", Path("/no-devices"))
