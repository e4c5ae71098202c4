"""Measure the energy of an answer or a service with a Jetson's INA3221 power monitors.

In:  voltage and current of each channel from sysfs (hwmon): ``in{n}_label``, ``in{n}_input`` in mV,
     ``curr{n}_input`` in mA. Out: joules.

If one rail feeds the whole module, only this rail is measured: VDD_IN on Xavier NX, Orin NX and
Orin Nano, POM_5V_IN on the first Nano. On other boards the power of all measured rails is added up.
Rails may be missing or feed each other, so the sum can compare runs on one board, but is not the
total power. The carrier board is never included. A thread reads the sensors; each reading costs a
few I²C transfers.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_DEVICES = Path("/sys/bus/i2c/devices")
_PERIOD_S = 0.05  # seconds between samples of one answer
_WATCH_PERIOD_S = 1.0  # seconds between samples of a service
_WHOLE_MODULE = ("VDD_IN", "POM_5V_IN")
_NOT_CONNECTED = "NC"


class Rail(NamedTuple):
    """One channel: its label, and the files with its millivolts and milliamperes."""

    label: str
    millivolts: Path
    milliamperes: Path

    def watts(self) -> float:
        """Read the power; OSError or ValueError if the sensor does not answer."""
        return int(self.millivolts.read_text()) * int(self.milliamperes.read_text()) * 1e-6


def rails(root: Path = _DEVICES) -> list[Rail]:
    """Find the rails whose sum is closest to the module's power; may be empty."""
    channels = [rail for device in sorted(root.glob("*")) for rail in _channels(device)]
    return [rail for rail in channels if rail.label in _WHOLE_MODULE][:1] or channels


def source(power: Sequence[Rail]) -> str | None:
    """Format the names of the rails; None without a sensor."""
    return f"INA3221: {' + '.join(rail.label for rail in power)}" if power else None


def _channels(device: Path) -> list[Rail]:
    """List the connected, readable channels of an INA3221; none for other chips."""
    channels = []
    try:
        if (device / "name").read_text().strip() != "ina3221":
            return []
    except OSError:
        return []
    for label in sorted(device.glob("hwmon/hwmon*/in[1-3]_label")):
        number = label.name[2]
        rail = Rail(
            _label(label),
            label.with_name(f"in{number}_input"),
            label.with_name(f"curr{number}_input"),
        )
        try:
            rail.watts()
        except (OSError, ValueError):
            continue  # switched off, or no permission
        if rail.label != _NOT_CONNECTED:
            channels.append(rail)
    return channels


def _label(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return path.name


class Meter:
    """Integrates the power of these rails over a ``with`` block, into ``joules``.

    ``joules`` is None without rails, or if a sensor failed.
    """

    def __init__(
        self,
        power: Sequence[Rail],
        *,
        period_s: float = _PERIOD_S,
    ) -> None:
        self.joules: float | None = None
        self._rails = power
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Meter":
        if self._rails:
            self._thread = threading.Thread(target=self._run, name="energy", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()

    def _run(self) -> None:
        """Integrate samples by the trapezoidal rule."""
        try:
            joules, then = 0.0, _read_sample(self._rails)
            while not self._stop.wait(self._period_s):
                now = _read_sample(self._rails)
                joules += now.joules_since(then)
                then = now
            self.joules = joules + _read_sample(self._rails).joules_since(then)
        except (OSError, ValueError):
            self.joules = None


class Watch:
    """Integrates the power of these rails from `start` until `close`, for a service.

    joules: total so far, without the times in which a sensor did not answer. watts: the newest
    sample; None while a sensor does not answer. Without rails both are None. Any thread may read
    both.
    """

    def __init__(self, power: Sequence[Rail], *, period_s: float = _WATCH_PERIOD_S) -> None:
        self.source = source(power)
        self.joules: float | None = 0.0 if power else None
        self.watts: float | None = None
        self._rails = power
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> "Watch":
        """Start sampling; does nothing without rails."""
        if self._rails and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="energy", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """Stop sampling; keeps the total."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        joules, then = 0.0, None
        while True:
            try:
                now = _read_sample(self._rails)
            except (OSError, ValueError):
                self.watts = then = None
            else:
                joules += now.joules_since(then) if then is not None else 0.0
                self.joules, self.watts, then = joules, now.watts, now
            if self._stop.wait(self._period_s):
                return


class _Sample(NamedTuple):
    """The power in watts at a time (monotonic seconds)."""

    at_s: float
    watts: float

    def joules_since(self, then: "_Sample") -> float:
        """Return the joules between two samples, by the trapezoidal rule."""
        return (self.at_s - then.at_s) * (then.watts + self.watts) / 2


def _read_sample(power: Sequence[Rail]) -> _Sample:
    return _Sample(time.monotonic(), sum(rail.watts() for rail in power))
