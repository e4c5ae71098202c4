"""Recognise this machine's board by the files of the kernel; no program is run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pilotfish.boards.board import ALL_BOARDS, BOARDS, Board

COMPATIBLE = Path("proc/device-tree/compatible")
NVIDIA_CARDS = Path("proc/driver/nvidia/gpus")


def recognise(root: Path = Path("/")) -> Board | None:
    """Return the board of the machine whose files lie below `root`; None: not known.

    A Jetson is known by the module in its device tree's `compatible`, since its `model` is a text
    of the carrier's maker that may name another module. A machine with a card of NVIDIA is "rtx",
    whatever the card is; a machine that is known to have no GPU is "cpu".
    """
    entries = compatible_entries(root)
    for board in ALL_BOARDS.values():
        if entries & set(board.tree):
            return board
    if any(entry.startswith("nvidia,tegra") for entry in entries):
        return None  # a Jetson that is not in boards.toml
    if _has_entries(root / NVIDIA_CARDS):
        return BOARDS["rtx"]
    has_nodes = any((root / "dev").glob("nvidia[0-9]*"))
    return None if has_nodes or not (root / "proc").is_dir() else BOARDS["cpu"]


def compatible_entries(root: Path = Path("/")) -> set[str]:
    """Return the entries of the device tree's `compatible`; empty without a device tree."""
    text = ""
    with suppress(OSError):
        text = (root / COMPATIBLE).read_bytes().decode("ascii", "replace")
    # "nvidia,p3768-0000+p3767-0003-super" names a carrier, and the module after the plus
    return {entry.strip() for entry in text.replace("\n", "\0").split("\0") if entry.strip()}


def _has_entries(folder: Path) -> bool:
    with suppress(OSError):
        return any(folder.iterdir())
    return False
