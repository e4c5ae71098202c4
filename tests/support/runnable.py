"""Find the dialects that the installed onnxruntime can run."""

import pytest

from pilotfish.engines.runtime import runtime_version
from pilotfish.export.dialects import DIALECTS, OPSET24_SINCE


def runnable():
    """List the dialects that this onnxruntime runs."""
    return [name for name in DIALECTS if name != "opset24" or runtime_version() >= OPSET24_SINCE]


def needs(dialect):
    """Skip the test where the dialect cannot run."""
    if dialect not in runnable():
        pytest.skip(f"this onnxruntime does not run {dialect}")
