"""A process that takes the files below a folder for this machine's: GPUs, device tree, memory.

A GPU is only simulated as a device node, which no library can use: what the process says is real,
but nothing runs on such a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

NODES = {
    "a card": ["nvidia0", "nvidiactl", "nvidia-uvm"],
    "Orin": ["nvgpu/igpu0/as", "nvmap", "nvhost-ctrl"],
    "Xavier": ["nvhost-gpu", "nvhost-ctrl-gpu", "nvmap"],
    "Thor": ["nvidia0", "nvidiactl", "nvmap"],
}
ORIN_NANO = "nvidia,p3768-0000+p3767-0005\0nvidia,p3767-0005\0nvidia,tegra234\0"
# Python runs this file at its start, before pilotfish.
_SITE = """\
from pathlib import Path
from pilotfish.boards import start
from pilotfish.engines import gpus
start._ROOT = Path({root!r})
gpus._DEV = Path({root!r}) / "dev"
"""


def make_nodes(root: Path, nodes: Iterable[str]) -> Path:
    """Make empty files in place of these device nodes; returns their folder."""
    for node in nodes:
        path = root / "dev" / node
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root / "dev"


def machine(
    root: Path, nodes: Iterable[str] = (), *, tree: str = "", memory_kib: int | None = None
) -> dict[str, str]:
    """Make a machine's files; returns the environment of a process that believes them.

    tree: the device tree's `compatible`. memory_kib: what its kernel reports.
    """
    make_nodes(root, nodes)
    (root / "proc/device-tree").mkdir(parents=True)
    if tree:
        (root / "proc/device-tree/compatible").write_text(tree)
    if memory_kib is not None:
        (root / "proc/meminfo").write_text(f"MemTotal:       {memory_kib} kB\n")
    site = root / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE.format(root=str(root)))
    before = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{site}:{Path(__file__).parents[2]}:{before}".rstrip(":")}
