"""Two boards of arm64 for all tests here: one flashed as a device, one with the edge's package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.wire import keys
from tests.conftest import Pair
from tests.deploy.arm64.board import Board
from tests.deploy.arm64.emulated import Emulation
from tests.deploy.booted import rootfs
from tests.deploy.booted.conftest import cache, pilotfish, possible, signed
from tests.support.bundles import release

MACHINE = "aarch64"
PACKAGES = ("systemd", "python3", "procps")
TOOLS = {"debootstrap": "debootstrap", "dpkg-deb": "dpkg"}


@dataclass(frozen=True)
class Prepared:
    """What is to be installed.

    python: the boards' version. device_keys: with edge.pub; edge_keys: allows that device.
    """

    python: str
    bundle: Path
    package: Path
    device_keys: Path
    edge_keys: Path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test here waits until a rootfs is made; that has a limit of its own."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(2 * rootfs.LIMIT_S + 300))


@pytest.fixture(scope="session")
def emulation() -> Iterator[Emulation]:
    """Namespaces in which programs of arm64 run; skips where there are none."""
    emulation = Emulation()
    try:
        with possible("PILOTFISH_ARM64", "run programs of arm64"):
            rootfs.tools(TOOLS)
            emulation.begin()
        yield emulation
    finally:
        emulation.end()


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory, emulation: Emulation) -> Path:
    """The tar file of a fresh rootfs of arm64."""
    foreign = rootfs.Foreign("arm64", emulation.words)
    with possible("PILOTFISH_ARM64", "be made of arm64's packages"):
        return rootfs.archive(cache(tmp_path_factory), PACKAGES, foreign)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, pair: Pair, archive: Path) -> Prepared:
    """Bundle and package, made on this machine as a user would."""
    folder = tmp_path_factory.mktemp("arm64")
    edge_keys, device_keys = folder / "edge-keys", folder / "device-keys"
    public = keys.create(edge_keys, keys.EDGE)
    keys.allow(edge_keys, keys.create(device_keys, keys.DEVICE), "board")
    shutil.copy(public, device_keys)
    python = rootfs.python(archive)
    bundle = folder / "bundle"
    pilotfish(
        "bundle", "--artifact", pair.draft, "--edge", "tcp://127.0.0.1:7077",
        "--keys", device_keys, "--python", python, "--machine", MACHINE, "--out", bundle,
        "--sign", release() / "signer.key",
    )  # fmt: skip
    command = (sys.executable, "-m", "pilotfish.deploy.deb", "--out", folder, "--python", python,
               "--machine", MACHINE, "--wheels", bundle / "wheels")  # fmt: skip
    made = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return Prepared(python, bundle, Path(made.stdout.strip()), device_keys, edge_keys)


@pytest.fixture(scope="session")
def fresh(
    tmp_path_factory: pytest.TempPathFactory, archive: Path, emulation: Emulation
) -> Iterator[Callable[[], Board]]:
    """A function that makes a board on which nothing is installed."""
    roots = []

    def make() -> Board:
        roots.append(tmp_path_factory.mktemp("board") / "root")
        rootfs.unpack(archive, roots[-1])
        return Board(roots[-1], emulation)

    yield make
    for root in roots:
        shutil.rmtree(root)  # 0.6 GB; what is mounted there is so for the emulation alone


@pytest.fixture(scope="session")
def device_board(fresh: Callable[[], Board], prepared: Prepared) -> Board:
    """A board that was flashed from this machine, with what systemd does there at a boot."""
    board = fresh()
    pilotfish("flash", *signed(), "--rootfs", board.root, prepared.bundle)
    for tool in (("systemd-sysusers",), ("systemd-tmpfiles", "--create")):
        board.run(*tool, "pilotfish.conf")
    return board


@pytest.fixture(scope="session")
def near_edge(pair: Pair, prepared: Prepared) -> Iterator[EdgeServer]:
    """An edge on this machine that lets the board in."""
    with EdgeServer(pair.target, keys=prepared.edge_keys, threads=1) as server:
        yield server


@pytest.fixture(scope="session")
def near_device(pair: Pair, prepared: Prepared, near_edge: EdgeServer) -> Iterator[Device]:
    """A device on this machine, with the board's keys."""
    with Device(pair.draft, near_edge.endpoint, prepared.device_keys, threads=1) as opened:
        yield opened
