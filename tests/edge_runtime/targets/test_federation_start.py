"""An edge whose workers are not there yet, or not all: it waits, says so, and can be stopped."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import TargetLostError
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.protocols import SamplingParams
from tests.support.commands import await_end, children, patience_s, refusal
from tests.support.daemons import Daemon, Systemd, free_port, running
from tests.support.federating import SESSIONS, Cast, Ensemble, kill, worker, write_list

PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams(sampling=Sampling(), seed=0)


@pytest.fixture
def systemd(tmp_path: Path) -> Systemd:
    return Systemd(tmp_path)


def away() -> str:
    """Where no worker is yet."""
    return f"tcp://127.0.0.1:{free_port()}"


def waiting_edge(cast: Cast, path: Path, systemd: Systemd | None = None) -> Daemon:
    """An edge that does not serve yet."""
    flags = ("--target", cast.a, "--federate", path, "--sessions", SESSIONS, "--threads", 1)
    listen = ("--listen", "tcp://127.0.0.1:0")
    return Daemon(*flags, *listen, systemd=systemd, serves=False)


def test_an_edge_waits_for_its_workers_and_says_for_which(
    cast: Cast, tmp_path: Path, systemd: Systemd
) -> None:
    item, two = away(), away()
    path = write_list(tmp_path / "w.toml", [("a", item), ("b", two)])
    edge = waiting_edge(cast, path, systemd)
    try:
        info = systemd.await_("STATUS", "waiting for nodes: ")
        assert info == "waiting for nodes: a: not there yet, b: not there yet"
        assert len([1 for _, reply in systemd.received if "EXTEND_TIMEOUT_USEC" in reply]) >= 2
        with ExitStack() as stack:
            stack.enter_context(worker(cast.b, listen=two))
            systemd.await_("STATUS", "waiting for nodes: a: not there yet")
            assert not edge.endpoint
            stack.enter_context(worker(cast.a, listen=item))
            systemd.await_("READY", "1")
            assert systemd.await_("STATUS", "serving").endswith("0 passes")
            with Device(cast.draft, edge.await_endpoint(), threads=1) as device:
                assert device.generate(PROMPT, protocol="greedy", max_tokens=5).tokens
            info = systemd.await_("STATUS", "serving", since=len(systemd.received))
            assert re.match(r"serving [^,:]+, ρ [01]\.\d{3}: ", info)
    finally:
        edge.kill()


def test_the_status_names_missing_workers(cast: Cast, tmp_path: Path, systemd: Systemd) -> None:
    with worker(cast.a) as item, worker(cast.b) as two:
        named = [("a", item.endpoint), ("b", two.endpoint)]
        path = write_list(tmp_path / "w.toml", named, late="drop", late_s=1.0, kept=16)
        flags = ("--target", cast.a, "--federate", path, "--sessions", SESSIONS, "--threads", 1)
        with running(*flags, systemd=systemd):
            systemd.await_("READY", "1")
            kill(two)
            info = systemd.await_("STATUS", "serving", since=len(systemd.received))
            assert info.endswith("; b: gone")
            with worker(cast.b, listen=two.endpoint):
                since = len(systemd.received)
                while "; b: " in info:  # gone, then being attached
                    info = systemd.await_("STATUS", "serving", since=since)
                    since = len(systemd.received)
                assert re.search(r" \d+ passes$", info)


def test_under_drop_an_edge_begins_with_those_that_are_there(
    cast: Cast, tmp_path: Path, systemd: Systemd
) -> None:
    with worker(cast.a) as item:
        settings = {"late": "drop", "late_s": 1.0, "give_up_s": 2.0, "kept": 16}
        path = write_list(tmp_path / "w.toml", [("a", item.endpoint), ("b", away())], **settings)
        edge = waiting_edge(cast, path, systemd)
        try:
            began_s = time.monotonic()
            with Device(cast.draft, edge.await_endpoint(), threads=1) as device:
                assert time.monotonic() - began_s < 2.0 + 2 * patience_s()
                got = device.generate(PROMPT, protocol="greedy", max_tokens=30).tokens
            alone = Ensemble([cast.a], kept=16)
            assert got == [*alone.choices(PROMPT, got, GREEDY)]
            systemd.await_("STATUS", "serving")
            assert any(
                "b: not there yet" in reply.get("STATUS", "") for _, reply in systemd.received
            )
        finally:
            edge.kill()


def test_under_drop_an_edge_without_any_worker_ends(cast: Cast, tmp_path: Path) -> None:
    settings = {"late": "drop", "late_s": 0.5, "give_up_s": 1.0}
    path = write_list(tmp_path / "w.toml", [("a", away()), ("b", away())], **settings)
    with (
        pytest.raises(TargetLostError, match="a: not there yet, b: not there yet"),
        EdgeServer(cast.a, federate=path, threads=1),
    ):
        pass


@pytest.mark.parametrize(("blow", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_an_edge_that_waits_can_be_stopped(
    cast: Cast, tmp_path: Path, systemd: Systemd, blow: signal.Signals, code: int
) -> None:
    path = write_list(tmp_path / "w.toml", [("a", away())])
    edge = waiting_edge(cast, path, systemd)
    try:
        systemd.await_("STATUS", "waiting for nodes: ")
        began_s = time.monotonic()
        edge.signal(blow)
        assert edge.ends() == code
        assert time.monotonic() - began_s < patience_s()
        assert not any("Traceback" in line for line in edge.lines)
    finally:
        edge.kill()


def test_an_edge_that_waits_goes_when_its_parent_is_killed(cast: Cast, tmp_path: Path) -> None:
    path = write_list(tmp_path / "w.toml", [("a", away())])
    script = (
        "from pilotfish import EdgeServer\n"
        f"EdgeServer({str(cast.a)!r}, federate={str(path)!r}, threads=1).start()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    deadline_s = time.monotonic() + 30
    while not (result := children(process.pid)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    time.sleep(2.0)  # by now it waits
    process.kill()
    process.communicate()
    await_end(result[0])


# Lists that cannot be served


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("", 78, "missing required field `worker`"),
        ('[[worker]]\naddress = "nonsense"\n', 77, "names no key"),
        ('[[worker]]\naddress = "tcp://127.0.0.1:99999"\n', 64, "tcp://HOST:PORT"),
        ('[[worker]]\naddress = "tcp://10.0.0.1:7078"\n', 77, "names no key"),
        ('[[worker]]\naddress = "tcp://127.0.0.1:1"\nkey = "x.pub"\n', 77, "x.pub cannot be read"),
        (
            '[[worker]]\naddress = "tcp://127.0.0.1:1"\n[[worker]]\naddress = "ipc://"\n',
            64,
            "tcp://HOST:PORT",
        ),
    ],
)
def test_lists_that_cannot_be_served(
    cast: Cast, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int, says: str
) -> None:
    path = tmp_path / "w.toml"
    path.write_text(text)
    path.chmod(0o644)
    line = refusal(capsys, code, "edge", "serve", "--target", cast.a, "--federate", path)
    assert says in line


def test_more_sessions_than_a_step_has_room_for(
    cast: Cast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_list(tmp_path / "w.toml", [("a", away())])
    arguments = ("--target", cast.a, "--federate", path, "--sessions", 1025)
    assert "1024" in refusal(capsys, 64, "edge", "serve", *arguments)


@pytest.mark.parametrize("flags", [("--late", 3), ("--give-up", 5), ("--stages", 2)])
def test_settings_that_would_not_be_heeded_are_refused(
    cast: Cast, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[object, ...]
) -> None:
    path = write_list(tmp_path / "w.toml", [("a", away())])
    arguments = ("--target", cast.a, "--federate", path, *flags)
    assert "together with --cluster ray" in refusal(capsys, 78, "edge", "serve", *arguments)


def test_a_stage_has_no_weight(
    cast: Cast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stages.toml"
    path.write_text('[[stage]]\naddress = "tcp://127.0.0.1:1"\nweight = 0.5\n')
    path.chmod(0o644)
    line = refusal(capsys, 78, "edge", "serve", "--target", cast.a, "--pipeline", path)
    assert "`weight`" in line


def test_a_federation_has_no_hidden_states_for_a_head(
    cast: Cast, tmp_path: Path, head: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with worker(cast.a) as item:
        path = write_list(tmp_path / "w.toml", [("a", item.endpoint)])
        arguments = ("--target", cast.a, "--federate", path, "--head", head, "--sessions", SESSIONS)
        refusal(capsys, 64, "edge", "serve", *arguments)
