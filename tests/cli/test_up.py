"""`pilotfish up` with real processes: what it prints works, and neither end outlives the other."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pilotfish.cli import up
from tests.conftest import Pair
from tests.support import web
from tests.support.commands import await_end, children, command, refusal, start
from tests.support.terminal import TerminalProcess


def flags(pair: Pair) -> list[object]:
    return ["--draft", pair.draft, "--target", pair.target, "--listen", "127.0.0.1:0"]


@contextmanager
def running(pair: Pair) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `up` until it serves; yields the process and what it has printed."""
    process = start("up", *flags(pair))
    try:
        assert process.stdout is not None
        printed = ""
        while "stop" not in printed:
            line = process.stdout.readline()
            assert line, process.communicate()
            printed += line
        yield process, printed
    finally:
        process.kill()
        process.communicate()


def test_the_printed_lines_work_and_ctrl_c_stops_both_ends(pair: Pair) -> None:
    with running(pair) as (process, printed):
        page = re.search(r"chat page +(\S+)", printed)
        assert page is not None
        assert "<html" in web.get(page[1]).text
        request = printed[printed.index("curl") : printed.index("stop")].replace("\\\n", "")
        done = subprocess.run(shlex.split(request), capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"
        status = web.get(f"{page[1]}status").json()
        assert status["link"]["state"] == "connected"
        assert status["last"]["tokens"] > 0
        [edge] = children(process.pid)
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=60)
        assert process.returncode == 130, complaint
        assert "Traceback" not in complaint
        await_end(edge)


def test_a_killed_edge_ends_the_service_with_a_reason(pair: Pair) -> None:
    with running(pair) as (process, _):
        [edge] = children(process.pid)
        os.kill(edge, signal.SIGKILL)
        _, complaint = process.communicate(timeout=60)
        assert process.returncode == 69, complaint
        assert f"process {edge} ended by signal 9" in complaint.splitlines()[-1]


def test_a_closed_terminal_and_a_killed_parent_leave_no_process(pair: Pair) -> None:
    terminal = TerminalProcess(command("up", *flags(pair)), os.environ)
    terminal.until("Ctrl-C")
    [edge] = children(terminal.pid)
    terminal.close()
    assert terminal.ends() == 129
    await_end(edge)
    with running(pair) as (process, _):
        [edge] = children(process.pid)
        process.kill()
        await_end(edge)


def test_a_port_in_use_is_named_and_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert up._free_address(f"127.0.0.1:{port}") == "127.0.0.1:0"
    assert f"port {port} is in use" in capsys.readouterr().err
    assert up._free_address(f"127.0.0.1:{port}") == f"127.0.0.1:{port}"


def test_a_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pilotfish.cli.extras.find_spec", lambda name: None)
    assert "serve" in refusal(capsys, 64, "up")
