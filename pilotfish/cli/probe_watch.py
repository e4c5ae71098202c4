"""``pilotfish probe --watch``: a ping every second or so, for as long as the user wants.

An edge that is away, restarts, refuses this device or limits it does not end the watch: its outage
is one line at the begin and one at the end. Lines have the time by the wall clock (UTC). Intervals
are measured by the kernel's clock, which counts the time in which the machine sleeps, and which
nobody sets.
"""

import argparse
import json
import math
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from pilotfish.base.errors import (
    EdgeLostError,
    InterruptedGenerationError,
    PilotfishError,
    UnsupportedError,
)
from pilotfish.cli.stop_signals import Step, stopping_by
from pilotfish.device_runtime.link.connectivity import REFUSALS, Connectivity
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.link_group import load_keys
from pilotfish.device_runtime.link.probing import PingResult, measure_rates, ping
from pilotfish.device_runtime.link.retry import FAIL, CancelToken, RetryPolicy
from pilotfish.lab.field.run_clock import boot_s
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.link.state import READINGS, LinkState, Reading

# name, field of `LinkState`, factor to the unit, unit
ROWS = tuple((kind.name, key, 1.0 / kind.size, kind.shown_unit) for key, kind in READINGS.items())
_RATES_EVERY = 5  # pings
_LONGEST_PAUSE_S = 1.0  # between two attempts to reach an edge that is away
_TIME_LETTERS = 24
_END_S = 4.0  # time to end after a signal


def watch(args: argparse.Namespace) -> int:
    """Measure until Ctrl-C or SIGTERM; print a line each time, and a summary on stderr at the end.

    Raises `UnsupportedError` or another error at once if the address or the keys are wrong, or if
    the file of ``--json`` has lines.
    """
    keys = load_keys(args.edge, args.keys)
    patience = FAIL if args.patience is None else RetryPolicy.from_policy("wait", args.patience)
    token = CancelToken()
    with _opened(args.json) as lines, stopping_by(Step(token.end, _END_S)) as received:
        link = EdgeLink(args.edge, keys, patience, token)
        watching = _Watching(link, token, keys, args, lines)
        try:
            watching.run()
        except InterruptedGenerationError:
            with suppress(OSError):
                print(f"pilotfish: {watching.summary()}", file=sys.stderr, flush=True)
        finally:
            link.close()
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    return 0


class _Watching:
    """The pings and outages so far. lines: file for JSON lines; None: a table on stdout.

    token: ends the watch; it is the link's.
    """

    def __init__(
        self,
        link: EdgeLink,
        token: CancelToken,
        keys: DeviceKeys | None,
        args: argparse.Namespace,
        lines: "_JsonLines | None",
    ) -> None:
        self._link = link
        self._token = token
        self._keys = keys
        self._args = args
        self._lines = lines
        self._has_table = args.json != "-"
        self._begun_s = boot_s()
        self._rtts = RttPercentiles()
        self._pings = self._lost = self._outages = 0
        self._outage_s: float | None = None  # begin of the present outage
        self._away_s = 0.0  # all outages that have ended
        self._large_are_lost = False

    def run(self) -> None:
        """Measure; ends only with an error, `InterruptedGenerationError` among them."""
        self._print(_HEADINGS)
        for turn in count():
            self._measure(rates=not self._args.no_rates and turn % _RATES_EVERY == 0)
            pause_s = self._args.every
            if self._outage_s is not None:
                pause_s = min(pause_s, _LONGEST_PAUSE_S)
            self._token.sleep(pause_s)

    def _measure(self, *, rates: bool) -> None:
        sent_s = boot_s()
        self._pings += 1
        try:
            result = ping(self._link)
        except InterruptedGenerationError:
            raise
        except PilotfishError as error:
            self._lost += 1
            self._on_error(error, sent_s)
            return
        if self._outage_s is not None:
            self._on_back()
        self._lost += result.lost
        if result.rtt_s is not None:
            self._rtts.add(result.rtt_s)
        if rates:
            self._measure_rates()
        state = self._link.state()
        self._print(_row(result, state))
        self._write("ping", rtt_s=result.rtt_s, lost=result.lost, link=asdict(state))

    def _measure_rates(self) -> None:
        """Measure the rates; the next ping tells whether the edge is away."""
        try:
            measure_rates(self._link)
        except EdgeLostError as error:
            if not self._large_are_lost:
                self._large_are_lost = True
                reason = f"large messages do not arrive: {error}"
                self._print(reason)
                self._write("note", reason=reason)
        else:
            self._large_are_lost = False

    def _on_error(self, error: PilotfishError, sent_s: float) -> None:
        status = self._link.status
        if status.state in REFUSALS:
            self._read_keys()
        if self._outage_s is not None:
            return
        self._outage_s = sent_s
        self._outages += 1
        reason = str(error if status.state is Connectivity.CONNECTED else status)
        self._print(f"outage begins: {reason}")
        self._write("outage", reason=reason)

    def _on_back(self) -> None:
        assert self._outage_s is not None
        lasted_s = boot_s() - self._outage_s
        self._away_s += lasted_s
        self._outage_s = None
        self._print(f"outage ends after {lasted_s:.1f} s")
        self._write("back", outage_s=lasted_s)

    def _read_keys(self) -> None:
        """Use the keys as they are now: an operator may have replaced them."""
        with suppress(PilotfishError, OSError):  # they may be half written
            keys = load_keys(self._args.edge, self._args.keys)
            if keys != self._keys:
                self._keys = keys
                self._link.redirect(self._args.edge, keys)

    def _print(self, line: str) -> None:
        if self._has_table:
            print(f"{_timestamp():{_TIME_LETTERS}}  {line}", flush=True)

    def _write(self, event: str, **values: Any) -> None:
        if self._lines is not None:
            clock_s = boot_s() - self._begun_s
            self._lines.write({"time": _timestamp(), "clock_s": clock_s, "event": event, **values})

    def summary(self) -> str:
        """Return the percentiles of the RTT, the lost pings and the outages in one sentence."""
        now_s = boot_s()
        away_s = self._away_s + (0.0 if self._outage_s is None else now_s - self._outage_s)
        return (
            f"{self._pings} pings in {now_s - self._begun_s:.1f} s, {self._lost} lost; "
            f"{self._rtts}; {self._outages} outages, {away_s:.1f} s in all"
        )


class RttPercentiles:
    """The distribution of RTTs, in bounded memory: each counts as one of steps of 1 %."""

    _STEP = math.log(1.01)

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, rtt_s: float) -> None:
        """Count an RTT."""
        self._counts[round(math.log(max(rtt_s, 1e-6)) / self._STEP)] += 1

    def at(self, share: float) -> float | None:
        """Return the RTT (s) that this share of the RTTs do not exceed; None without RTTs."""
        rank, counted = share * self._counts.total(), 0
        for step in sorted(self._counts):
            counted += self._counts[step]
            if counted >= rank:
                return math.exp(step * self._STEP)
        return None

    def __str__(self) -> str:
        percentiles = [(name, self.at(name / 100)) for name in (50, 90, 99)]
        known = [f"p{name} {rtt_s * 1e3:.2f}" for name, rtt_s in percentiles if rtt_s is not None]
        return f"RTT {', '.join(known)} ms" if known else "no RTT"


class _JsonLines:
    """Writes a JSON object a line, at once. path: for the messages of errors; "-": stdout."""

    def __init__(self, stream: TextIO, path: str) -> None:
        self._stream, self._path = stream, path

    def write(self, value: dict[str, Any]) -> None:
        """Write an object; raises `OSError`, which names the file."""
        try:
            self._stream.write(json.dumps(value, ensure_ascii=False) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._path == "-":
                raise
            raise OSError(error.errno, error.strerror, self._path) from error


@contextmanager
def _opened(path: str | None) -> Iterator[_JsonLines | None]:
    """Open the file of ``--json``; yield None without one. A file with lines is refused."""
    if path is None:
        yield None
    elif path == "-":
        yield _JsonLines(sys.stdout, path)
    elif Path(path).is_file() and Path(path).stat().st_size:
        raise UnsupportedError(f"{path} is not empty: name another file for the lines (--json).")
    else:
        stream = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  # closed below
        try:
            yield _JsonLines(stream, path)
        finally:
            with suppress(OSError):  # the failed write was reported
                stream.close()


def _timestamp() -> str:
    now = datetime.now(timezone.utc)
    return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")


_HEADINGS = "  ".join(f"{f'{label}, {unit.split()[0]}':>20}" for label, _, _, unit in ROWS)


def _row(result: PingResult, state: LinkState) -> str:
    """Return the cells of a row: the RTT of this ping, and the present readings."""
    values: list[float | None] = [result.rtt_s]
    for _, name, _, _ in ROWS[1:]:
        reading: Reading | None = getattr(state, name)
        values.append(None if reading is None else reading.value)
    cells = [
        "-" if value is None else f"{value * scale:.2f}"
        for value, (_, _, scale, _) in zip(values, ROWS, strict=True)
    ]
    return "  ".join(f"{cell:>20}" for cell in cells)
