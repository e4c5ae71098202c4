"""The boards' data, and the recognition of a board by its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pilotfish.base.errors import UnsupportedError
from pilotfish.boards.board import ALL_BOARDS, BOARDS, JETPACKS, Board, board_named, siblings
from pilotfish.boards.recognition import recognise
from tests.support.other_machine import make_nodes

AGX = "nvidia,p3737-0000+p3701-0000\0nvidia,p3701-0000\0nvidia,tegra234\0"
FIGURES = ("memory_bytes", "usable_bytes", "bandwidth_bytes_per_s", "slower_bytes_per_s")


@pytest.mark.parametrize("board", ALL_BOARDS.values(), ids=ALL_BOARDS)
def test_every_figure_has_its_source(board: Board) -> None:
    stated = [name for name in (*FIGURES, "compute", "tree") if getattr(board, name)]
    assert all(board.sources[name].startswith("https://") for name in stated), board


def test_the_names_are_those_of_the_flag() -> None:
    assert list(BOARDS) == ["orin-nano", "orin-nx", "agx-orin", "thor", "rtx", "cpu"]
    names = [name for board in ALL_BOARDS.values() for name in (board.name, *board.aliases)]
    assert len(names) == len(set(names))
    assert board_named("orin-nano-8gb") is BOARDS["orin-nano"]
    assert [board.name for board in siblings(BOARDS["orin-nano"])] == ["orin-nano-4gb"]


def test_an_unknown_board_is_refused_with_all_names() -> None:
    with pytest.raises(UnsupportedError, match="choose orin-nano, orin-nano-4gb, orin-nx"):
        board_named("xavier")


def test_a_board_only_has_jetpacks_that_are_known() -> None:
    for board in ALL_BOARDS.values():
        assert set(board.jetpacks) <= set(JETPACKS)


@pytest.mark.parametrize(
    ("compatible", "name"),
    [
        ("nvidia,p3768-0000+p3767-0005-super\0nvidia,p3767-0005\0nvidia,tegra234\0", "orin-nano"),
        ("nvidia,p3768-0000+p3767-0004\0nvidia,p3767-0004\0nvidia,tegra234\0", "orin-nano-4gb"),
        ("nvidia,p3768-0000+p3767-0001\0nvidia,p3767-0001\0nvidia,tegra234\0", "orin-nx-8gb"),
        ("nvidia,p2972-0000\0nvidia,tegra194\0", None),
    ],
)
def test_a_jetson_is_known_by_its_module(tmp_path: Path, compatible: str, name: str | None) -> None:
    tree = tmp_path / "proc/device-tree"
    tree.mkdir(parents=True)
    (tree / "compatible").write_text(compatible)
    board = recognise(tmp_path)
    assert (board and board.name) == name


@pytest.mark.parametrize(
    ("compatible", "memory_kb", "name"),
    [
        (AGX, 64352872, "agx-orin"),
        (AGX, 31 << 20, "agx-orin-32gb"),
        ("nvidia,p4071-0000+p3834-0008\0nvidia,p3834-0008\0nvidia,tegra264\0", 1 << 20, "thor"),
        (
            "nvidia,p4071-0000+p3834-0005\0nvidia,p3834-0005\0nvidia,tegra264\0",
            60 << 20,
            "thor-t4000",
        ),
        (AGX, None, None),
    ],
)
def test_the_memory_tells_modules_of_one_family_apart(
    tmp_path: Path, compatible: str, memory_kb: int | None, name: str | None
) -> None:
    tree = tmp_path / "proc/device-tree"
    tree.mkdir(parents=True)
    (tree / "compatible").write_text(compatible)
    if memory_kb is not None:
        (tmp_path / "proc/meminfo").write_text(f"MemTotal:       {memory_kb} kB\nMemFree: 1 kB\n")
    board = recognise(tmp_path)
    assert (board and board.name) == name


def test_a_card_and_no_card_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    assert recognise(tmp_path) is BOARDS["cpu"]
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert recognise(tmp_path) is BOARDS["rtx"]
    assert recognise(tmp_path / "nothing") is None


@pytest.mark.parametrize("node", ["nvgpu/igpu0/as", "nvhost-gpu", "nvidia0"])
def test_a_gpu_without_a_device_tree_is_no_machine_without_a_gpu(tmp_path: Path, node: str) -> None:
    (tmp_path / "proc").mkdir()
    make_nodes(tmp_path, [node])
    assert recognise(tmp_path) is None


def test_the_document_has_every_board_and_jetpack() -> None:
    text = (Path(__file__).parents[2] / "docs/jetson.md").read_text("utf-8")
    assert [name for name in ALL_BOARDS if f"`{name}`" not in text] == []
    for jetpack in JETPACKS.values():
        assert f"JetPack {jetpack.version}" in text
        assert f"{jetpack.cuda}, {jetpack.tensorrt}" in text
