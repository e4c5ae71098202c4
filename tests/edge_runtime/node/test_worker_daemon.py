"""`pilotfish edge worker` as a service: systemd, signals, keys read again, and clear refusals."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from pilotfish.base.errors import ListenError
from pilotfish.cli import main
from pilotfish.wire import keys
from pilotfish.wire.nodes import Greet, Ready, Refused
from tests.conftest import CONTEXT, Pair
from tests.support.commands import await_end, orphan, patience_s, refusal
from tests.support.daemons import Systemd, running
from tests.support.federating import worker
from tests.support.raw_edge import RawEdge, Tenant, expected_of, ids, item

GREET = Greet(version=1)


def serving(*flags: object, **options: Any) -> Any:
    return running("--threads", 1, *flags, action="worker", **options)


@pytest.fixture
def systemd(tmp_path: Path) -> Systemd:
    return Systemd(tmp_path)


@pytest.fixture
def folder(tmp_path: Path, key_folders: dict[str, Path]) -> Path:
    """A worker's key folder, to be changed at will; an edge that it lets in is beside it."""
    keys.create(tmp_path / "edge", keys.EDGE)
    node = Path(shutil.copytree(key_folders["edge"], tmp_path / "node"))
    keys.allow(node, tmp_path / "edge" / "edge.pub", "edge")
    return node


def raw_edge(endpoint: str, node: Path) -> RawEdge:
    """The edge beside a worker's folder."""
    return RawEdge(endpoint, node.parent / "edge", keys.read_public(node / "edge.pub"))


def test_a_worker_process_tells_what_it_has(pair: Pair) -> None:
    with worker(pair.target, context=100, sessions=3) as held, RawEdge(held.endpoint) as edge:
        ready, _ = edge.order(GREET)
        assert isinstance(ready, Ready)
        assert (ready.context, ready.slots, ready.stages) == (100, 3, 0)
        Tenant(edge).proves(expected_of(pair.target))


# systemd


def test_what_systemd_is_told(pair: Pair, systemd: Systemd) -> None:
    with serving("--target", pair.target, systemd=systemd) as daemon:
        systemd.await_("READY", "1")
        assert "EXTEND_TIMEOUT_USEC" in systemd.received[0][1]  # loading may take its time
        assert systemd.await_("WATCHDOG_USEC") == "60000000"  # one step may take so long
        assert systemd.await_("STATUS", "tiny: ") == "tiny: waiting for an edge, 0 steps"
        with RawEdge(daemon.endpoint) as edge:
            Tenant(edge).proves(expected_of(pair.target))
            systemd.await_("STATUS", "tiny: attached, 1 step")
        systemd.await_("STATUS", "tiny: waiting for an edge, 1 step")
        before = len(systemd.received)
        daemon.signal(signal.SIGTERM)
        assert daemon.ends() == 0
        assert systemd.await_("STOPPING", since=before) == "1"


def test_an_idle_worker_feeds_its_watchdog(pair: Pair, systemd: Systemd) -> None:
    with serving("--target", pair.target, systemd=systemd, watchdog_s=61.0):
        systemd.await_("READY", "1")
        idle_s = time.monotonic()
        systemd.await_("WATCHDOG", "1")
        assert time.monotonic() - idle_s < 20.0


def test_a_socket_that_systemd_holds(pair: Pair) -> None:
    flags = ("--target", pair.target, "--listen", "tcp://127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        with serving(*flags, listening=listening) as daemon:
            assert daemon.endpoint == endpoint
            with RawEdge(endpoint) as edge:
                Tenant(edge).proves(expected_of(pair.target))
            daemon.signal(signal.SIGTERM)
            assert daemon.ends() == 0
        with RawEdge(endpoint) as early, serving(*flags, listening=listening):
            Tenant(early).proves(expected_of(pair.target))


# Keys, read again


def test_an_edge_is_let_in_and_shown_out_without_a_restart(
    pair: Pair, folder: Path, systemd: Systemd
) -> None:
    listed = folder / "allowed" / "edge.pub"
    flags = ("--target", pair.target, "--keys", folder)
    with serving(*flags, systemd=systemd) as daemon, raw_edge(daemon.endpoint, folder) as edge:

        def reload() -> None:
            before = len(systemd.received)
            daemon.signal(signal.SIGHUP)
            systemd.await_("RELOADING", "1", before)
            systemd.await_("READY", "1", before)

        held = Tenant(edge)
        held.proves(expected_of(pair.target))
        key = listed.read_bytes()
        (folder / "allowed" / "half.pub").write_text("half a k")  # admits no peer
        listed.unlink()
        reload()
        reply, _ = held.step([item()], ids(1), b"")
        assert isinstance(reply, Refused)
        assert reply.code == "access-denied"
        daemon.await_line("not in force: .*half.pub")
        listed.write_bytes(key)
        reload()
        with raw_edge(daemon.endpoint, folder) as again:
            Tenant(again).proves(expected_of(pair.target))


# Ends


@pytest.mark.parametrize(("blow", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_stopping_a_worker(pair: Pair, blow: signal.Signals, code: int) -> None:
    with serving("--target", pair.target) as daemon, RawEdge(daemon.endpoint) as edge:
        Tenant(edge).proves(expected_of(pair.target))
        began_s = time.monotonic()
        daemon.signal(blow)
        assert daemon.ends() == code
        assert time.monotonic() - began_s < patience_s()
        assert not any("Traceback" in line for line in daemon.lines)


def test_a_worker_goes_when_its_parent_is_killed(pair: Pair) -> None:
    await_end(orphan(pair.target, ", action='worker'"))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--target", "nowhere"], 66),
        (["--listen", "tcp://0.0.0.0:0"], 71),
        (["--listen", "nonsense"], 71),
        (["--listen", "tcp://127.0.0.1:99999"], 71),
        (["--keys", "nowhere"], 77),
        (["--provider", "abacus"], 69),
        (["--config", "nowhere.toml"], 78),
    ],
)
def test_workers_that_cannot_serve(
    pair: Pair, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int
) -> None:
    refusal(capsys, code, "edge", "worker", "--target", pair.target, *arguments)


@pytest.mark.parametrize(
    "flag", ["--sessions=0", "--context=1", "--message-mib=0", "--threads=0", "--federate=x"]
)
def test_flags_that_make_no_sense(
    pair: Pair, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["edge", "worker", "--target", str(pair.target), flag])
    assert ended.value.code == 2
    assert flag.split("=", maxsplit=1)[0] in capsys.readouterr().err


def test_an_address_in_use(pair: Pair) -> None:
    with (
        worker(pair.target) as first,
        pytest.raises(ListenError, match=re.escape(first.endpoint)),
        worker(pair.target, listen=first.endpoint),
    ):
        pass


def test_a_configuration_file(pair: Pair, tmp_path: Path) -> None:
    config = tmp_path / "worker.toml"
    config.write_text(f'target = "{pair.target}"\nsessions = 2\ncontext = {CONTEXT // 2}\n')
    with serving("--config", config) as daemon, RawEdge(daemon.endpoint) as edge:
        ready, _ = edge.order(GREET)
        assert isinstance(ready, Ready)
        assert (ready.slots, ready.context) == (2, CONTEXT // 2)


def test_help_says_how_a_federation_is_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["edge", "worker", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("--target", "--listen", "--keys", "--sessions", "--federate workers.toml"):
        assert word in text
    with pytest.raises(SystemExit):
        main(["edge", "--help"])
    assert "worker" in capsys.readouterr().out
