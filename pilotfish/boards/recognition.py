"""Recognise this machine's board by the files of the kernel; no program is run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pilotfish.base.memory import reported_bytes
from pilotfish.boards.board import ALL_BOARDS, BOARDS, Board
from pilotfish.engines.gpus import gpu_nodes

COMPATIBLE = Path("proc/device-tree/compatible")
NVIDIA_CARDS = Path("proc/driver/nvidia/gpus")
TEGRA = "nvidia,tegra"  # beginning of the entry for the chip of every Jetson


def recognise(root: Path = Path("/")) -> Board | None:
    """Return the board of the machine whose files lie below `root`; None: not known.

    A Jetson is known by the module in its device tree's `compatible`. The tree's `model` is a text
    of the carrier's maker, and may name another module. A machine with a card of NVIDIA is "rtx",
    whichever card it is; a machine without a GPU is "cpu". A container with the nodes of a Jetson's
    GPU, but without the device tree, is not known.
    """
    entries = compatible_entries(root)
    for board in ALL_BOARDS.values():
        if entries & set(board.tree):
            return board
    if family := [board for board in ALL_BOARDS.values() if _is_of_family(board, entries)]:
        return _by_memory(family, reported_bytes(root))
    if any(entry.startswith(TEGRA) for entry in entries):
        return None  # a Jetson that is not in boards.toml
    if _has_entries(root / NVIDIA_CARDS):
        return BOARDS["rtx"]
    is_unknown = gpu_nodes(root / "dev") or not (root / "proc").is_dir()
    return None if is_unknown else BOARDS["cpu"]


def compatible_entries(root: Path = Path("/")) -> set[str]:
    """Return the entries of the device tree's `compatible`; empty without a device tree."""
    text = ""
    with suppress(OSError):
        text = (root / COMPATIBLE).read_bytes().decode("ascii", "replace")
    return {entry.strip() for entry in text.replace("\n", "\0").split("\0") if entry.strip()}


def _is_of_family(board: Board, entries: set[str]) -> bool:
    return bool(board.prefixes) and any(entry.startswith(board.prefixes) for entry in entries)


def _by_memory(family: list[Board], memory: int | None) -> Board | None:
    """Return the board with the least memory that is not less than what Linux shows."""
    if memory is None:
        return None
    enough = [each for each in family if each.memory_bytes and each.memory_bytes >= memory]
    return min(enough, key=lambda each: each.memory_bytes or 0, default=None)


def _has_entries(folder: Path) -> bool:
    with suppress(OSError):
        return any(folder.iterdir())
    return False
