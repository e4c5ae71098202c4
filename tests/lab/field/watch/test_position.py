"""The position: a server that speaks gpsd's protocol, and gpsd itself where it is installed.

The protocol: https://gpsd.io/gpsd_json.html.
"""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pilotfish.base.errors import InterruptedGenerationError
from pilotfish.lab.field.watch.position import read_position

VERSION = {"class": "VERSION", "release": "3.22", "proto_major": 3, "proto_minor": 14}
RECEIVER = {"class": "DEVICES", "devices": [{"class": "DEVICE", "path": "/dev/ttyACM0"}]}
FIX = {
    "class": "TPV",
    "mode": 3,
    "lat": 48.137154,
    "lon": 11.576124,
    "altMSL": 519.04,
    "eph": 6.25,
    "speed": 1.512,
}


@contextmanager
def gpsd(*objects: Any, stays: bool = True) -> Iterator[tuple[str, int]]:
    """Serve one client: the version, and after its WATCH these objects, then nothing.

    bytes are sent as they are. stays: whether the connection stays open.
    """
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5.0)

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(json.dumps(VERSION).encode() + b"\r\n")
                request = b""
                while b"\n" not in request:
                    request += client.recv(1024)
                assert json.loads(request.removeprefix(b"?WATCH=").rstrip(b";\n")) == {
                    "enable": True,
                    "json": True,
                }
                for each in objects:
                    line = each if isinstance(each, bytes) else json.dumps(each).encode() + b"\r\n"
                    client.sendall(line)
                if stays:
                    over.wait(10.0)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            over.set()
            thread.join()


def test_a_fix() -> None:
    with gpsd(RECEIVER, {"class": "SKY"}, {"class": "TPV", "mode": 1}, FIX) as address:
        assert read_position(address, decimals=5) == {
            "lat": 48.13715,
            "lon": 11.57612,
            "alt_m": 519.0,
            "error_m": 6.2,
            "speed_m_s": 1.5,
        }


def test_the_default_is_a_hundred_metres() -> None:
    with gpsd(RECEIVER, FIX) as address:
        position = read_position(address)
    assert position is not None
    assert (position["lat"], position["lon"]) == (48.137, 11.576)


def test_an_old_gpsd() -> None:
    old = {"class": "TPV", "mode": 2, "lat": -1.0, "lon": 2.0, "alt": 7, "epx": 3.0, "epy": 4.0}
    with gpsd(RECEIVER, old) as address:
        assert read_position(address) == {"lat": -1.0, "lon": 2.0, "alt_m": 7.0, "error_m": 5.0}


@pytest.mark.parametrize("value", [1e308, -1e308, 1.1e15])
@pytest.mark.parametrize("key", ["altMSL", "eph", "speed"])
def test_an_impossible_value_is_unknown(key: str, value: float) -> None:
    """A report would refuse the whole file because of it."""
    with gpsd(RECEIVER, {**FIX, key: value}) as address:
        position = read_position(address)
    assert position is not None
    assert len(position) == 4
    assert all(abs(float(each)) < 1e15 for each in position.values())


def test_the_largest_errors_have_no_sum() -> None:
    fix = {key: value for key, value in FIX.items() if key != "eph"}
    with gpsd(RECEIVER, {**fix, "epx": 1.7e308, "epy": 1.7e308}) as address:
        position = read_position(address)
    assert position is not None
    assert "error_m" not in position


def test_a_wait_for_a_fix_can_be_ended() -> None:
    def end() -> None:
        raise InterruptedGenerationError("The watch ends.")

    with gpsd(RECEIVER) as address, pytest.raises(InterruptedGenerationError):
        read_position(address, limit_s=30.0, on_wait=end)


def test_no_receiver_ends_at_once() -> None:
    begun_s = time.monotonic()
    with gpsd({"class": "DEVICES", "devices": []}) as address:
        assert read_position(address, limit_s=5.0) is None
        assert time.monotonic() - begun_s < 2.0


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    assert read_position(address) is None


@pytest.mark.parametrize(
    "answers",
    [
        (),
        (RECEIVER, {"class": "TPV", "mode": 1}),
        (RECEIVER, {**FIX, "lat": 91.0}),
        (RECEIVER, {**FIX, "lat": -90.001}),
        (RECEIVER, {**FIX, "lon": 1e308}),
        (RECEIVER, json.dumps({**FIX, "lat": math.nan}).encode() + b"\n"),
        (RECEIVER, json.dumps({**FIX, "altMSL": math.inf}).encode() + b"\n"),
        (RECEIVER, json.dumps(FIX).replace("519.04", "1e999").encode() + b"\n"),
        (RECEIVER, {**FIX, "lat": "48.1"}),
        (RECEIVER, {**FIX, "mode": "3"}),
        (RECEIVER, {key: value for key, value in FIX.items() if key != "lon"}),
        (RECEIVER, b"{" * 20_000 + b"\n", b"\xff\x00\n", b"null\n", b"[]\n"),
        (RECEIVER, b"x" * 300_000),
    ],
)
def test_no_fix_within_the_time(answers: tuple[Any, ...]) -> None:
    begun_s, threads = time.monotonic(), threading.active_count()
    with gpsd(*answers) as address:
        assert read_position(address, limit_s=0.4) is None
    assert time.monotonic() - begun_s < 3.0
    assert threading.active_count() <= threads


def test_a_server_that_ends_the_connection() -> None:
    with gpsd(RECEIVER, stays=False) as address:
        assert read_position(address) is None


@pytest.mark.skipif(
    shutil.which("gpsfake") is None, reason="the real gpsd with its gpsfake is not installed"
)
def test_the_real_gpsd(tmp_path: Path) -> None:
    """gpsfake runs gpsd with a receiver that repeats these NMEA sentences."""
    log = tmp_path / "walk.nmea"
    seconds = range(60)
    log.write_text("".join(_rmc(at) + _gga(at) for at in seconds))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    fake = subprocess.Popen(
        ["gpsfake", "-q", "-c", "0.1", "-P", str(port), str(log)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until_s, position = time.monotonic() + 20.0, None
        while position is None and time.monotonic() < until_s and fake.poll() is None:
            position = read_position(("127.0.0.1", port), decimals=4)
            time.sleep(0.2)
    finally:
        fake.terminate()
        fake.wait(10.0)
    assert position is not None
    assert position["lat"] == pytest.approx(48.1173, abs=1e-4)
    assert position["lon"] == pytest.approx(11.5167, abs=1e-4)


def _rmc(at: int) -> str:
    return _sentence(f"GPRMC,1235{at:02},A,4807.038,N,01131.000,E,000.5,084.4,230320,,")


def _gga(at: int) -> str:
    return _sentence(f"GPGGA,1235{at:02},4807.038,N,01131.000,E,1,08,0.9,545.4,M,46.9,M,,")


def _sentence(body: str) -> str:
    checksum = 0
    for letter in body:
        checksum ^= ord(letter)
    return f"${body}*{checksum:02X}\r\n"
