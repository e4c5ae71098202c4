"""The edge's package on a machine of its own: installed, upgraded, removed, purged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pilotfish import Device
from tests.deploy.booted import rootfs
from tests.deploy.booted.conftest import (
    EDGE,
    ETC,
    STATE,
    Prepared,
    allow_board,
    be_quick,
    dpkg,
    place_target,
)
from tests.deploy.booted.machine import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ADDRESS = "tcp://127.0.0.1:7077"
UNCHANGED = ("usr", "etc", "opt", "var/lib/pilotfish", "var/cache/pilotfish")


@pytest.fixture
def bare(tmp_path_factory: pytest.TempPathFactory, prepared: Prepared) -> Iterator[Machine]:
    """A machine that never heard of pilotfish."""
    machine = Machine(tmp_path_factory.mktemp("bare") / "root")
    rootfs.unpack(prepared.archive, machine.root)
    machine.boot()
    try:
        yield machine
    finally:
        machine.shut_down()


def test_package_installs_upgrades_and_purges(bare: Machine, prepared: Prepared) -> None:
    before = _files(bare)
    be_quick(bare.root, EDGE)
    first, second = prepared.packages

    # Without a target there is nothing to serve, and nothing fails or loops.
    dpkg(bare, "--install", first)
    assert bare.show(EDGE, "ConditionResult") == "no"
    assert bare.show(EDGE, "ActiveState") == "inactive"
    assert bare.show(EDGE, "UnitFileState") == "enabled"
    assert bare.run("pilotfish", "--version")
    units = (EDGE, "pilotfish-edge.socket", "pilotfish-worker.service")
    assert bare.run("systemd-analyze", "verify", *units) == ""
    assert bare.show("pilotfish-worker.service", "UnitFileState") == "disabled"

    public = bare.root / ETC / "keys/edge.pub"
    assert public.exists()
    device_keys = allow_board(bare, prepared, public)
    place_target(bare, prepared)
    bare.run("systemctl", "start", EDGE)
    assert bare.show(EDGE, "ActiveState") == "active"

    # An upgrade restarts it; what a device has begun goes on, what a person wrote stays.
    settings = bare.root / ETC / "edge.toml"
    settings.write_text(settings.read_text() + "# mine\n")
    old = bare.show(EDGE, "MainPID")

    def generate(upgrade: bool) -> str:
        text = ""
        with Device(
            prepared.pair.draft, ADDRESS, device_keys, threads=1, on_link_loss="wait"
        ) as device:
            for count, piece in enumerate(
                device.stream("abc", protocol="greedy", seed=3, max_tokens=600)
            ):
                text += piece.text
                if upgrade and count == 10:
                    dpkg(bare, "--install", second)
            assert device.last is not None
            assert len(device.last.recoveries) == upgrade
        return text

    assert bare.on_network(lambda: generate(True)) == bare.on_network(lambda: generate(False))
    assert bare.show(EDGE, "MainPID") != old
    assert bare.show(EDGE, "ActiveState") == "active"
    assert settings.read_text().endswith("# mine\n")
    assert "Version: " + second.name.split("_")[1] in dpkg(bare, "--status", "pilotfish-edge")

    dpkg(bare, "--remove", "pilotfish-edge")
    assert bare.show(EDGE, "ActiveState") == "inactive"
    assert settings.exists()
    assert (bare.root / ETC / "keys/edge.key").exists()
    assert not (bare.root / "usr/lib/pilotfish-edge").exists()

    dpkg(bare, "--purge", "pilotfish-edge")
    left = _files(bare) - before
    assert left <= {"etc/passwd-", "etc/group-", "etc/shadow-", "etc/gshadow-"}, left
    assert not (bare.root / STATE).exists()


def _files(machine: Machine) -> set[str]:
    """Every path of the parts that a package may touch."""
    return {
        str(path.relative_to(machine.root))
        for part in UNCHANGED
        for path in (machine.root / part).rglob("*")
        if "quick.conf" not in path.name and not path.name.endswith(".service.d")
    }
