"""``probe --watch``: time stamps, JSON lines, and outages that do not end it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from pilotfish import EdgeServer
from pilotfish.cli.probe_watch import RttPercentiles
from pilotfish.wire import keys
from tests.conftest import Pair
from tests.support.daemons import free_port

WAIT_S = 60.0
COMMAND = [sys.executable, "-m", "pilotfish", "probe"]


class Watching:
    """A watch that writes JSON lines to a file."""

    def __init__(self, process: subprocess.Popen[str], path: Path) -> None:
        self.process, self.path = process, path

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """Return the objects so far, but not a line that is being written."""
        text = self.path.read_text() if self.path.exists() else ""
        objects = [json.loads(line) for line in text.split("\n")[:-1]]
        return [each for each in objects if kind in ("", each["event"])]

    def awaits(self, condition: Callable[[], object]) -> None:
        until_s = time.monotonic() + WAIT_S
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until_s, self.events()[-3:]
            time.sleep(0.05)

    def awaits_pings(self, number: int = 2) -> None:
        before = len(self.events("ping"))
        self.awaits(lambda: len(self.events("ping")) >= before + number)

    def end(self, number: int = signal.SIGINT) -> tuple[int, str, str]:
        """Send a signal; return the code, stdout and stderr."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, out, err


@contextmanager
def watching(tmp_path: Path, *arguments: object) -> Iterator[Watching]:
    path = tmp_path / "lines.json"
    command = [*COMMAND, *map(str, arguments), "--watch", "--every", "0.1", "--json", str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Watching(process, path)
        finally:
            process.kill()


def test_lines_have_times_and_the_summary_percentiles(edge: EdgeServer, tmp_path: Path) -> None:
    with watching(tmp_path, edge.endpoint) as watch:
        watch.awaits_pings(7)
        code, out, err = watch.end()
    assert code == 130
    heading, *rows = out.splitlines()
    assert "RTT, ms" in heading
    stamp = datetime.strptime(rows[0].split()[0], "%Y-%m-%dT%H:%M:%S.%fZ")
    assert abs(datetime.now(timezone.utc).timestamp() - stamp.timestamp()) < 86400
    assert re.search(r"RTT p50 \d+\.\d+, p90 \d+\.\d+, p99 \d+\.\d+ ms; 0 outages", err)
    assert err.endswith("pilotfish: interrupted\n")
    pings = watch.events("ping")
    assert len(pings) == len(rows)
    assert all(each["lost"] is False for each in pings)
    assert pings[0]["link"]["rtt"] is None or pings[0]["link"]["rtt"]["value"] < 1.0
    clocks = [each["clock_s"] for each in pings]
    assert clocks == sorted(clocks)


def test_json_on_stdout_is_alone_there(edge: EdgeServer) -> None:
    command = [*COMMAND, edge.endpoint, "--watch", "--every", "0.05", "--json", "-", "--no-rates"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        events = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        rest, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert [each["event"] for each in events] == ["ping"] * 3
    assert all(json.loads(line) for line in rest.splitlines())
    assert "pings in" in err


def test_an_edge_that_comes_late_goes_and_comes_back(pair: Pair, tmp_path: Path) -> None:
    port = free_port()
    with watching(tmp_path, f"tcp://127.0.0.1:{port}") as watch:
        watch.awaits(lambda: watch.events("outage"))
        for at in range(2):
            with EdgeServer(pair.target, listen=f"tcp://127.0.0.1:{port}", threads=1):
                watch.awaits(lambda at=at: len(watch.events("back")) == at + 1)  # type: ignore[misc]
                watch.awaits_pings()
            gone_s = time.monotonic()
            watch.awaits(lambda at=at: len(watch.events("outage")) == at + 2)  # type: ignore[misc]
            noticed_s = time.monotonic() - gone_s
        code, out, err = watch.end(signal.SIGTERM)
    assert code == 0
    assert noticed_s < 30.0
    lines = [line.split(maxsplit=1)[1] for line in out.splitlines()]
    assert lines[1].startswith("outage begins: ")
    assert "nothing listens there" in lines[1]
    assert sum(line.startswith("outage begins") for line in lines) == 3
    assert sum(line.startswith("outage ends after ") for line in lines) == 2
    assert "3 outages" in err
    for begin, end in zip(watch.events("outage"), watch.events("back"), strict=False):
        assert 0.0 < end["outage_s"] == pytest.approx(end["clock_s"] - begin["clock_s"], abs=10.0)


def test_other_keys_are_an_outage_until_the_folder_has_them(
    pair: Pair, key_folders: dict[str, Path], tmp_path: Path
) -> None:
    port = free_port()
    mine = shutil.copytree(key_folders["alice"], tmp_path / "mine")
    others = tmp_path / "others"
    public = keys.create(others, keys.EDGE)
    keys.allow(others, mine / "device.pub", "alice")
    listen = f"tcp://127.0.0.1:{port}"
    with watching(tmp_path, listen, "--keys", mine) as watch:
        with EdgeServer(pair.target, listen=listen, keys=key_folders["edge"], threads=1):
            watch.awaits_pings()
        with EdgeServer(pair.target, listen=listen, keys=others, threads=1):
            watch.awaits(lambda: watch.events("outage"))
            shutil.copy(public, mine / "edge.pub")
            backs = len(watch.events("back"))
            watch.awaits(lambda: len(watch.events("back")) > backs)
            watch.awaits_pings()
        assert watch.end()[0] == 130


def test_an_edge_that_limits_it_is_an_outage(pair: Pair, tmp_path: Path) -> None:
    with (
        EdgeServer(pair.target, threads=1, rate=2.0) as edge,
        watching(tmp_path, edge.endpoint, "--no-rates") as watch,
    ):
        watch.awaits(lambda: watch.events("back"))
        watch.end()
    assert "too many messages" in watch.events("outage")[0]["reason"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("tcp://127.0.0.1",), 64),
        (("tcp://e.x:7",), 64),
        (("tcp://127.0.0.1:1", "--keys", "/none"), 77),
    ],
)
def test_wrong_usage_ends_at_once(arguments: tuple[str, ...], code: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, *arguments, "--watch"],
        capture_output=True, text=True, check=False, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1


def test_a_machine_that_slept_goes_on(edge: EdgeServer, tmp_path: Path) -> None:
    """The process stands still for longer than a connection may be quiet."""
    with watching(tmp_path, edge.endpoint) as watch:
        watch.awaits_pings()
        watch.process.send_signal(signal.SIGSTOP)
        time.sleep(4.0)
        watch.process.send_signal(signal.SIGCONT)
        watch.awaits_pings(5)
        assert watch.end()[0] == 130
    rtts_s = [each["rtt_s"] for each in watch.events("ping") if each["rtt_s"] is not None]
    assert max(rtts_s) < 3.0


def test_a_file_with_lines_is_not_overwritten(edge: EdgeServer, tmp_path: Path) -> None:
    path = tmp_path / "lines.json"
    path.write_text('{"event": "ping"}\n')
    done = subprocess.run(
        [*COMMAND, edge.endpoint, "--watch", "--every", "0.1", "--json", str(path)],
        capture_output=True, text=True, check=False, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 64
    assert f"{path} is not empty" in done.stderr
    assert path.read_text() == '{"event": "ping"}\n'


@pytest.mark.parametrize("path", ["/dev/full", "/none/lines.json"])
def test_a_file_that_takes_no_lines_is_named(edge: EdgeServer, path: str) -> None:
    done = subprocess.run(
        [*COMMAND, edge.endpoint, "--watch", "--every", "0.1", "--json", path],
        capture_output=True, text=True, check=False, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 74
    assert path in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_ends_it(edge: EdgeServer) -> None:
    read, write = os.pipe()
    with subprocess.Popen(
        [*COMMAND, edge.endpoint, "--watch", "--every", "0.05", "--json", "-"],
        stdout=write, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        os.close(write)
        os.read(read, 10)
        os.close(read)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert err == ""


def test_percentiles_are_within_a_hundredth() -> None:
    percentiles = RttPercentiles()
    assert percentiles.at(0.5) is None
    assert str(percentiles) == "no RTT"
    for milliseconds in range(1, 1001):
        percentiles.add(milliseconds * 1e-3)
    for share in (0.5, 0.9, 0.99):
        assert percentiles.at(share) == pytest.approx(share, rel=0.01)
