"""NVIDIA's own parser and builder, which need no GPU: TensorRT for RTX.

The extra `nvidia-builder` installs it. Its engines are for GPUs of compute capability 8.0, 8.6, 8.9
and from 12.0 on; a Jetson's TensorRT is another build of the same code. Nothing here runs a model.
"""

import sys
import threading
from importlib import import_module
from importlib.util import find_spec

import pytest

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.cudart import Gpu
from pilotfish.engines.tensorrt.build import EngineRequest, build

MODULE = "tensorrt_rtx_bindings"
MISSING = "needs the extra `nvidia-builder`"
SLOTS, CONTEXT = 2, 64

needs_builder = pytest.mark.skipif(find_spec(MODULE) is None, reason=MISSING)


def install() -> None:
    """Make `import tensorrt` NVIDIA's builder, for the rest of this process."""
    sys.modules["tensorrt"] = import_module(MODULE)


def request_for(artifact: Artifact, slots: int = SLOTS, context: int = CONTEXT) -> EngineRequest:
    """Make a request for an engine of the artifact; the GPU's name only fills the key."""
    version = import_module("tensorrt").__version__
    return EngineRequest(version, Gpu("RTX", "8.9"), artifact, slots, context)


def plan_of(artifact: Artifact, slots: int = SLOTS, context: int = CONTEXT) -> bytes:
    """Parse and build the artifact as `pilotfish export engine` does; return the plan."""
    plan, _ = build(request_for(artifact, slots, context), b"", None, threading.Event())
    return plan
