"""One state of the link: health, status, status line, journal and the error of a request agree."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import openai
import pytest

from pilotfish.wire import keys
from tests.conftest import Pair
from tests.support.daemons import Daemon, Systemd, free_port, running
from tests.support.serving import Serving, chat, eventually, serving


class Ends(NamedTuple):
    """An edge and a device service that it lets in, each with its folder of keys and its systemd.

    flags: of the edge, to start it again.
    """

    pair: Pair
    edge: Daemon
    device: Serving
    edge_keys: Path
    device_keys: Path
    managers: tuple[Systemd, Systemd]
    flags: tuple[object, ...]


@pytest.fixture(params=["fail", "local"])
def ends(pair: Pair, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ends]:
    folders = edge_keys, device_keys = tmp_path / "edge-keys", tmp_path / "device-keys"
    edge_public = keys.create(edge_keys, keys.EDGE)
    keys.allow(edge_keys, keys.create(device_keys, keys.DEVICE), "board")
    shutil.copy(edge_public, device_keys)
    managers = []
    for name in ("edge", "device"):
        (tmp_path / name).mkdir()
        managers.append(Systemd(tmp_path / name))
    flags = ("--target", pair.target, "--keys", edge_keys, "--threads", 1)
    listen = ("--listen", f"tcp://127.0.0.1:{free_port()}")
    policy = ("--keys", device_keys, "--on-link-loss", request.param)
    with (
        running(*flags, *listen, systemd=managers[0], watchdog_s=30.0) as edge,
        serving(
            pair.draft, edge.endpoint, *policy, "--lanes", 2,
            NOTIFY_SOCKET=managers[1].address, RUNTIME_DIRECTORY=str(managers[1].folder),
        ) as device,
    ):  # fmt: skip
        yield Ends(pair, edge, device, *folders, (managers[0], managers[1]), (*flags, *listen))


def reload(manager: Systemd, pid: int) -> None:
    before = len(manager.received)
    os.kill(pid, signal.SIGHUP)
    manager.await_("READY", "1", before)


def agrees(ends: Ends, state: str) -> bool:
    """Whether all that tells of the link says this, and `/health` suits the policy."""
    health = ends.device.get("/health")
    link = ends.device.get("/status").json()["link"]
    lines = [info["STATUS"] for _, info in ends.managers[1].received if "STATUS" in info]
    alone = "local" in ends.device.process.args
    well = alone or state == "connected"
    assert health.status_code == (200 if well else 503) or health.json()["status"] != state
    return (
        health.json()["status"] == ("ok" if well else state)
        and health.json()["edge"]["state"] == link["state"] == state
        and health.json()["edge_up"] == link["up"] == (state == "connected")
        and f"edge at {ends.edge.endpoint}: {state}" in lines[-1]
        and (state == "connected" or link["remedy"] in lines[-1])
    )


def refused_request(ends: Ends) -> str:
    """What a request is told; under `local` it is answered, and this is what the log says."""
    if "local" in ends.device.process.args:
        assert chat(ends.device.client()).choices
        return ends.device.until("continuing without the edge")
    with pytest.raises(openai.APIStatusError) as refused:
        chat(ends.device.client())
    assert refused.value.status_code == 503
    return refused.value.message


def logged(ends: Ends, state: str, level: str = "WARNING") -> list[str]:
    start = f"{level} pilotfish.device.link: {state}"
    return [line for line in ends.device.lines if start in line]


def test_a_key_that_is_revoked_and_allowed_again(ends: Ends) -> None:
    assert chat(ends.device.client()).choices
    allowed = ends.edge_keys / "allowed/board.pub"
    key = allowed.read_bytes()
    allowed.unlink()
    reload(ends.managers[0], ends.edge.pid)
    eventually(lambda: agrees(ends, "refused: key"))
    assert "pilotfish keys allow" in refused_request(ends)
    assert len(logged(ends, "refused: key")) == 1
    line = ends.edge.await_line("refused key")
    assert key.decode().strip() in line
    assert "'board'" in line
    allowed.write_bytes(key)
    reload(ends.managers[0], ends.edge.pid)
    assert chat(ends.device.client()).choices  # the first one; nothing is out of date
    eventually(lambda: agrees(ends, "connected"))
    assert len(logged(ends, "connected, ", "INFO")) == 1


def test_an_edge_with_another_key_and_an_edge_pub_that_is_broken(ends: Ends) -> None:
    (ends.edge_keys / "edge.key").unlink()
    (ends.edge_keys / "edge.pub").unlink()
    keys.create(ends.edge_keys, keys.EDGE)
    ends.edge.kill()
    eventually(lambda: agrees(ends, "connection refused"))
    with running(*ends.flags):
        eventually(lambda: agrees(ends, "refused: edge.pub"))
        assert "systemctl reload pilotfish-device" in refused_request(ends)
        (ends.device_keys / "edge.pub").write_text("no key\n")
        reload(ends.managers[1], ends.device.process.pid)
        ends.managers[1].await_("STATUS", "", len(ends.managers[1].received) - 1)
        lines = [info["STATUS"] for _, info in ends.managers[1].received if "STATUS" in info]
        assert "not in force: " in lines[-1]
        shutil.copy(ends.edge_keys / "edge.pub", ends.device_keys)
        reload(ends.managers[1], ends.device.process.pid)
        assert chat(ends.device.client()).choices
        eventually(lambda: agrees(ends, "connected"))
    assert len(logged(ends, "refused: edge.pub")) == 1


def probe(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pilotfish", "probe", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_probe_says_the_same(pair: Pair, key_folders: dict[str, Path], tmp_path: Path) -> None:
    stale = shutil.copytree(key_folders["bob"], tmp_path / "stale")
    keys.create(tmp_path, keys.EDGE)
    shutil.copy(tmp_path / "edge.pub", stale)
    flags = ("--target", pair.target, "--keys", key_folders["edge"], "--threads", 1)
    with running(*flags) as edge:
        for folder, words in (
            (["--keys", key_folders["eve"]], "pilotfish keys allow"),
            (["--keys", stale], "edge.pub is not the edge's present public key"),
            ([], "the edge requires keys, but this device has none"),
        ):
            # on a busy machine a handshake takes its time; what was refused is told at once
            done = probe(edge.endpoint, *folder, "--patience", 30)
            assert done.returncode == 77, done.stderr
            assert words in done.stderr
    done = probe(f"tcp://127.0.0.1:{free_port()}")
    assert done.returncode == 69
    assert "nothing listens there" in done.stderr
