"""Ends that are absent, die, freeze or talk nonsense: one clear line, in time, and nothing left.

A line on stderr within three seconds (the interpreter's own start aside), the exit code of
`wire.errors`, no traceback, no process left behind.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.cli import main
from pilotfish.wire import keys
from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.errors import EdgeLostError, ListenError
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.messages import Ping
from tests.conftest import Pair
from tests.support.daemons import free_port

PROMPT = [3, 1, 4, 1, 5]


def patience_s() -> float:
    """Three seconds; longer where more wants to run than there are cores."""
    return 3.0 * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "pilotfish", *map(str, arguments)]


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def startup_s() -> float:
    """How long the command takes to do nothing, on this machine, as busy as it is."""
    began = time.monotonic()
    subprocess.run(command("--version"), check=True, capture_output=True)
    return 2 * (time.monotonic() - began)


def complaint(process: subprocess.Popen[str], code: int, within_s: float) -> str:
    """The one line on stderr of a process that ends in time and with this code."""
    began = time.monotonic()
    try:
        _, stderr = process.communicate(timeout=within_s + 20)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"still running: {process.communicate()}")
    # As a shell shows it: Python may end by the very signal where that came while a string was
    # executed, as dataclasses do, although it was caught.
    shown = 128 - process.returncode if process.returncode < 0 else process.returncode
    assert shown == code, stderr
    assert "Traceback" not in stderr
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("pilotfish: ")
    assert time.monotonic() - began < within_s
    return lines[0]


def await_end(pid: int) -> None:
    deadline = time.monotonic() + patience_s()
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie only waits for somebody to take note of its end


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# Nobody there, or nobody who lets us in


@pytest.fixture
def strange_listener() -> Iterator[Callable[[bytes], str]]:
    """A TCP server that says these bytes to whoever connects, and nothing else."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.1)
    stop = threading.Event()
    connections = []
    greeting = b""

    def serve() -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connections.append(connection)
            connection.sendall(greeting)

    def talk(what: bytes) -> str:
        nonlocal greeting
        greeting = what
        thread.start()
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"

    thread = threading.Thread(target=serve)
    yield talk
    stop.set()
    if thread.ident is not None:
        thread.join()
    for connection in [*connections, listener]:
        connection.close()


def device_run(pair: Pair, address: str, *more: object) -> subprocess.Popen[str]:
    return start("device", "run", "abc", "--draft", pair.draft, "--edge", address, *more)


def refusal(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """The one line of a command that ends in time and with this code; it runs in this process."""
    began = time.monotonic()
    assert main(list(map(str, arguments))) == code
    assert time.monotonic() - began < patience_s()
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("pilotfish: ")
    return line


@pytest.fixture
def device_fails(pair: Pair, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `device run` towards an address, which must end with a code and a line."""

    def run(code: int, address: str, *more: object) -> str:
        arguments = ("device", "run", "abc", "--draft", pair.draft, "--edge", address, *more)
        return refusal(capsys, code, *arguments)

    return run


def test_edge_absent(pair: Pair, startup_s: float, device_fails: Callable[..., str]) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    line = complaint(device_run(pair, address), 69, startup_s + patience_s())
    assert address in line
    assert device_fails(69, address) == line


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_something_else_listens_there(
    device_fails: Callable[..., str], strange_listener: Callable[[bytes], str], greeting: bytes
) -> None:
    address = strange_listener(greeting)
    assert address in device_fails(69, address)


def test_a_device_that_is_not_on_the_list(
    pair: Pair, locked_edge: EdgeServer, key_folders, startup_s: float
) -> None:
    process = device_run(pair, locked_edge.endpoint, "--keys", key_folders["eve"])
    assert "keys allow" in complaint(process, 77, startup_s + patience_s())


def test_a_wrong_edge_key(
    device_fails: Callable[..., str], locked_edge: EdgeServer, tmp_path: Path
) -> None:
    folder = tmp_path / "keys"
    keys.create(folder, keys.DEVICE)
    other = keys.create(tmp_path / "other", keys.EDGE)
    (folder / "edge.pub").write_bytes(other.read_bytes())
    assert "edge.pub" in device_fails(77, locked_edge.endpoint, "--keys", folder)


def test_no_keys_where_keys_are_needed(
    device_fails: Callable[..., str], locked_edge: EdgeServer
) -> None:
    assert "--keys" in device_fails(77, locked_edge.endpoint)


def test_keys_where_there_are_none(
    device_fails: Callable[..., str], edge: EdgeServer, key_folders
) -> None:
    assert "keys" in device_fails(77, edge.endpoint, "--keys", key_folders["alice"])


@pytest.mark.parametrize(
    "address",
    [
        "tcp://10.1.2.3:7077",  # beyond loopback without keys
        "127.0.0.1:7077",
        "tcp://[::1:7077",
        "tcp://127.0.0.1:99999",
        "tcp://127.0.0.1:x",
        "tcp://127.0.0.1",
        "nonsense",
        "",
    ],
)
def test_addresses_that_are_none(device_fails: Callable[..., str], address: str) -> None:
    device_fails(64, address)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--target", "nowhere"], 66),
        (["--listen", "tcp://0.0.0.0:0"], 71),
        (["--listen", "tcp://*:0"], 71),
        (["--listen", "tcp://127.0.0.1:99999"], 71),
        (["--listen", "nonsense"], 71),
        (["--keys", "nowhere"], 77),
        (["--provider", "abacus"], 69),
    ],
)
def test_edges_that_cannot_serve(
    pair: Pair, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int
) -> None:
    refusal(capsys, code, "edge", "serve", "--target", pair.target, *arguments)


@pytest.mark.parametrize(
    "flag",
    ["--sessions=0", "--sessions-per-client=0", "--context=0", "--max-window=-1", "--message-mib=0",
     "--rate=0", "--idle=-1", "--rate=nan", "--threads=0", "--message-mib=99999"],
)  # fmt: skip
def test_limits_that_make_no_sense(
    pair: Pair, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["edge", "serve", "--target", str(pair.target), flag])
    assert ended.value.code == 2
    assert flag.split("=", maxsplit=1)[0] in capsys.readouterr().err


def test_an_address_in_use(pair: Pair, edge: EdgeServer, startup_s: float) -> None:
    process = start("edge", "serve", "--target", pair.target, "--listen", edge.endpoint)
    assert edge.endpoint in complaint(process, 71, startup_s + patience_s())
    with pytest.raises(ListenError), EdgeServer(pair.target, edge.endpoint):
        pass


def test_figures_that_cannot_be_written(
    pair: Pair, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "nowhere" / "figures.json"
    arguments = ["device", "run", "abc", "--draft", pair.draft, "--protocol", "local"]
    assert main([*map(str, arguments), "--max-tokens", "3", "--json", str(path)]) == 74
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line


# In the middle of the work


@pytest.fixture(scope="module")
def default_target(default_artifacts: Pair) -> Path:
    """The target of the demo: it takes a while to load."""
    return default_artifacts.target


@pytest.fixture
def running(long_pair: Pair) -> Iterator[tuple[EdgeServer, subprocess.Popen[str]]]:
    """An edge, and a device in the middle of a long answer."""
    with EdgeServer(long_pair.target, context=32768, threads=1) as server:
        process = device_run(
            long_pair, server.endpoint, "--max-tokens", 32000, "--window", 1, "--threads", 1
        )
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        yield server, process
        process.kill()
        process.communicate()
        os.kill(server.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("blow", "unnoticed_s"),
    [
        (signal.SIGKILL, 0.0),
        (signal.SIGTERM, 0.0),
        (signal.SIGSTOP, 1.2),  # so long silence may last before it is noticed
    ],
)
def test_edge_lost_in_the_middle(running, blow: signal.Signals, unnoticed_s: float) -> None:
    server, process = running
    os.kill(server.pid, blow)
    line = complaint(process, 69, patience_s() + unnoticed_s)
    assert server.endpoint in line


def test_interrupted_device(running) -> None:
    server, process = running
    process.send_signal(signal.SIGINT)
    assert complaint(process, 130, patience_s()) == "pilotfish: interrupted"
    assert alive(server.pid)


def test_interrupted_device_of_a_frozen_edge(running) -> None:
    server, process = running
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert complaint(process, 130, patience_s()) == "pilotfish: interrupted"


@pytest.mark.parametrize(("blow", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_stopping_an_edge(pair: Pair, blow: signal.Signals, code: int) -> None:
    process = start("edge", "serve", "--target", pair.target, "--listen", "tcp://127.0.0.1:0")
    assert process.stderr is not None
    line = process.stderr.readline()
    address = re.fullmatch(r"pilotfish: the edge serves on (tcp://127\.0\.0\.1:\d+)\n", line)
    assert address
    with Device(pair.draft, address[1]) as device:
        assert device.generate(PROMPT, max_tokens=4).tokens
        began = time.monotonic()
        process.send_signal(blow)
        _, rest = process.communicate(timeout=20)
        assert time.monotonic() - began < patience_s()
        assert process.returncode == code
        assert rest in ("", "pilotfish: interrupted\n")
        began = time.monotonic()
        with pytest.raises(EdgeLostError, match="gone"):
            device.generate(PROMPT, max_tokens=4)
        assert time.monotonic() - began < patience_s()


def loading_edge(target: Path, *options: object) -> tuple[subprocess.Popen[str], str]:
    """An edge that listens already, but does not serve yet; and its address."""
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    process = start("edge", "serve", "--target", target, "--listen", address, *options)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.01)
        else:
            return process, address
    process.kill()
    pytest.fail("the edge does not listen")


def test_an_edge_that_is_still_loading_is_not_absent(default_target: Path, key_folders) -> None:
    process, address = loading_edge(default_target, "--keys", key_folders["edge"])
    channel = EdgeChannel(address, DeviceKeys.load(key_folders["alice"]), 2**20)
    assert process.stderr is not None
    try:
        deadline = time.monotonic() + patience_s()
        while not channel.connected and time.monotonic() < deadline:
            channel.receive(0.1)
        assert channel.connected
        assert not select.select([process.stderr], [], [], 0)[0]  # it does not yet say it serves
        channel.send(Ping(nonce=5))
        while (answer := channel.receive(60)) is None:
            pass
        assert answer[0].nonce == 5
        assert "serves on" in process.stderr.readline()
    finally:
        channel.close()
        process.terminate()
        process.communicate()


@pytest.mark.parametrize("locked", [False, True])
def test_interrupted_edge_that_is_still_loading(
    default_target: Path, key_folders, locked: bool
) -> None:
    options = ["--keys", key_folders["edge"]] if locked else []
    process, _ = loading_edge(default_target, *options)
    process.send_signal(signal.SIGINT)
    assert complaint(process, 130, patience_s()) == "pilotfish: interrupted"


# Nothing left behind


def test_an_edge_goes_when_its_parent_is_killed(pair: Pair) -> None:
    script = (
        "import sys, time; from pilotfish import EdgeServer\n"
        f"with EdgeServer({str(pair.target)!r}) as edge:\n"
        "    print(edge.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert alive(pid)
    process.kill()
    process.communicate()
    await_end(pid)


def test_an_edge_keeps_to_its_cores(pair: Pair) -> None:
    core = max(os.sched_getaffinity(0))
    with EdgeServer(pair.target, cores={core}) as edge, Device(pair.draft, edge.endpoint) as device:
        device.generate("abc", max_tokens=4)
        threads = [int(path.name) for path in Path(f"/proc/{edge.pid}/task").iterdir()]
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {
            frozenset({core})
        }


def test_an_edge_that_ends_by_itself_is_told_of(pair: Pair) -> None:
    server = EdgeServer(pair.target).start()
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    with pytest.raises(EdgeLostError):
        print(server.pid)


@pytest.mark.usefixtures("default_target")
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT])
def test_a_demo_that_is_cut_short(blow: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("demo"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(20)
    (edge_pid,) = children(process.pid)
    began = time.monotonic()
    process.send_signal(blow)
    _, stderr = process.communicate(timeout=20)
    assert time.monotonic() - began < patience_s()
    await_end(edge_pid)
    assert process.returncode == (130 if blow == signal.SIGINT else -blow)
    assert "Traceback" not in stderr
    if blow == signal.SIGINT:
        assert stderr.splitlines()[-1] == "pilotfish: interrupted"
        assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("default_target")
def test_the_demos_drafter_is_accepted_nearly_always(tmp_path: Path) -> None:
    told = tmp_path / "figures.json"
    subprocess.run(
        command("demo", "--max-tokens", "48", "--json", told), check=True, capture_output=True
    )
    rows = json.loads(told.read_text())["protocols"]
    assert list(rows) == ["greedy", "dsd", "coupled", "stream", "stream, T=1", "local"]
    drafting = [rows.pop(name) for name in ("greedy", "dsd", "coupled")]
    assert min(row["acceptance"] for row in drafting) > 0.85  # rounded once more: 0.6 to 0.75
    assert min(row["tokens_per_round"] for row in drafting) > 3.5
    assert all(row["speedup"] > 0 for row in drafting)
    assert not any("speedup" in row for row in rows.values())
