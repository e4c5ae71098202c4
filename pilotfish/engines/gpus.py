"""Detection of this machine's NVIDIA GPUs by their device nodes, without any library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_DEV = Path("/dev")
# Patterns of device nodes in /dev: Jetson Orin; Jetson Xavier.
_TEGRA_NODES = ("nvgpu/igpu[0-9]*", "nvhost-gpu")
# The same with discrete cards and Jetson Thor.
_NODES = ("nvidia[0-9]*", *_TEGRA_NODES)


class IdleGpu(NamedTuple):
    """A GPU of this machine that a model does not use, although nobody chose the CPU.

    node: the GPU's device node. reasons: for each provider that can use the GPU, why it does not,
    such as "cuda: onnxruntime was built without this provider".
    """

    node: Path
    reasons: tuple[str, ...]

    @property
    def of_jetson(self) -> bool:
        """Whether the node is one that only Jetsons have; Thor's is that of a card."""
        return any(self.node.match(pattern) for pattern in _TEGRA_NODES)


def gpu_nodes(dev: Path | None = None) -> list[Path]:
    """List the device nodes of GPUs in `dev` (/dev); several nodes may belong to one GPU."""
    folder = _DEV if dev is None else dev
    return [node for pattern in _NODES for node in sorted(folder.glob(pattern))]


def find_idle_gpu(reasons: Sequence[str]) -> IdleGpu | None:
    """Describe the GPU that a model on the CPU leaves idle; None if this machine has none."""
    nodes = gpu_nodes()
    return IdleGpu(nodes[0], tuple(reasons)) if nodes else None
