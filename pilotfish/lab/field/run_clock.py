"""A run's clock: seconds since the run began, which neither jump nor go back.

The wall clock of a device may be set at any time; a board without a battery begins in 1970. So rows
have the time of both clocks. `begin` and `RunClock` give the time to who writes. `on_wall_clock`
finds, for who reads, the wall clock's setting that held longest, and puts all rows on it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STEP_S = 1.0  # a smaller change of the offset is an adjustment of the clock's rate, no setting
_MOST_TRIED = 100  # spans between two steps that are compared with all others
_EARLIEST_UNIX_S = 1_735_689_600.0  # 2025, before the first run: an earlier clock was not set
_LONGEST_OFF_S = 30 * 86400.0  # longest time between two boots that counts
_RATE = 1e-3  # largest adjustment of a clock's rate (s/s)


def boot_id(path: Path = _BOOT_ID) -> str:
    """Return the kernel's name of this boot; "" if it has none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def boot_s() -> float:
    """Return the seconds since the machine booted, with those in which it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment by all clocks: wall, run, and seconds since the boot with this id."""

    unix_s: float
    clock_s: float
    boot_id: str
    boot_s: float


def begin(
    last: Moment | None = None, *, unix_s: float | None = None, now_boot_s: float | None = None
) -> Moment:
    """Return the present moment; last: an earlier moment of the same run, None: the run begins.

    unix_s, now_boot_s: the readings of the clocks, if they are not this machine's.
    """
    unix_s = time.time() if unix_s is None else unix_s
    now_boot_s = boot_s() if now_boot_s is None else now_boot_s
    boot = boot_id()
    clock_s = 0.0 if last is None else continued_s(last, unix_s, boot, now_boot_s)
    return Moment(unix_s=unix_s, clock_s=clock_s, boot_id=boot, boot_s=now_boot_s)


class RunClock:
    """The run's clock since a start of the command. boot: returns seconds since the boot."""

    def __init__(self, start: Moment, boot: Callable[[], float] = boot_s) -> None:
        self._start = start
        self._boot = boot

    def __call__(self) -> float:
        """Return the seconds since the run began."""
        return self._start.clock_s + self._boot() - self._start.boot_s


def continued_s(last: Moment, now_unix_s: float, now_boot_id: str, now_boot_s: float) -> float:
    """Return the run's clock now, from an earlier moment of the run.

    Within one boot the kernel's clock counts. After a reboot only the wall clock is left. If it
    went back, or had not been set before, the run's clock stands still; it passes at most
    `_LONGEST_OFF_S`, since a clock may be set wrongly.
    """
    if now_boot_id and now_boot_id == last.boot_id and now_boot_s >= last.boot_s:
        return last.clock_s + now_boot_s - last.boot_s
    if last.unix_s < _EARLIEST_UNIX_S:
        return last.clock_s
    return last.clock_s + min(max(0.0, now_unix_s - last.unix_s), _LONGEST_OFF_S)


@dataclass(frozen=True, kw_only=True)
class ClockStep:
    """A setting of the wall clock, which moved it by so many seconds.

    clock_s, unix_s: the first row after it, by the run's clock and by `WallTimes.unix_s`.
    """

    clock_s: float
    unix_s: float
    by_s: float


@dataclass(frozen=True, kw_only=True)
class WallTimes:
    """Times of rows by one setting of the wall clock, float64 [rows], and the clock's steps."""

    unix_s: NDArray[np.float64]
    steps: list[ClockStep]


def on_wall_clock(clock_s: Sequence[float], unix_s: Sequence[float]) -> WallTimes:
    """Put rows on that setting of the wall clock that held longest.

    clock_s, unix_s: each row's time by the run's clock, ascending, and by the wall clock, [rows].
    Rows under another setting get the time that the run's clock tells.
    """
    clock, unix = np.asarray(clock_s, np.float64), np.asarray(unix_s, np.float64)
    if len(clock) == 0:
        return WallTimes(unix_s=unix, steps=[])
    offset = unix - clock
    moved, passed = np.diff(offset), np.diff(clock)
    is_step = np.abs(moved) > np.maximum(_STEP_S, _RATE * passed)
    span = np.concatenate(([0], np.cumsum(is_step)))
    held = _held_longest(clock, offset, span)
    held_rows = np.flatnonzero(held)
    # a row under another setting takes the offset of the nearest row under that setting
    nearest = held_rows[_nearest(held_rows, len(clock))]
    wall = np.where(held, unix, clock + offset[nearest])
    steps = [
        ClockStep(clock_s=float(clock[at]), unix_s=float(wall[at]), by_s=float(moved[at - 1]))
        for at in np.flatnonzero(is_step) + 1
    ]
    return WallTimes(unix_s=wall, steps=steps)


def _held_longest(
    clock: NDArray[np.float64], offset: NDArray[np.float64], span: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which rows are under the setting that held longest, [rows].

    span: number of the time between two steps. A clock that is set back to an earlier setting
    continues that setting.
    """
    starts = np.flatnonzero(np.diff(span, prepend=-1))
    ends = np.append(starts[1:], len(clock)) - 1
    lasted = clock[ends] - clock[starts] + 1e-9 * (ends - starts + 1)
    first, last = offset[starts], offset[ends]
    # only long spans are tried, since a damaged file may have as many spans as rows
    tried = np.argsort(-lasted, kind="stable")[:_MOST_TRIED]
    # spans continue one another if the offset at the end of one is that at the start of the other
    same = np.abs(last[tried, None] - first[None, :]) <= 2 * _STEP_S
    same |= np.abs(first[tried, None] - last[None, :]) <= 2 * _STEP_S
    same[np.arange(len(tried)), tried] = True
    best = int(np.argmax(same @ lasted))
    held: NDArray[np.bool_] = same[best][span]
    return held


def _nearest(held_rows: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Return, for each row, the index into ``held_rows`` of the row that is nearest, [rows]."""
    at = np.arange(rows)
    right = np.clip(np.searchsorted(held_rows, at), 0, len(held_rows) - 1)
    left = np.maximum(right - 1, 0)
    closer_left = np.abs(at - held_rows[left]) <= np.abs(held_rows[right] - at)
    return np.where(closer_left, left, right)
