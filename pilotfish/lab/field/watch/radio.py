"""The radio's signal: of a cellular modem by ModemManager, else of WLAN by ``/proc/net/wireless``.

In:  the output of ``mmcli``, which is on the machine if ModemManager is. Out: values by name, or
     None without a radio.

ModemManager measures RSRP, RSRQ, SNR and RSSI only after ``mmcli -m any --signal-setup=30``, which
is needed after each start of the modem. This module changes no setting of the modem.
"""

import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec

from pilotfish.lab.field.watch.clock import WAIT_SLICE_S
from pilotfish.wire.link.state import WIRELESS, signal_dbm

SIGNAL: Final = ("mmcli", "-J", "-m", "any", "--signal-get")
MODEM: Final = ("mmcli", "-J", "-m", "any")

_LIMIT_S: Final = 2.0  # ModemManager may wait for a modem that does not answer
_MOST_BYTES: Final = 256 << 10
_MOST_LETTERS: Final = 64
# the technologies by ModemManager's names, newest first, with the measure that counts as `dbm`
_TECHNOLOGIES: Final = (
    ("5g", "rsrp"),
    ("lte", "rsrp"),
    ("umts", "rscp"),
    ("gsm", "rssi"),
    ("evdo", "rssi"),
    ("cdma1x", "rssi"),
)
# the possible values of each measure; drivers report others for "unknown"
_BOUNDS: Final = {
    "rsrp": (-160.0, -20.0),
    "rscp": (-130.0, -10.0),
    "rssi": (-130.0, 0.0),
    "rsrq": (-50.0, 25.0),
    "snr": (-50.0, 60.0),
}
_KEYS: Final = {
    "rsrp": "rsrp_dbm",
    "rscp": "rscp_dbm",
    "rssi": "rssi_dbm",
    "rsrq": "rsrq_db",
    "snr": "snr_db",
}

Signal = dict[str, float | str]
_Reply = TypeVar("_Reply")


class _Generic(msgspec.Struct):
    access_technologies: list[str] = msgspec.field(name="access-technologies", default_factory=list)
    state: str = ""


class _Network(msgspec.Struct):
    operator_name: str = msgspec.field(name="operator-name", default="")
    operator_code: str = msgspec.field(name="operator-code", default="")


class _Modem(msgspec.Struct):
    generic: _Generic = msgspec.field(default_factory=_Generic)
    network: _Network = msgspec.field(name="3gpp", default_factory=_Network)


class _Measures(msgspec.Struct):
    signal: dict[str, Annotated[dict[str, str], msgspec.Meta(max_length=32)]] = msgspec.field(
        default_factory=dict
    )


class _ModemReply(msgspec.Struct):
    modem: _Modem


class _SignalReply(msgspec.Struct):
    modem: _Measures


def read_signal(
    wireless: Path = WIRELESS, *, on_wait: Callable[[], None] = lambda: None
) -> Signal | None:
    """Return the signal, with its ``source``; None without a radio that has a link.

    ``dbm`` is the strength, and ``dbm_of`` names its measure: "rsrp" (LTE, 5G), "rscp" (UMTS),
    "rssi" (GSM, CDMA) or "level" (WLAN). A modem also has the other measures, and the technology
    and the network's name and code if known. A machine with a connected modem and WLAN has the
    WLAN's level as ``wlan_dbm``. Takes at most 4 s, if the modem does not answer. on_wait: called
    several times a second.
    """
    modem = _read_modem(on_wait)
    level = signal_dbm(wireless)
    if modem is None:
        return None if level is None else {"source": "WLAN", "dbm": level, "dbm_of": "level"}
    return modem if level is None else {**modem, "wlan_dbm": level}


def _read_modem(on_wait: Callable[[], None]) -> Signal | None:
    if shutil.which(MODEM[0]) is None:
        return None
    modem = _output(MODEM, on_wait)
    return None if modem is None else modem_signal(modem, _output(SIGNAL, on_wait))


def modem_signal(modem: bytes, measures: bytes | None) -> Signal | None:
    """Evaluate the outputs of `MODEM` and `SIGNAL`; None if the modem has no connection.

    A value that is absent ("--"), faulty or impossible is left out.
    """
    described = _decode(modem, _ModemReply)
    if described is None or described.modem.generic.state != "connected":
        return None
    signal: Signal = {"source": "ModemManager"}
    named = {
        "technology": "+".join(described.modem.generic.access_technologies[:4]),
        "operator": described.modem.network.operator_name,
        "operator_code": described.modem.network.operator_code,
    }
    signal.update({key: text for key, name in named.items() if (text := _text(name))})
    measured = None if measures is None else _decode(measures, _SignalReply)
    if measured is not None:
        signal.update(_best_measures(measured.modem.signal))
    return signal


def _best_measures(by_technology: dict[str, dict[str, str]]) -> Signal:
    """Return the measures of the newest technology that has the one that counts.

    A modem may report the measures of one cell under several technologies.
    """
    for technology, counts in _TECHNOLOGIES:
        values = {
            measure: value
            for measure, text in by_technology.get(technology, {}).items()
            if measure in _BOUNDS and (value := _number(text, *_BOUNDS[measure])) is not None
        }
        if counts in values:
            named: Signal = {_KEYS[measure]: value for measure, value in values.items()}
            return {"dbm": values[counts], "dbm_of": counts, "measured_on": technology, **named}
    return {}


def _number(text: str, least: float, most: float) -> float | None:
    """Read a number; None if it is absent ("--") or impossible. Some locales write a comma."""
    number = text.replace(",", ".")
    if re.fullmatch(r"-?\d{1,4}(\.\d{1,6})?", number, re.ASCII) is None:
        return None
    value = float(number)
    return value if least <= value <= most else None


def _text(value: str) -> str:
    """Return a name without control characters, shortened; "" if it is absent ("--")."""
    name = "".join(letter for letter in value.strip() if letter.isprintable())[:_MOST_LETTERS]
    return "" if name == "--" else name


def _decode(output: bytes, kind: type[_Reply]) -> _Reply | None:
    try:
        return msgspec.json.decode(output, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def _output(command: tuple[str, ...], on_wait: Callable[[], None]) -> bytes | None:
    """Return the output of a command; None if it fails, takes too long or writes too much.

    The command and its output have at most `_LIMIT_S` and `_MOST_BYTES`, whatever it does. It is
    killed if it is still there after that, or if ``on_wait`` raises.
    """
    until_s = time.monotonic() + _LIMIT_S
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            start_new_session=True,  # Ctrl-C is for the watch
        )
    except OSError:
        return None
    assert process.stdout is not None
    output = bytearray()
    with process.stdout as pipe:  # not the process: that would wait for its end
        try:
            while (left_s := until_s - time.monotonic()) > 0.0 and len(output) <= _MOST_BYTES:
                on_wait()
                if not select.select([pipe], [], [], min(left_s, WAIT_SLICE_S))[0]:
                    continue
                part = os.read(pipe.fileno(), 1 << 16)
                if not part:
                    status = process.wait(max(0.1, until_s - time.monotonic()))
                    return bytes(output) if status == 0 else None
                output += part
        except (OSError, subprocess.SubprocessError):
            return None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return None
