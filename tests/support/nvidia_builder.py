"""NVIDIA's own parser and builder, which need no GPU: TensorRT for RTX.

The extra `tensorrt-rtx` installs it. Its engines are for GPUs of compute capability 8.0, 8.6, 8.9
and from 12.0 on; a Jetson's TensorRT is another build of the same code. Nothing here runs a model.
"""

import threading
from importlib.util import find_spec

import pytest

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.cudart import Gpu
from pilotfish.engines.tensorrt.build import EngineRequest, build
from pilotfish.engines.tensorrt.edition import RTX
from pilotfish.engines.tensorrt.targets import USUAL

MODULE = "tensorrt_rtx_bindings"
MISSING = "needs the extra `tensorrt-rtx`"
SLOTS, CONTEXT = 2, 64

# NVIDIA publishes the builder for few machines, so it is an extra; CI installs it
needs_builder = pytest.mark.skipif(find_spec(MODULE) is None, reason=MISSING)


def plan_of(artifact: Artifact, slots: int = SLOTS, *, head: bool = False) -> bytes:
    """Parse and build an artifact or its head as `export engine` does; return the plan."""
    gpu = Gpu("", USUAL)
    request = EngineRequest(RTX.version(), gpu, artifact, slots, CONTEXT, head, RTX)
    plan, _ = build(request, b"", None, threading.Event())
    return plan
