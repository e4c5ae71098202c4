"""The compute capabilities that TensorRT for RTX builds for, without a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pilotfish.engines.engine_errors import BuildError

# The builder's own choice where no target is set: Ampere, Ada, Blackwell and later.
USUAL = "8.0,8.6,8.9,12.0+"
# What to use for compute capabilities that TensorRT for RTX has no target for.
_JETSON = (
    "build on the {} itself, with JetPack's TensorRT: pilotfish export engine, without --provider"
)
_CUDA = "on {}, use --provider cuda, which needs no engine"
INSTEAD = {
    "7.2": _JETSON.format("Jetson Xavier"),
    "8.7": _JETSON.format("Jetson Orin"),
    "11.0": _JETSON.format("Jetson Thor"),
    "7.0": _CUDA.format("a V100"),
    "9.0": _CUDA.format("an H100 or H200"),
    "10.0": _CUDA.format("a B200"),
    "10.3": _CUDA.format("a B300"),
    "12.0+": "leave --compute out, for an engine that runs on 12.0 and later",
}


def known_targets(trt: Any) -> dict[str, Any]:
    """Return the library's targets by compute capability, such as "8.9"."""
    members = trt.ComputeCapability.__members__.items()
    matches = ((re.fullmatch(r"SM(\d+)(\d)", name), value) for name, value in members)
    return {f"{match[1]}.{match[2]}": value for match, value in matches if match}


def check_targets(trt: Any, wanted: Sequence[str]) -> str:
    """Check compute capabilities that a user named; return them as `EngineKey.compute` has them.

    Raises:
        BuildError: if the library has no such target; the message says what to use instead.
    """
    known = known_targets(trt)
    wanted = [each.strip() for each in wanted]
    if ",".join(wanted) == USUAL:
        return USUAL
    for each in wanted:
        if each not in known:
            advice = INSTEAD.get(each, f"choose from {', '.join(known)}")
            raise BuildError(
                f"TensorRT for RTX builds no engines for compute capability {each or repr(each)}: "
                f"{advice}"
            )
    return ",".join(each for each in known if each in wanted)


def set_targets(trt: Any, config: Any, compute: str) -> None:
    """Make a build produce an engine for these compute capabilities; USUAL is the default.

    Raises:
        BuildError: if the library has no such target.
    """
    if compute == USUAL:
        return
    wanted = check_targets(trt, compute.split(",")).split(",")
    config.num_compute_capabilities = len(wanted)
    for index, each in enumerate(wanted):
        if not config.set_compute_capability(known_targets(trt)[each], index):
            raise BuildError(f"TensorRT for RTX refuses the compute capability {each}")
