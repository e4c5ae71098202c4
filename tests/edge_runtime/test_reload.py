"""A reload applies the valid parts: removed keys are revoked, and faults are reported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pilotfish.edge_runtime.edge_config import EdgeLimits
from pilotfish.wire import keys
from pilotfish.wire import messages as m
from pilotfish.wire.keys import DeviceKeys
from tests.conftest import Pair
from tests.support.daemons import (
    Systemd,
    await_sample,
    free_port,
    reload_as_systemd,
    running,
    scrape,
)
from tests.support.hostile import PROMPT, RawClient, RawSession
from tests.support.socketless import SocketlessEdge
from tests.support.thinned import thinned

PING = m.Ping(nonce=1)
BEFORE_THIS_BOOT = b"999999999999999999\nof another boot\n"


@pytest.fixture
def systemd(tmp_path: Path) -> Systemd:
    return Systemd(tmp_path)


@pytest.fixture
def folder(tmp_path: Path, key_folders: dict[str, Path]) -> Path:
    """A key folder of an edge, to be broken at will; Alice and Bob are allowed."""
    return Path(shutil.copytree(key_folders["edge"], tmp_path / "keys"))


@pytest.mark.parametrize(
    "wrong", thinned(["a key file", "the configuration", "edge.key", "all three"], ["all three"])
)
def test_a_key_taken_off_the_list_is_out_whatever_else_is_broken(
    pair: Pair,
    folder: Path,
    key_folders: dict[str, Path],
    systemd: Systemd,
    tmp_path: Path,
    wrong: str,
) -> None:
    alice, bob = (DeviceKeys.load(key_folders[name]) for name in ("alice", "bob"))
    config, port = tmp_path / "edge.toml", free_port()
    sound = (
        f'target = "{pair.target}"\nkeys = "{folder}"\nthreads = 1\nmetrics = "127.0.0.1:{port}"\n'
    )
    config.write_text(sound)
    secret = (folder / "edge.key").read_bytes()
    with (
        running("--config", config, systemd=systemd) as daemon,
        RawClient(daemon.endpoint, alice) as stays,
        RawClient(daemon.endpoint, bob) as goes,
    ):
        assert reload_as_systemd(systemd, daemon.pid).returncode == 0
        began = scrape(port)["config_last_reload_success_timestamp_seconds"]
        assert time.time() - 60 < began <= time.time()
        sessions = RawSession(), RawSession()
        for client, session in zip((stays, goes), sessions, strict=True):
            client.send(*session.begin(PROMPT))
            session.go_on(client, 1)
        named = []
        if wrong in ("a key file", "all three"):
            (folder / "allowed" / "carol.pub").write_bytes(b"")
            named.append("carol.pub")
        if wrong in ("the configuration", "all three"):
            config.write_text("sessions = [[\n")
            named.append("edge.toml")
        if wrong in ("edge.key", "all three"):
            (folder / "edge.key").write_bytes(b"")
            named.append("edge.key")
        (folder / "allowed" / "bob.pub").unlink()
        before = len(systemd.received)
        done = reload_as_systemd(systemd, daemon.pid)
        assert done.returncode == 78
        assert len(done.stderr.splitlines()) == 1
        assert any(name in done.stderr for name in named)
        for name in named:
            daemon.await_line(f"reloaded, except for this problem: .*{name}")
        info = [info.get("STATUS", "") for _, info in systemd.received[before:] if "READY" in info]
        assert "; not in force: " in info[0]
        await_sample(port, 'connections_cut_total{reason="revoked-key"}', 1)
        await_sample(port, 'handshakes_refused_total{reason="key"}', 1)  # it tried to come back
        sessions[0].go_on(stays, 2)
        figures = scrape(port)
        assert figures['sessions_ended_total{reason="revoked"}'] == 1
        assert figures["config_last_reload_successful"] == 0
        assert figures["config_last_reload_success_timestamp_seconds"] == began
        assert figures["broken_key_files"] == ("carol.pub" in named)
        assert figures['reloads_total{result="refused"}'] == 1

        (folder / "allowed" / "carol.pub").unlink(missing_ok=True)
        config.write_text(sound)
        (folder / "edge.key").write_bytes(secret)
        assert reload_as_systemd(systemd, daemon.pid).returncode == 0
        figures = scrape(port)
        assert figures["config_last_reload_successful"] == 1
        assert figures["config_last_reload_success_timestamp_seconds"] > began
        assert figures["broken_key_files"] == 0
        sessions[0].go_on(stays, 1)


@pytest.mark.parametrize(
    "left",
    thinned(
        [b"", b"\xff\xfe", b"nothing of ours\n", BEFORE_THIS_BOOT], [b"\xff\xfe", BEFORE_THIS_BOOT]
    ),
)
def test_what_lies_where_the_outcome_is_told_does_not_matter(
    pair: Pair, systemd: Systemd, left: bytes
) -> None:
    with running("--target", pair.target, systemd=systemd) as daemon:
        (systemd.folder / "reload").write_bytes(left)
        done = reload_as_systemd(systemd, daemon.pid)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_list_that_cannot_be_read_at_a_reload_is_no_empty_one(
    pair: Pair, folder: Path, key_folders: dict[str, Path], systemd: Systemd
) -> None:
    with (
        running("--target", pair.target, "--keys", folder, systemd=systemd) as daemon,
        RawClient(daemon.endpoint, DeviceKeys.load(key_folders["bob"])) as client,
    ):
        shutil.rmtree(folder / "allowed")
        (folder / "allowed").write_text("")
        done = reload_as_systemd(systemd, daemon.pid)
        assert (done.returncode, "allowed cannot be read" in done.stderr) == (78, True)
        client.say(PING)
        assert isinstance(client.receive(), m.Pong)


def test_of_two_folders_the_later_ones_list_stays_in_force(
    pair: Pair, folder: Path, key_folders: dict[str, Path], systemd: Systemd, tmp_path: Path
) -> None:
    """Where it cannot be read any more: those that were on the former list only stay out."""
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    (moved / "allowed" / "bob.pub").unlink()
    keys.allow(moved, key_folders["eve"] / "device.pub", "carol")
    bob, carol = (DeviceKeys.load(key_folders[name]) for name in ("bob", "eve"))
    config, port = tmp_path / "edge.toml", free_port()
    settings = 'target = "{}"\nkeys = "{}"\nthreads = 1\nmetrics = "127.0.0.1:{}"\n'
    config.write_text(settings.format(pair.target, folder, port))
    with running("--config", config, systemd=systemd) as daemon:
        config.write_text(settings.format(pair.target, moved, port))
        assert reload_as_systemd(systemd, daemon.pid).returncode == 0
        shutil.rmtree(moved / "allowed")
        (moved / "allowed").write_text("")
        assert reload_as_systemd(systemd, daemon.pid).returncode == 78
        with RawClient(daemon.endpoint, carol) as client:
            client.say(PING)
            assert isinstance(client.receive(), m.Pong)
        with RawClient(daemon.endpoint, bob) as client:
            client.say(PING)
            await_sample(port, 'handshakes_refused_total{reason="key"}', 1)


def test_an_edge_starts_beside_a_broken_key_file_and_says_so(
    pair: Pair, folder: Path, key_folders: dict[str, Path], systemd: Systemd
) -> None:
    (folder / "allowed" / "carol.pub").write_bytes(b"")
    port = free_port()
    flags = ("--target", pair.target, "--keys", folder, "--metrics", port)
    with (
        running(*flags, systemd=systemd) as daemon,
        RawClient(daemon.endpoint, DeviceKeys.load(key_folders["bob"])) as client,
    ):
        client.say(PING)
        assert isinstance(client.receive(), m.Pong)
        daemon.await_line("started, except for this problem: .*carol.pub does not hold a key")
        assert "carol.pub" in systemd.await_("STATUS", "serving")
        figures = scrape(port)
        assert figures["broken_key_files"] == 1
        assert figures["config_last_reload_successful"] == 0


def test_an_unanswered_reload_fails(systemd: Systemd) -> None:
    with subprocess.Popen(["sh", "-c", "trap '' HUP; echo; read _"], stdin=-1, stdout=-1) as deaf:
        assert deaf.stdout is not None
        deaf.stdout.readline()
        command = [sys.executable, "-m", "pilotfish", "reload", str(deaf.pid), "--within", "0.3"]
        environment = os.environ | {"RUNTIME_DIRECTORY": str(systemd.folder)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, "did not report" in done.stderr) == (78, True)
        deaf.kill()
    done = reload_as_systemd(systemd, deaf.pid)
    assert (done.returncode, "No such process" in done.stderr) == (78, True)


def test_new_limits_hold_for_clients_and_sessions_that_are_there(pair: Pair) -> None:
    """How many messages come in a second, and how long a session may rest."""
    with SocketlessEdge(pair.target) as edge:
        edge.deliver(RawSession().begin([1]))
        edge.service.expire()
        assert len(edge.service.sessions) == 1
        edge.service.apply_config(EdgeLimits(messages_per_s=4.0, expire_s=1e-9), None)
        edge.service.expire()
        assert len(edge.service.sessions) == 0
        for _ in range(9):
            edge.deliver([m.encode(PING)])
        kinds = [type(reply) for _, reply, _ in edge.replies]
        assert kinds[0] is m.Pong
        assert kinds[-1] is m.Failure
        edge.replies = edge.replies[-1:]
        edge.fails("rate-limited")
