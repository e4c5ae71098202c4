"""Detection of this machine's NVIDIA GPUs by their device nodes, without any library."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger("pilotfish.engines")

_DEV = Path("/dev")
# Patterns of device nodes in /dev: discrete cards and Jetson Thor; Jetson Orin; Jetson Xavier.
_NODES = ("nvidia[0-9]*", "nvgpu/igpu[0-9]*", "nvhost-gpu")


def gpu_nodes(dev: Path | None = None) -> list[Path]:
    """List the device nodes of GPUs in `dev` (/dev); several nodes may belong to one GPU."""
    folder = _DEV if dev is None else dev
    return [node for pattern in _NODES for node in sorted(folder.glob(pattern))]


def warn_of_idle_gpu(reasons: str) -> None:
    """Warn that a model runs on the CPU although there is a GPU; `reasons` is text for the log."""
    if nodes := gpu_nodes():
        log.warning(
            "the model runs on the CPU, although this machine has a GPU (%s): %s. docs/engines.md "
            "explains how to use the GPU; --provider cpu silences this warning",
            nodes[0], reasons,
        )  # fmt: skip
