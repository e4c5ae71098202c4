"""The edge's package on a board of arm64: installed by dpkg, and an edge for this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest

from pilotfish import Device
from tests.conftest import Pair
from tests.deploy.arm64.board import Board
from tests.deploy.arm64.conftest import Prepared
from tests.deploy.arm64.test_device import OTHERS, SAME_TEXT, text_of

pytestmark = pytest.mark.slow
HOME = "usr/lib/pilotfish-edge"
TARGET = "var/lib/pilotfish/target"


@pytest.fixture(scope="module")
def edge_board(fresh: Callable[[], Board], prepared: Prepared) -> Board:
    """A board on which the package was installed; systemd does not run there."""
    board = fresh()
    shutil.copy(prepared.package, board.root / "root")
    board.run("dpkg", "--install", f"/root/{prepared.package.name}")
    return board


def test_package_is_configured(edge_board: Board) -> None:
    status = edge_board.run("dpkg", "--status", "pilotfish-edge")
    assert "Status: install ok installed" in status
    assert "Architecture: arm64" in status
    assert edge_board.run("dpkg", "--verify", "pilotfish-edge") == ""
    assert edge_board.run("pilotfish", "--version").startswith("pilotfish ")


def test_postinst_makes_user_folders_keys_and_bytecode(edge_board: Board) -> None:
    assert edge_board.run("id", "--name", "--user", "pilotfish") == "pilotfish"
    keys = edge_board.root / "etc/pilotfish/keys"
    assert (keys / "edge.key").stat().st_mode & 0o777 in (0o600, 0o640)
    assert (keys / "edge.pub").exists()
    assert (edge_board.root / TARGET).parent.is_dir()
    site = edge_board.root / HOME / "site"
    assert [*(site / "pilotfish/base/__pycache__").glob("errors.*.pyc")]
    wanted = "multi-user.target.wants/pilotfish-edge.service"
    assert (edge_board.root / "etc/systemd/system" / wanted).is_symlink()


@pytest.fixture(scope="module")
def far_edge(edge_board: Board, prepared: Prepared, pair: Pair) -> Iterator[str]:
    """The address of the edge that runs on the board with this machine's device let in."""
    for path in ("edge.key", "edge.pub", "allowed/board.pub"):
        shutil.copy(prepared.edge_keys / path, edge_board.root / "etc/pilotfish/keys" / path)
    edge_board.run("systemd-tmpfiles", "--create", "pilotfish-edge.conf")
    shutil.copytree(pair.target, edge_board.root / TARGET)
    settings = edge_board.root / "etc/pilotfish/edge.toml"
    text = settings.read_text().replace("tcp://127.0.0.1:7077", "tcp://127.0.0.1:0", 1)
    settings.write_text(text + "threads = 1\n")
    with edge_board.serving("pilotfish-edge.service", "the edge serves on ") as endpoint:
        yield endpoint


def test_device_of_this_machine_is_answered(
    edge_board: Board, far_edge: str, pair: Pair, prepared: Prepared, near_device: Device
) -> None:
    with Device(pair.draft, far_edge, prepared.device_keys, threads=1) as device:
        for protocol, temperature in SAME_TEXT.items():
            text = text_of(device, protocol, temperature)
            assert text == text_of(device, "stream", temperature), protocol
            # their targets could part where two tokens are equal but for rounding: not this pair's
            assert text == text_of(near_device, protocol, temperature), protocol
        for protocol, temperature in OTHERS.items():
            assert text_of(device, protocol, temperature), protocol
    assert "Traceback" not in edge_board.log.read_text()


def test_package_is_removed_without_a_trace(edge_board: Board) -> None:
    edge_board.run("dpkg", "--purge", "pilotfish-edge")
    left = [path for path in (HOME, "etc/pilotfish", "usr/bin/pilotfish", "var/lib/pilotfish")
            if (edge_board.root / path).exists()]  # fmt: skip
    assert left == []
