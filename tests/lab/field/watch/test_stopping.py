"""A watch, and `probe --watch`, end soon after a signal, whatever they wait for."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from pilotfish import EdgeServer
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.lab.field.writable_run_file import has_begun
from tests.support.daemons import free_port
from tests.support.measuring import answers
from tests.support.watching import numbers

# yields an address, and whether something has come there
Peer = Callable[[], AbstractContextManager[tuple[str, Callable[[], bool]]]]

STOPPED_S = 5.0
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def hangup_is_not_ignored() -> Iterator[None]:
    """The tests may themselves run under nohup, which commands inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def watch_command(endpoint: str, out: Path, prompts: Path, *more: object) -> list[str]:
    flags = ["--edge", endpoint, "--out", out, "--prompts", prompts, "--max-tokens", 6, *more]
    return [sys.executable, "-m", "pilotfish", "field", "watch", *map(str, flags)]


def probe_command(endpoint: str, out: Path) -> list[str]:
    words = ["probe", endpoint, "--watch", "--every", "0.1", "--json", str(out)]
    return [sys.executable, "-m", "pilotfish", *words]


def stopped(command: list[str], when: Callable[[], object], number: int) -> tuple[int, float, str]:
    """Run the command, send it a signal when that holds; return its code, time to end, stderr."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            until_s = time.monotonic() + WAIT_S
            while not when():
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < until_s
                time.sleep(0.02)
            begun_s = time.monotonic()
            process.send_signal(number)
            _, err = process.communicate(timeout=WAIT_S)
            return process.returncode, time.monotonic() - begun_s, err
        finally:
            process.kill()


def after(seconds: float, condition: Callable[[], object]) -> Callable[[], bool]:
    """Return a condition that holds so long after another one began to hold."""
    since_s: list[float] = []

    def holds() -> bool:
        if not since_s and condition():
            since_s.append(time.monotonic())
        return bool(since_s) and time.monotonic() - since_s[0] >= seconds

    return holds


@contextmanager
def silent_tcp() -> Iterator[tuple[str, Callable[[], bool]]]:
    """Accepts connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        ends: list[socket.socket] = []

        def came() -> bool:
            with suppress(BlockingIOError):
                ends.append(server.accept()[0])
            return bool(ends)

        yield f"tcp://127.0.0.1:{server.getsockname()[1]}", came
        for end in ends:
            end.close()


@contextmanager
def silent_edge() -> Iterator[tuple[str, Callable[[], bool]]]:
    """Completes the handshake of the transport, takes messages, and answers none."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        yield f"tcp://127.0.0.1:{port}", lambda: bool(router.poll(0))
    finally:
        router.close(0)
        context.term()


@contextmanager
def black_hole() -> Iterator[tuple[str, Callable[[], bool]]]:
    """Its queue of connections is full, so the kernel drops further requests to connect."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        ends = [socket.socket() for _ in range(4)]
        for end in ends:
            end.setblocking(False)
            end.connect_ex(server.getsockname())
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}", lambda: True
        for end in ends:
            end.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("peer", [silent_tcp, silent_edge, black_hole])
def test_an_edge_that_does_not_answer(peer: Peer, number: int, out: Path, prompts: Path) -> None:
    with peer() as (endpoint, came):
        command = watch_command(endpoint, out, prompts)
        when = after(0.5, lambda: has_begun(out) and came())
        code, took_s, err = stopped(command, when, number)
    assert took_s < STOPPED_S
    assert code == (130 if number == signal.SIGINT else 0)
    assert "rows were written" in err
    assert not out.with_name(out.name + "-wal").exists()


@pytest.mark.parametrize("peer", [silent_tcp, silent_edge])
def test_a_probe_of_an_edge_that_does_not_answer(peer: Peer, out: Path) -> None:
    with peer() as (endpoint, came):
        command = probe_command(endpoint, out)
        code, took_s, err = stopped(command, after(0.5, came), signal.SIGTERM)
    assert took_s < STOPPED_S
    assert code == 0
    assert "pings in" in err


@pytest.mark.parametrize(
    "late_s", [0.5, 5.0, *(pytest.param(late_s, marks=pytest.mark.slow) for late_s in (12.0, 20.0))]
)
def test_a_link_of_two_seconds(edge: EdgeServer, out: Path, prompts: Path, late_s: float) -> None:
    """The signal comes while the device opens, in a warm-up answer, or in a probe."""
    with Emulator(edge.endpoint, Conditions(rtt_s=2.0)) as road:
        command = watch_command(road.endpoint, out, prompts, "--protocols", "stream")
        when = after(late_s, lambda: has_begun(out))
        code, took_s, err = stopped(command, when, signal.SIGTERM)
    assert took_s < STOPPED_S
    assert code == 0
    assert "rows were written" in err
    assert all(answer.finished or answer.error for answer in answers(out, finished=False))


def test_a_radio_that_does_not_answer(
    edge: EdgeServer, out: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    script = tmp_path / "mmcli"
    script.write_text(f"#!/bin/sh\ntouch {begun}\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    command = watch_command(edge.endpoint, out, prompts)
    code, took_s, _ = stopped(command, begun.exists, signal.SIGTERM)
    assert took_s < STOPPED_S
    assert code == 0
    assert len(numbers(out)) <= 1


def test_a_second_signal_ends_it_at_once(out: Path, prompts: Path) -> None:
    with (
        silent_edge() as (endpoint, came),
        subprocess.Popen(
            watch_command(endpoint, out, prompts), stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        while not came():
            time.sleep(0.02)
        begun_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
    assert time.monotonic() - begun_s < 2.0


def test_an_edge_that_is_away(out: Path, prompts: Path) -> None:
    command = watch_command(f"tcp://127.0.0.1:{free_port()}", out, prompts)
    code, took_s, _ = stopped(command, after(3.0, lambda: has_begun(out)), signal.SIGHUP)
    assert took_s < STOPPED_S
    assert code == 0
    assert not out.with_name(out.name + "-wal").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_library_that_does_not_return_is_ended(number: int, code: int) -> None:
    """As one that loads a model: no instruction of Python runs meanwhile."""
    program = textwrap.dedent("""
        import hashlib, sys
        from pilotfish.cli.stop_signals import Step, stopping_by
        with stopping_by(Step(lambda: print("stop"), 0.2), Step(lambda: print("end"), 0.2)):
            print("begins", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"a", b"b", 1_000_000_000)
    """)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        begun_s = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == code
    assert time.monotonic() - begun_s < STOPPED_S
    assert "did not stop in time" in err


def test_what_is_lost_by_the_end_of_a_library_is_told() -> None:
    program = textwrap.dedent("""
        import hashlib
        from pilotfish.cli.stop_signals import Step, stopping_by
        with stopping_by(Step(lambda: None, 0.1), lost=lambda: "3 rows are lost."):
            print("begins", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"a", b"b", 1_000_000_000)
    """)
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 74
    assert err.endswith("3 rows are lost.\n")


def test_a_signal_in_the_middle_of_anything(edge: EdgeServer, out: Path, prompts: Path) -> None:
    command = watch_command(edge.endpoint, out, prompts, "--every", "0.1s", "--no-position")
    for turn in range(6):
        before = len(numbers(out)) if has_begun(out) else 0
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                until_s = time.monotonic() + WAIT_S
                while not has_begun(out) or len(numbers(out)) == before:
                    assert time.monotonic() < until_s
                    time.sleep(0.005)
                time.sleep(0.013 * turn)
                begun_s = time.monotonic()
                process.send_signal(signal.SIGTERM)
                assert process.wait(WAIT_S) == 0
                assert time.monotonic() - begun_s < STOPPED_S
            finally:
                process.kill()


def test_rows_that_are_lost_at_the_end_are_told(edge: EdgeServer, out: Path, prompts: Path) -> None:
    """Somebody unmounts the folder of the file between two rounds."""
    folder = out.parent / "card"
    folder.mkdir()
    card = folder / out.name

    def unmounted() -> bool:
        if not has_begun(card) or not numbers(card):
            return False
        folder.rename(out.parent / "unmounted")
        return True

    command = watch_command(edge.endpoint, card, prompts, "--every", "1s")
    code, _, err = stopped(command, after(2.5, unmounted), signal.SIGTERM)
    assert code == 74
    assert re.search(rf"\b[1-9]\d* rows are lost, because .* to {re.escape(str(card))}", err)
    assert not card.exists()
