"""An edge that is absent, or another than was wanted: one clear line, in time.

A line on stderr within three seconds (the interpreter's own start aside), the exit code of
`base.errors`, no traceback.
"""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pilotfish import EdgeServer
from pilotfish.base.errors import ListenError
from pilotfish.cli import main
from pilotfish.wire import keys
from tests.conftest import Pair
from tests.support.commands import (
    command,
    complaint,
    device_run,
    patience_s,
    refusal,
    start,
)
from tests.support.daemons import free_port


@pytest.fixture(scope="module")
def startup_s() -> float:
    """How long the command takes to do nothing, on this machine, as busy as it is."""
    began = time.monotonic()
    subprocess.run(command("--version"), check=True, capture_output=True)
    return 2 * (time.monotonic() - began)


# No edge, or none that admits us


@pytest.fixture
def strange_listener() -> Iterator[Callable[[bytes], str]]:
    """A TCP server that sends these bytes to every client, and nothing else."""
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
    cut, line = capsys.readouterr().err.splitlines()
    assert cut.startswith("the answer was cut")
    assert str(path) in line
