"""NVIDIA's GPUs of this machine, as their device nodes tell: no library is needed to see them."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger("pilotfish.engines")

_DEV = Path("/dev")
# cards, and Thor; Orin; Xavier
_NODES = ("nvidia[0-9]*", "nvgpu/igpu[0-9]*", "nvhost-gpu")


def gpu_nodes(dev: Path | None = None) -> list[Path]:
    """List the device nodes of GPUs; each may belong to the same one. dev: /dev."""
    folder = _DEV if dev is None else dev
    return [node for pattern in _NODES for node in sorted(folder.glob(pattern))]


def warn_of_idle_gpu(reasons: str) -> None:
    """Warn that a model runs on the CPU though there is a GPU. reasons: why, for people."""
    if nodes := gpu_nodes():
        log.warning(
            "the model runs on the CPU, though this machine has a GPU (%s): %s. docs/engines.md "
            "says how it is used; --provider cpu is content with the CPU",
            nodes[0], reasons,
        )  # fmt: skip
