"""What a booted device says while its edge refuses it: health, status line, status and journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from pilotfish.wire import keys
from tests.deploy.booted.asking import complete, get
from tests.deploy.booted.conftest import DEVICE, EDGE, ETC
from tests.deploy.booted.machine import Machine
from tests.deploy.booted.test_services import reload_fails

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def says(machine: Machine, state: str) -> bool:
    """Whether all places say this state."""
    health, link = machine.on_network(lambda: (get("/health"), get("/status").json()["link"]))
    well = state == "connected"
    return (
        health.status_code == (200 if well else 503)
        and health.json()["status"] == ("ok" if well else state)
        and link["state"] == state
        and f": {state}" in machine.show(DEVICE, "StatusText")
        and (well or f"{state}: The edge at" in machine.journal(DEVICE))
    )


def until(machine: Machine, state: str) -> None:
    machine.until(lambda: says(machine, state), f"all say {state!r}")


def test_a_revoked_key_shows_and_is_over_with_the_next_request(machine: Machine) -> None:
    allowed = machine.root / ETC / "keys/allowed/board.pub"
    key = allowed.read_bytes()
    assert complete(machine, tokens=8)
    allowed.unlink()
    try:
        machine.run("systemctl", "reload", EDGE)
        until(machine, "refused: key")
        assert "'board'" in machine.journal(EDGE)
    finally:
        allowed.write_bytes(key)
        machine.run("systemctl", "reload", EDGE)
    assert complete(machine, tokens=8)
    until(machine, "connected")


def test_an_edge_with_another_key_and_a_broken_edge_pub(machine: Machine) -> None:
    """One folder holds the keys of both here, so edge.pub is the device's copy."""
    folder: Path = machine.root / ETC / "keys"
    before = {name: (folder / name).read_bytes() for name in ("edge.key", "edge.pub")}
    try:
        for name in before:
            (folder / name).unlink()
        public = keys.create(folder, keys.EDGE)
        present = public.read_bytes()
        public.write_bytes(before["edge.pub"])
        machine.run("systemctl", "restart", EDGE)
        until(machine, "refused: edge.pub")
        public.write_text("no key\n")
        reload_fails(machine, DEVICE)
        assert "not in force: " in machine.show(DEVICE, "StatusText")
        public.write_bytes(present)
        machine.run("systemctl", "reload", DEVICE)
        assert complete(machine, tokens=8)
        until(machine, "connected")
    finally:
        for name, content in before.items():
            (folder / name).write_bytes(content)
        machine.run("systemctl", "restart", EDGE)
        machine.run("systemctl", "reload", DEVICE)
    until(machine, "connected")
