"""The device's position by gpsd, if one runs here and its receiver has a fix.

gpsd sends a JSON object a line over TCP. After ``?WATCH`` it sends the receivers that it has
(``DEVICES``), then their reports; those of class ``TPV`` have the position
(https://gpsd.io/gpsd_json.html).
"""

import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

import msgspec

from pilotfish.lab.field.link_rows import is_possible
from pilotfish.lab.field.watch.clock import WAIT_SLICE_S

GPSD: Final = ("127.0.0.1", 2947)
DECIMALS: Final = 3  # of degrees: about 110 m

_LIMIT_S: Final = 2.5  # receivers report once a second
_CONNECT_S: Final = 0.5
_MOST_BYTES: Final = 256 << 10
_WATCH: Final = b'?WATCH={"enable":true,"json":true};\n'
_FIX_2D: Final = 2  # mode of a fix with latitude and longitude

Position = dict[str, float | str]


class _Report(msgspec.Struct):
    """A report of gpsd: the fields that are used of its classes."""

    kind: str = msgspec.field(name="class", default="")
    devices: list[msgspec.Raw] | None = None
    mode: int = 0
    lat: float | None = None
    lon: float | None = None
    altitude_m: float | None = msgspec.field(name="altMSL", default=None)
    old_altitude_m: float | None = msgspec.field(name="alt", default=None)  # before gpsd 3.20
    error_m: float | None = msgspec.field(name="eph", default=None)
    error_x_m: float | None = msgspec.field(name="epx", default=None)
    error_y_m: float | None = msgspec.field(name="epy", default=None)
    speed_m_s: float | None = msgspec.field(name="speed", default=None)


def read_position(
    address: tuple[str, int] = GPSD,
    *,
    decimals: int = DECIMALS,
    limit_s: float = _LIMIT_S,
    on_wait: Callable[[], None] = lambda: None,
) -> Position | None:
    """Return the position; None without gpsd, receiver or fix. Takes at most ``limit_s``.

    The result has ``lat`` and ``lon`` (degrees, rounded to ``decimals``) and, where known,
    ``alt_m`` (above sea level), ``error_m`` (the receiver's horizontal error with 95 % confidence)
    and ``speed_m_s``. A value that is impossible counts as unknown. on_wait: called several times a
    second.
    """
    until_s = time.monotonic() + limit_s
    with suppress(OSError), socket.create_connection(address, min(_CONNECT_S, limit_s)) as gpsd:
        gpsd.sendall(_WATCH)
        for line in _lines(gpsd, until_s, on_wait):
            report = _decode(line)
            if report.kind == "DEVICES" and not report.devices:
                return None  # no receiver: no report will come
            if report.kind == "TPV" and (fix := _position(report, decimals)) is not None:
                return fix
    return None


def _lines(gpsd: socket.socket, until_s: float, on_wait: Callable[[], None]) -> Iterator[bytes]:
    """Yield the lines that arrive until this time (monotonic)."""
    unread, received = b"", 0
    while received < _MOST_BYTES and (left_s := until_s - time.monotonic()) > 0.0:
        on_wait()
        gpsd.settimeout(min(left_s, WAIT_SLICE_S))
        try:
            part = gpsd.recv(4096)
        except TimeoutError:
            continue
        if not part:
            return
        received += len(part)
        *lines, unread = (unread + part).split(b"\n")
        yield from lines


def _decode(line: bytes) -> _Report:
    """Decode a report; a faulty one is as one of another class."""
    try:
        return msgspec.json.decode(line, type=_Report)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return _Report()


def _position(report: _Report, decimals: int) -> Position | None:
    lat, lon = report.lat, report.lon
    if report.mode < _FIX_2D or lat is None or lon is None:
        return None
    if not (abs(lat) <= 90.0 and abs(lon) <= 180.0):
        return None
    position: Position = {"lat": round(lat, decimals), "lon": round(lon, decimals)}
    altitude_m = report.old_altitude_m if report.altitude_m is None else report.altitude_m
    error_m = report.error_m
    if error_m is None and report.error_x_m is not None and report.error_y_m is not None:
        error_m = math.hypot(report.error_x_m, report.error_y_m)
    known = {"alt_m": altitude_m, "error_m": error_m, "speed_m_s": report.speed_m_s}
    position.update(
        {
            key: round(value, 1)
            for key, value in known.items()
            if value is not None and is_possible(value)  # False for NaN, too
        }
    )
    return position
