"""What happens to connections through the emulator when one side ends, breaks, or is not there."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pilotfish.base.errors import (
    EdgeUnreachableError,
    ListenError,
    TraceError,
    UnsupportedError,
)
from pilotfish.emulation.emulator import Conditions, Emulator, Traffic
from tests.support.tcp import connected, echo, received, serving


def resident_bytes(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def until(holds, seconds=10.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def reset(client):
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def test_a_half_closed_connection_still_answers():
    def answer(connection):
        total = sum(len(part) for part in iter(lambda: connection.recv(65536), b""))
        time.sleep(0.05)
        connection.sendall(str(total).encode())

    with (
        serving(answer) as endpoint,
        Emulator(endpoint, Conditions(rtt_s=0.02)) as link,
        connected(link.endpoint) as client,
    ):
        client.sendall(bytes(100_000))
        client.shutdown(socket.SHUT_WR)
        assert received(client, 100) == b"100000"
        until(lambda: link.traffic().down_bytes == 6)
        assert link.traffic() == Traffic(up_bytes=100_000, down_bytes=6, connections=1)


def test_a_reset_crosses_the_link():
    ended = threading.Event()
    errors: list[OSError] = []
    times: list[float] = []

    def wait(connection):
        connection.sendall(b"x")
        try:
            while connection.recv(100):
                pass
        except OSError as error:
            errors.append(error)
        times.append(time.monotonic())
        ended.set()

    with serving(wait) as endpoint, Emulator(endpoint, Conditions(rtt_s=0.2)) as link:
        client = connected(link.endpoint)
        received(client, 1)
        start = time.monotonic()
        reset(client)
        assert ended.wait(5)
    assert isinstance(errors[0], ConnectionResetError)
    assert times[0] - start == pytest.approx(0.1, abs=0.03)


def test_an_edge_that_resets_resets_the_device():
    with serving(reset) as endpoint, Emulator(endpoint, Conditions(rtt_s=0.02)) as link:
        for _ in range(3):
            with connected(link.endpoint) as client, pytest.raises(ConnectionResetError):
                client.recv(100)


def test_an_absent_edge_closes_the_connection_and_may_come_later(capfd):
    with serving(echo) as endpoint:
        port = int(endpoint.rsplit(":", 1)[1])
    with Emulator(endpoint) as link:
        for _ in range(5):
            with suppress(ConnectionError), connected(link.endpoint) as client:
                assert client.recv(1) == b""
        with serving(echo, port), connected(link.endpoint) as client:
            client.sendall(b"there")
            assert received(client, 5) == b"there"
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        f"{endpoint} does not answer: Connection refused",
        f"{endpoint} answers again",
    ]


def test_a_reader_that_does_not_read_costs_bounded_memory():
    go = threading.Event()
    sizes: list[int] = []

    def dawdle(connection):
        go.wait(30)
        sizes.append(sum(len(part) for part in iter(lambda: connection.recv(1 << 20), b"")))

    with (
        serving(dawdle) as endpoint,
        Emulator(endpoint) as link,
        connected(link.endpoint) as client,
    ):
        before = resident_bytes(link.pid)
        sent = 0
        client.settimeout(0.5)
        with suppress(TimeoutError):
            while sent < 400_000_000:
                sent += client.send(bytes(1 << 20))
        assert sent < 80_000_000
        assert resident_bytes(link.pid) - before < 80_000_000
        # others are not held up
        with connected(link.endpoint) as other:
            other.sendall(b"x")
            until(lambda: link.traffic().connections == 2)
        go.set()
        client.settimeout(20)
        client.shutdown(socket.SHUT_WR)
        until(lambda: sent in sizes)


def test_a_device_that_breaks_off_without_a_reader_leaves_nothing_behind():
    with (
        serving(lambda connection: time.sleep(20)) as endpoint,
        Emulator(endpoint, Conditions(rtt_s=0.01)) as link,
    ):
        idle = len(os.listdir(f"/proc/{link.pid}/fd"))
        clients = [connected(link.endpoint) for _ in range(3)]
        for client in clients:
            client.settimeout(0.1)
            with suppress(TimeoutError):
                for _ in range(200):
                    client.send(bytes(1 << 20))
        for client in clients:
            reset(client)
        until(lambda: len(os.listdir(f"/proc/{link.pid}/fd")) == idle)


@pytest.mark.timing
def test_many_connections_at_once():
    with serving(echo) as endpoint, Emulator(endpoint, Conditions(rtt_s=0.03)) as link:
        clients = [connected(link.endpoint) for _ in range(100)]
        start = time.monotonic()
        for number, client in enumerate(clients):
            client.sendall(bytes([number]) * 1000)
        for number, client in enumerate(clients):
            assert received(client, 1000) == bytes([number]) * 1000
            client.close()
        assert time.monotonic() - start < 1.0
        idle = 12
        until(lambda: len(os.listdir(f"/proc/{link.pid}/fd")) < idle)
        # and it is at rest
        busy = Path(f"/proc/{link.pid}/stat").read_text().split()[13:15]
        time.sleep(0.3)
        later = Path(f"/proc/{link.pid}/stat").read_text().split()[13:15]
        assert sum(map(int, later)) - sum(map(int, busy)) <= 3


def test_more_connections_than_descriptors_wait_their_turn():
    program = (
        "import resource, sys\n"
        "from pilotfish.emulation.emulator import Emulator\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))\n"
        "with Emulator(sys.argv[1]) as link:\n"
        "    print(link.endpoint, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with serving(echo) as endpoint:
        child = subprocess.Popen(
            [sys.executable, "-c", program, endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        clients = [connected(address) for address in [child.stdout.readline().strip()] * 12]
        for number, client in enumerate(clients):
            client.sendall(bytes([number]))
        for number, client in enumerate(clients):  # in turn: each one that ends makes room
            assert received(client, 1) == bytes([number])
            client.close()
        _, reply = child.communicate("", timeout=20)
    assert reply.splitlines() == ["8 connections are open, the maximum; new ones wait"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_proxy_ends_with_its_parent(number):
    program = (
        "import sys\n"
        "from pilotfish.emulation.emulator import Emulator\n"
        "link = Emulator('tcp://127.0.0.1:9').start()\n"
        "print(link.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.send_signal(number)
    parent.communicate()
    until(lambda: not alive(pid))


def test_a_killed_proxy_is_told():
    with Emulator("tcp://127.0.0.1:9") as link:
        os.kill(link.pid, signal.SIGKILL)
        with pytest.raises(ListenError, match="emulator"):
            link.set(rtt_s=1.0)
    with pytest.raises(ListenError, match="not running"):
        link.traffic()


# -- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rtt_s": -0.1}, "rtt_s is -0.1"),
        ({"rtt_s": float("nan")}, "rtt_s is nan"),
        ({"jitter_s": float("inf")}, "jitter_s is inf"),
        ({"up_bps": 0.0}, "up_bps is 0.0"),
        ({"down_bps": float("inf")}, "down_bps is inf"),
        ({"loss": 1.0}, "loss is 1.0"),
        ({"loss": -0.1}, "loss is -0.1"),
        ({"buffer_bytes": 0}, "buffer_bytes is 0"),
        ({"up_bps": 1e6, "trace_up": "x"}, "both a rate and a trace for up"),
    ],
)
def test_links_that_no_one_has(wrong, says):
    with pytest.raises(UnsupportedError, match=says):
        Conditions(**wrong)


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (UnsupportedError, {"connect": "127.0.0.1:7077"}),
        (UnsupportedError, {"connect": "tcp://127.0.0.1:0"}),
        (UnsupportedError, {"connect": "tcp://127.0.0.1:70000"}),
        (UnsupportedError, {"connect": "ipc://edge"}),
        (EdgeUnreachableError, {"connect": "tcp://no-such-host.invalid:7077"}),
        (ListenError, {"listen": "127.0.0.1"}),
        (ListenError, {"listen": "tcp://192.0.2.1:0"}),
        (TraceError, {"conditions": Conditions(trace_down="no/such/trace")}),
    ],
)
def test_what_cannot_start_says_why(error, wrong):
    with pytest.raises(error) as caught:
        Emulator(**{"connect": "tcp://127.0.0.1:9", **wrong}).start()
    assert "\n" not in str(caught.value)


def test_a_taken_port(tmp_path):
    with (
        Emulator("tcp://127.0.0.1:9") as link,
        pytest.raises(ListenError, match="in use"),
        Emulator("tcp://127.0.0.1:9", listen=link.endpoint),
    ):
        pass


def test_a_bad_trace_changes_nothing(tmp_path):
    bad = tmp_path / "trace"
    bad.write_text("1\ntwo\n")
    with Emulator("tcp://127.0.0.1:9", Conditions(rtt_s=0.01)) as link:
        with pytest.raises(TraceError, match="line 2"):
            link.set(trace_up=bad)
        assert link.conditions == Conditions(rtt_s=0.01)
        link.set(rtt_s=0.02)


# -- the command -----------------------------------------------------------------------------------


def command(*arguments, **streams):
    return subprocess.Popen(
        [sys.executable, "-m", "pilotfish", "emulate", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **streams,
    )


@pytest.mark.parametrize(
    ("number", "code", "last"),
    [(signal.SIGINT, 130, ["pilotfish: interrupted"]), (signal.SIGTERM, 0, [])],
)
def test_the_command_says_what_passed(number, code, last):
    with serving(echo) as endpoint:
        emulator = command(
            *("--listen", "tcp://127.0.0.1:0", "--connect", endpoint, "--rtt", "20ms"),
            *("--up", "20mbit", "--down", "100mbit", "--jitter", "1ms", "--json", "-"),
        )
        first = emulator.stderr.readline()
        assert first.startswith(f"pilotfish: the link to {endpoint} begins at tcp://127.0.0.1:")
        with connected(first.split()[-1]) as client:
            client.sendall(bytes(5000))
            received(client, 5000)
        emulator.send_signal(number)
        out, err = emulator.communicate(timeout=20)
    assert emulator.returncode == code
    lines = err.splitlines()
    assert lines[0].startswith("pilotfish: forwarded 5,000 bytes up and 5,000 down in ")
    assert lines[1:] == last
    figures = json.loads(out)
    assert figures["up_bytes"] == figures["down_bytes"] == 5000
    assert figures["link"]["up_bps"] == 20e6


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--rtt", "50"], 2, "'50' is not a time"),
        (["--up", "20mb"], 2, "'20mb' is not a rate"),
        (["--loss", "100%"], 2, "below 100%"),
        (["--up", "1mbit", "--trace-up", "x"], 2, "not allowed with"),
        (["--trace-down", "no/such/trace"], 65, "cannot be read: No such file"),
        (["--listen", "tcp://192.0.2.1:0"], 71, "Cannot listen on tcp://192.0.2.1:0"),
        (["--connect", "nowhere"], 64, "'nowhere' is not an address"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, code, says):
    emulator = command("--listen", "tcp://127.0.0.1:0", *arguments)
    out, err = emulator.communicate(timeout=20)
    assert emulator.returncode == code
    assert says in err.splitlines()[-1]
    assert not out
    assert "Traceback" not in err
