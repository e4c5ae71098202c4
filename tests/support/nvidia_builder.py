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

# NVIDIA publishes the builder for few machines, so it is an extra; CI installs it
needs_builder = pytest.mark.skipif(find_spec(MODULE) is None, reason=MISSING)


def install() -> None:
    """Make `import tensorrt` NVIDIA's builder, for the rest of this process."""
    sys.modules["tensorrt"] = import_module(MODULE)


def plan_of(artifact: Artifact, slots: int = SLOTS, *, head: bool = False) -> bytes:
    """Parse and build an artifact or its head as `pilotfish export engine` does; return the plan.

    The GPU's name only fills the key.
    """
    version = import_module("tensorrt").__version__
    request = EngineRequest(version, Gpu("RTX", "8.9"), artifact, slots, CONTEXT, head)
    plan, _ = build(request, b"", None, threading.Event())
    return plan
