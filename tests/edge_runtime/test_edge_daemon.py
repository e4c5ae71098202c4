"""The edge as a service: what it tells systemd, how it reloads, drains, and takes over sockets."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import zmq
from msgspec.structs import replace

from pilotfish import Device
from pilotfish.base.errors import AccessDeniedError, KeysError
from pilotfish.base.extras import install_command
from pilotfish.edge_runtime.edge_config import EdgeConfig, EdgeLimits
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.live_settings import LiveSettings, bounds_of
from pilotfish.wire import keys
from pilotfish.wire import messages as m
from pilotfish.wire.keys import DeviceKeys, EdgeKeys
from pilotfish.wire.transport import Listener
from tests.conftest import Pair
from tests.support.daemons import (
    SLOW,
    Daemon,
    Systemd,
    await_sample,
    check_exposition,
    exposition,
    free_port,
    running,
    scrape,
)
from tests.support.hostile import PROMPT, RawClient, RawSession, take_tokens
from tests.support.socketless import SocketlessEdge

PING = m.Ping(nonce=1)


@pytest.fixture
def systemd(tmp_path: Path) -> Systemd:
    return Systemd(tmp_path)


@pytest.fixture
def folder(tmp_path: Path, key_folders: dict[str, Path]) -> Path:
    """A key folder of an edge, to be changed at will; Alice and Bob are allowed."""
    return Path(shutil.copytree(key_folders["edge"], tmp_path / "keys"))


# systemd


def test_what_systemd_is_told(pair: Pair, systemd: Systemd) -> None:
    with running("--target", pair.target, "--threads", 1, systemd=systemd) as daemon:
        systemd.await_("READY", "1")
        assert "EXTEND_TIMEOUT_USEC" in systemd.received[0][1]  # loading may take its time
        assert systemd.await_("STATUS", "serving").endswith(": 0 devices, 0 sessions, 0 passes")
        with Device(pair.draft, daemon.endpoint, threads=1) as device:
            device.generate(PROMPT, protocol="greedy", max_tokens=4)
            text = ""
            while not re.fullmatch(r"serving tiny: 1 device, 1 session, [1-9]\d* pass(es)?", text):
                since = len(systemd.received)
                device.generate(
                    PROMPT, protocol="greedy", max_tokens=1
                )  # so that there is something to tell
                text = systemd.await_("STATUS", since=since)
        idle_s = time.monotonic()
        time.sleep(1.6)  # an idle edge feeds its watchdog too
        fed = [idle_s, *systemd.fed(idle_s), time.monotonic()]
        assert max(after - before for before, after in pairwise(fed)) < 1.0
        before = len(systemd.received)
        daemon.signal(signal.SIGTERM)
        assert daemon.ends() == 0
        assert systemd.await_("STOPPING") == "1"
        drain_s = EdgeConfig(target=pair.target).drain_s
        # a drain may be longer than the unit's time to stop
        assert float(systemd.await_("EXTEND_TIMEOUT_USEC", since=before)) > 1e6 * drain_s


def test_a_pass_that_hangs_starves_the_watchdog_and_a_long_prompt_does_not(
    long_pair: Pair, systemd: Systemd
) -> None:
    flags = ("--target", long_pair.target, "--context", 4096, "--threads", 1)
    with (
        running(*flags, systemd=systemd, script=SLOW) as daemon,
        RawClient(daemon.endpoint) as client,
        RawClient(daemon.endpoint) as other,
    ):
        session = RawSession()
        began_s = time.monotonic()
        client.send(*session.begin([1] * 1025))  # eight passes of 0.2 s
        client.send(*session.window([1, 2]))
        session.settle([1, 2], client.receive(30))
        fed = [began_s, *systemd.fed(began_s), time.monotonic()]
        assert fed[-1] - fed[0] > 1.5
        assert max(after - before for before, after in pairwise(fed)) < 1.0
        client.send(*session.begin([2] * 67))  # a pass of 3 s
        hung_s = time.monotonic() + 0.5
        while time.monotonic() < hung_s + 2.0:
            other.say(PING)
            other.receive()  # the receiver answers all the same
            time.sleep(0.05)
        assert [at for at in systemd.fed(hung_s) if at < hung_s + 2.0] == []


def test_a_socket_that_systemd_holds(pair: Pair) -> None:
    """Its connections wait for the next edge when one has gone, instead of being refused."""
    flags = ("--target", pair.target, "--threads", 1, "--listen", "tcp://127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        with running(*flags, listening=listening) as daemon:
            assert daemon.endpoint == endpoint
            with Device(pair.draft, endpoint, threads=1) as device:
                wanted = device.generate(PROMPT, protocol="greedy", max_tokens=20, seed=1).tokens
            daemon.signal(signal.SIGTERM)
            assert daemon.ends() == 0
        with RawClient(endpoint) as early:
            assert not early.socket.poll(200)
            with running(*flags, listening=listening):
                early.say(PING)
                early.receive(30)
                with Device(pair.draft, endpoint, threads=1) as device:
                    assert (
                        device.generate(PROMPT, protocol="greedy", max_tokens=20, seed=1).tokens
                        == wanted
                    )


def test_an_inherited_socket_that_does_not_listen(pair: Pair) -> None:
    with socket.socket() as idle:
        idle.bind(("127.0.0.1", 0))
        with pytest.raises(AssertionError, match="does not listen"):
            Daemon("--target", pair.target, listening=idle)


# Reloading


def test_keys_are_swapped_without_dropping_a_session(
    pair: Pair, folder: Path, key_folders: dict[str, Path], systemd: Systemd
) -> None:
    alice, bob, eve = (DeviceKeys.load(key_folders[name]) for name in ("alice", "bob", "eve"))
    options = {"protocol": "dsd", "temperature": 1.0, "seed": 3, "window": 3, "max_tokens": 60}
    port = free_port()
    flags = ("--target", pair.target, "--keys", folder, "--threads", 1, "--metrics", port)
    flags += ("--metrics-devices",)
    with (
        running(*flags, systemd=systemd) as daemon,
        RawClient(daemon.endpoint, bob) as revoked,
        Device(pair.draft, daemon.endpoint, key_folders["alice"], threads=1) as device,
    ):
        wanted = device.generate(PROMPT, **options).tokens
        session = RawSession()
        revoked.send(*session.begin(PROMPT))
        session.go_on(revoked, 2)
        pieces = device.stream(PROMPT, **options)
        got = [*next(pieces).tokens, *next(pieces).tokens]

        keys.allow(folder, key_folders["eve"] / "device.pub", "eve")
        (folder / "allowed" / "bob.pub").unlink()
        before = len(systemd.received)
        daemon.signal(signal.SIGHUP)
        systemd.await_("RELOADING", "1", before)
        systemd.await_("READY", "1", before)

        revoked.send(*session.window())  # on a connection that stands
        revoked.fails("access-denied")
        with RawClient(daemon.endpoint, eve) as welcome:
            welcome.say(PING)
            assert isinstance(welcome.receive(), m.Pong)
        got += [token for piece in pieces for token in piece.tokens]
        assert got == wanted
        with pytest.raises(AccessDeniedError):
            Device(pair.draft, daemon.endpoint, key_folders["bob"])
        figures = scrape(port)
        assert figures['sessions_ended_total{reason="revoked"}'] == 1
        assert figures['sessions_ended_total{reason="expired"}'] == 0
        assert figures['refusals_total{code="access-denied"}'] >= 1
        assert figures['reloads_total{result="done"}'] == 1
        assert figures['device_sessions{device="alice"}'] == 1
        assert figures["sessions"] == 1  # bob's is gone, not only its jobs
        await_sample(port, 'connections_cut_total{reason="revoked-key"}', 1)  # the one that stood
        text = exposition(port)
        assert not any(key.public.decode() in text for key in (alice, bob, eve))


def test_settings_change_and_what_is_broken_changes_nothing(
    pair: Pair, folder: Path, key_folders: dict[str, Path], systemd: Systemd, tmp_path: Path
) -> None:
    config = tmp_path / "edge.toml"
    settings = f'target = "{pair.target}"\nkeys = "{folder}"\nthreads = 1\n'
    config.write_text(settings + "sessions-per-client = 2\n")
    alice = DeviceKeys.load(key_folders["alice"])

    def reload(daemon: Daemon) -> None:
        before = len(systemd.received)
        daemon.signal(signal.SIGHUP)
        systemd.await_("READY", "1", before)

    with (
        running("--config", config, systemd=systemd) as daemon,
        RawClient(daemon.endpoint, alice) as client,
    ):

        def sessions() -> int:
            """How many Alice can have."""
            begun = [RawSession() for _ in range(6)]
            for session in begun:
                client.send(*session.begin(PROMPT))
            refused = [reply for reply in client.settle() if isinstance(reply, m.Failure)]
            assert {reply.code for reply in refused} <= {"too-many-sessions"}
            for session in begun:
                client.say(m.Close(session=session.id))
            return 6 - len(refused)

        assert sessions() == 2
        config.write_text(settings + "sessions-per-client = 4\ncontext = 128\n")
        reload(daemon)
        daemon.await_line("context has changed; restart the edge")
        assert sessions() == 4
        for broken in ("sessions-per-client = 5\nsessions-per-cheese = 1", "sessions-per-client ="):
            config.write_text(settings + broken)
            reload(daemon)
            assert sessions() == 4
        for named in ("sessions.per.cheese", "is not valid TOML"):
            daemon.await_line(f"reloaded, except for this problem: .*{named}")
        config.write_text(settings + "sessions-per-client = 5\n")
        reload(daemon)
        assert sessions() == 5


def test_what_needs_a_restart_does_not_change_by_halves(
    pair: Pair, folder: Path, key_folders: dict[str, Path]
) -> None:
    """Neither how long a message may be, nor, when the keys are gone, the last allowed ones."""
    config = EdgeConfig(target=pair.target, keys=folder)
    results = [config]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    started = EdgeKeys.load(folder)
    listener = Listener(context, "tcp://127.0.0.1:0", started, bounds_of(config))
    with SocketlessEdge(pair.target) as edge:
        settings = LiveSettings(config, started, lambda: results[0], EdgeMetrics())
        keys.allow(folder, key_folders["eve"] / "device.pub", "eve")
        (folder / "allowed" / "bob.pub").unlink()
        settings.reload(listener, edge.service)
        allowed = EdgeKeys.load(folder).allowed
        assert allowed != started.allowed
        results[0] = replace(config, keys=None, limits=EdgeLimits(message_mib=1))
        settings.reload(listener, edge.service)
        assert listener.gate is not None
        assert listener.gate.allowed == edge.service._allowed == allowed
        assert listener.connections.bounds == bounds_of(config)
    listener.close()
    context.term()


@pytest.mark.parametrize("moved", ["nowhere", "onto a file", "a list that is a file"])
def test_a_list_that_moves_where_none_can_be_read_is_read_where_it_was(
    pair: Pair, folder: Path, key_folders: dict[str, Path], tmp_path: Path, moved: str
) -> None:
    """Whoever is taken off there is out, and whoever is put there comes in."""
    config = EdgeConfig(target=pair.target, keys=folder)
    results = [config]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    started = EdgeKeys.load(folder)
    listener = Listener(context, "tcp://127.0.0.1:0", started, bounds_of(config))
    assert listener.gate is not None
    elsewhere = tmp_path / "elsewhere"
    if moved == "onto a file":
        elsewhere.write_text("")
    elif moved == "a list that is a file":
        elsewhere.mkdir()
        (elsewhere / "allowed").write_text("")
    with SocketlessEdge(pair.target) as edge:
        settings = LiveSettings(config, started, lambda: results[0], EdgeMetrics())
        results[0] = replace(config, keys=elsewhere)
        keys.allow(folder, key_folders["eve"] / "device.pub", "eve")
        (folder / "allowed" / "bob.pub").unlink()
        settings.reload(listener, edge.service)
        assert str(elsewhere) in settings.problem
        assert sorted(listener.gate.allowed.values()) == ["alice", "eve"]
        (folder / "allowed" / "alice.pub").unlink()  # again, after a reload that failed
        settings.reload(listener, edge.service)
        assert sorted(listener.gate.allowed.values()) == ["eve"]
    listener.close()
    context.term()


# Stopping


def test_a_drain_answers_what_was_received(long_pair: Pair, systemd: Systemd) -> None:
    flags = ("--target", long_pair.target, "--threads", 1)
    with (
        running(*flags, systemd=systemd, script=SLOW) as daemon,
        RawClient(daemon.endpoint) as client,
        RawClient(daemon.endpoint) as other,
    ):
        streaming = RawSession()
        other.send(*streaming.begin(PROMPT, "stream"))
        other.send(*streaming.pull(100_000))
        take_tokens(other, 3)
        session = RawSession()
        client.send(*session.begin(PROMPT))
        session.go_on(client, 1)
        window = [1] * (33 - 1)  # of which a pass takes a second
        client.send(*session.window(window))
        time.sleep(0.3)
        daemon.signal(signal.SIGTERM)
        time.sleep(0.3)
        other.send(*RawSession().begin(PROMPT))
        session.settle(window, client.receive())
        assert daemon.ends() == 0
        systemd.await_("STATUS", "draining")


def test_a_drain_begins_nothing_new_and_ends_when_asked_twice(long_pair: Pair) -> None:
    flags = ("--target", long_pair.target, "--threads", 1, "--context", 4096, "--drain", 60)
    with (
        running(*flags, script=SLOW) as daemon,
        RawClient(daemon.endpoint) as client,
        RawClient(daemon.endpoint) as other,
    ):
        for each in (client, other):
            each.say(PING)
            each.receive()
        session = RawSession()
        client.send(*session.begin([1] * 3000))
        client.send(*session.window([1]))
        time.sleep(0.3)
        daemon.signal(signal.SIGTERM)
        time.sleep(0.3)
        other.send(*RawSession().begin(PROMPT))
        other.fails("draining")
        port = int(daemon.endpoint.rpartition(":")[2])
        late = ("127.0.0.1", port)
        with suppress(ConnectionError), socket.create_connection(late, timeout=30) as connection:
            while connection.recv(100):
                pass
        began_s = time.monotonic()
        daemon.signal(signal.SIGTERM)
        assert daemon.ends() == 0
        assert time.monotonic() - began_s < 30


# Figures


def test_figures_are_those_of_what_was_done(pair: Pair) -> None:
    port = free_port()
    flags = ("--target", pair.target, "--threads", 1, "--metrics", f"127.0.0.1:{port}")
    flags += ("--provider", "cpu")
    with running(*flags, "--expire", 1) as daemon:
        with Device(pair.draft, daemon.endpoint, threads=1) as device:
            answer = device.generate(PROMPT, max_tokens=40, window=3, protocol="greedy")
            rounds = answer.rounds
            # counted once it has been sent
            await_sample(port, 'windows_total{protocol="greedy"}', len(rounds))
            figures = scrape(port)
            assert figures['windows_total{protocol="greedy"}'] == len(rounds)
            accepted = sum(round_.accepted for round_ in rounds)
            assert figures['accepted_tokens_total{protocol="greedy"}'] == accepted
            drafted = sum(round_.nodes for round_ in rounds)
            assert figures['drafted_tokens_total{protocol="greedy"}'] == drafted
            assert figures["verify_seconds_count"] == figures["queue_seconds_count"] == len(rounds)
            assert figures["batch_sessions_count"] >= len(rounds)
            assert figures["sessions"] == figures["devices"] == figures["connections"] == 1
            assert figures["received_bytes_total"] > 20 * len(rounds)
            device.generate(PROMPT, max_tokens=5, protocol="stream")
            await_sample(port, "verify_seconds_count", len(rounds) + 5)
            figures = scrape(port)
            assert figures["verify_seconds_count"] == figures["queue_seconds_count"]
            [build] = [name for name in figures if name.startswith("build_info{")]
            assert 'provider="cpu"' in build
            assert 'precision="fp32"' in build
            assert 'threads="1"' in build
            await_sample(port, 'sessions_ended_total{reason="expired"}', 1)
            assert scrape(port)["sessions"] == 0
            device.generate(
                PROMPT, protocol="greedy", max_tokens=4
            )  # an expired session begins again
        check_exposition(exposition(port))


def test_no_library_no_figures(pair: Pair) -> None:
    script = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from pilotfish.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "edge", "serve", "--target", pair.target, "--metrics", "0"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 64
    (line,) = done.stderr.splitlines()
    assert install_command("serve") in line


# Keys


def test_a_secret_key_that_systemd_keeps(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = EdgeKeys.load(folder)
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (folder / "edge.key").rename(credentials / "edge.key")
    with pytest.raises(KeysError, match="is missing"):
        EdgeKeys.load(folder)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
    (credentials / "edge.key").chmod(0o444)  # systemd controls access to it
    assert EdgeKeys.load(folder) == wanted
    (credentials / "edge.key").write_text("nonsense")
    with pytest.raises(KeysError, match="does not hold a key"):
        EdgeKeys.load(folder)


def test_an_allow_list_that_cannot_be_read_is_not_an_empty_one(folder: Path) -> None:
    shutil.rmtree(folder / "allowed")
    assert EdgeKeys.load(folder).allowed == {}
    (folder / "allowed").write_text("")
    with pytest.raises(KeysError, match="allowed cannot be read"):
        EdgeKeys.load(folder)
