"""One booted machine for all tests here: the device flashed, the edge from its package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pilotfish.deploy import deb
from pilotfish.wire import keys
from tests.conftest import Pair
from tests.deploy.booted import rootfs
from tests.deploy.booted.machine import Machine
from tests.support.bundles import release

DEVICE, EDGE = "pilotfish-device.service", "pilotfish-edge.service"
API_KEY = "test:0123456789abcdef"
ETC, STATE = Path("etc/pilotfish"), Path("var/lib/pilotfish")
_QUICK = "[Service]\nWatchdogSec=3\nRestartSec=0.2\n"


@dataclass(frozen=True)
class Prepared:
    """What is to be installed, and the file system of a fresh machine.

    keys: the device's folder, with edge.pub; edge_keys: the edge's, which allows that device.
    """

    archive: Path
    pair: Pair
    bundle: Path
    packages: tuple[Path, Path]
    keys: Path
    edge_keys: Path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test here waits until a rootfs is made; that has a limit of its own."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(rootfs.LIMIT_S + 300))


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tar file of a fresh rootfs; skips where no system can be booted, and tries once."""
    with possible("PILOTFISH_BOOTED", "be booted"):
        rootfs.tools()
        return rootfs.archive(cache(tmp_path_factory))


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, long_pair: Pair, archive: Path) -> Prepared:
    """Everything else that takes a network or much time."""
    folder = tmp_path_factory.mktemp("booted")
    edge_keys, device_keys = folder / "edge-keys", folder / "device-keys"
    public = keys.create(edge_keys, keys.EDGE)
    keys.allow(edge_keys, keys.create(device_keys, keys.DEVICE), "board")
    shutil.copy(public, device_keys)
    python = rootfs.python(archive)
    machine = os.uname().machine
    bundle = folder / "bundle"
    pilotfish(
        "bundle", "--artifact", long_pair.draft, "--edge", "tcp://127.0.0.1:7077",
        "--keys", device_keys, "--python", python, "--machine", machine, "--out", bundle,
        "--sign", release() / "signer.key",
    )  # fmt: skip
    first, second = (
        deb.build(folder / "dist", python, machine, revision, lambda *_: None, bundle / "wheels")
        for revision in ("1", "2")
    )
    return Prepared(archive, long_pair, bundle, (first, second), device_keys, edge_keys)


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory, prepared: Prepared) -> Iterator[Machine]:
    """A machine that runs both services, flashed before its first boot."""
    root = tmp_path_factory.mktemp("machine") / "root"
    rootfs.unpack(prepared.archive, root)
    pilotfish("flash", *signed(), "--rootfs", root, prepared.bundle)
    be_quick(root, DEVICE, EDGE)
    settings = root / ETC / "device.toml"
    settings.write_text(
        settings.read_text() + 'api-keys = "/etc/pilotfish/api-keys"\nthreads = 1\nlanes = 2\n'
    )
    (root / ETC / "api-keys").write_text(f"{API_KEY}\n")  # its owner and mode are set at boot
    machine = Machine(root)
    machine.boot()
    try:
        install_edge(machine, prepared)
        machine.run("systemctl", "start", DEVICE, EDGE)
        yield machine
    finally:
        machine.shut_down()


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory, archive: Path) -> Iterator[Machine]:
    """A machine on which nothing is installed."""
    folder = tmp_path_factory.mktemp("board")
    rootfs.unpack(archive, folder / "root")
    machine = Machine(folder / "root")
    machine.boot()
    try:
        yield machine
    finally:
        machine.shut_down()


@contextmanager
def possible(variable: str, what: str) -> Iterator[None]:
    """Skip what needs a system that is impossible here; fail if ``variable`` says "required"."""
    try:
        yield
    except rootfs.Impossible as reason:
        if os.environ.get(variable) == "required":
            pytest.fail(f"systems must {what} here, but {reason}")
        pytest.skip(f"no system can {what}: {reason}")


def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that keeps the rootfs of the tests."""
    value = os.environ.get("PILOTFISH_CACHE")
    return Path(value) / "tests" if value else tmp_path_factory.mktemp("rootfs")


def install_edge(machine: Machine, prepared: Prepared) -> None:
    """The edge's package, its keys and its target."""
    folder = machine.root / ETC / "keys"
    for path in ("edge.key", "edge.pub", "allowed/board.pub"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(prepared.edge_keys / path, folder / path)
    dpkg(machine, "--install", prepared.packages[0])
    place_target(machine, prepared)
    settings = machine.root / ETC / "edge.toml"
    settings.write_text(
        settings.read_text() + "threads = 1\ncontext = 8192\n" + 'metrics = "127.0.0.1:9464"\n'
    )


def allow_board(machine: Machine, prepared: Prepared, edge_public: Path) -> Path:
    """Let the board's key in on a machine whose edge has its own keys; the board's folder."""
    folder = machine.root.parent / "board"
    shutil.copytree(prepared.keys, folder)
    shutil.copy(edge_public, folder)
    shutil.copy(folder / "device.pub", machine.root / "root")
    machine.run("pilotfish", "keys", "allow", "/root/device.pub", "--keys", "/etc/pilotfish/keys")
    return folder


def place_target(machine: Machine, prepared: Prepared) -> None:
    """The target's artifact where the unit expects it."""
    shutil.copytree(prepared.pair.target, machine.root / STATE / "target")
    machine.run("chown", "-R", "pilotfish:", "/var/lib/pilotfish/target")


def dpkg(machine: Machine, action: str, *what: object) -> str:
    """Run dpkg inside; package files of this machine are carried over."""
    for path in what:
        if isinstance(path, Path):
            shutil.copy(path, machine.root / "root")
    names = [f"/root/{path.name}" if isinstance(path, Path) else path for path in what]
    return machine.run("dpkg", "--force-unsafe-io", action, *names)


def set_api_keys(machine: Machine, *lines: str) -> None:
    """Write the file of API keys anew; owner and mode stay."""
    (machine.root / ETC / "api-keys").write_text("\n".join(lines) + "\n")


def command(*arguments: object) -> list[str]:
    """`pilotfish` of this machine."""
    return [sys.executable, "-m", "pilotfish", *map(str, arguments)]


def signed() -> tuple[object, ...]:
    """The flags by which `pilotfish flash` trusts the signer of these tests."""
    return "--signers", release() / "signers"


def pilotfish(*arguments: object) -> str:
    """Run the command on this machine; what it said."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False)
    reply = done.stdout + done.stderr
    assert done.returncode == 0, f"{arguments} ended with {done.returncode}: {reply}"
    return reply


def be_quick(root: Path, *units: str) -> None:
    """Shorter waits than those that the units come with; a reboot keeps them."""
    for unit in units:
        folder = root / "etc/systemd/system" / f"{unit}.d"
        folder.mkdir(parents=True)
        (folder / "quick.conf").write_text(_QUICK)
