"""What `field watch` tells people: a line a round at a terminal, a line an hour in the journal."""

import logging
import statistics
import time
from collections import Counter

from rich.console import Console

from pilotfish.device_runtime.record import Choice
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.token_speed import steady_token_s
from pilotfish.lab.field.watch.clock import Stamp
from pilotfish.lab.field.watch.listener import WatchListener, WatchRound

_log = logging.getLogger("pilotfish.watch")

_HOUR_S = 3600.0


class WatchScreen(WatchListener):
    """Prints a line for each round and event."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    def on_round(self, round_: WatchRound) -> None:  # noqa: D102  # as in the base
        parts = [_link(round_.probe), *map(_answer, round_.answers)]
        parts += [f"{protocol}: {error}" for protocol, error in round_.failed.items()]
        self._print(round_.stamp.unix_s, "   ".join(parts))

    def on_outage(self, outage: Outage) -> None:  # noqa: D102  # as in the base
        ended_s = outage.ended_unix_s
        self._print(outage.began_unix_s if ended_s is None else ended_s, _describe_outage(outage))

    def on_clock_step(self, stamp: Stamp, by_s: float) -> None:  # noqa: D102  # as in the base
        self._print(stamp.unix_s, _step(by_s))

    def on_disk(self, stamp: Stamp, problem: str, waiting: int) -> None:  # noqa: D102  # as in the base
        self._print(stamp.unix_s, _disk(problem, waiting))

    def _print(self, unix_s: float, line: str) -> None:
        at = time.strftime("%H:%M:%S", time.localtime(unix_s))
        self._console.print(f"{at}  {line}", markup=False)


class WatchLog(WatchListener):
    """Writes outages, problems and an hourly line to the log. It suits a journal."""

    def __init__(self) -> None:
        self._begin_hour(None)

    def _begin_hour(self, since_s: float | None) -> None:
        """Begin an hour at this time of the run's clock."""
        self._since_s = since_s
        self._rounds = self._outages = 0
        self._rtts_s: list[float] = []
        self._failed: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()

    def on_round(self, round_: WatchRound) -> None:  # noqa: D102  # as in the base
        now_s = round_.stamp.clock_s
        if self._since_s is None:
            self._since_s = now_s
        self._rounds += 1
        self._rtts_s += round_.probe.rtts_s
        for protocol, error in round_.failed.items():
            self._failed[protocol] += 1
            if (protocol, error) not in self._logged:
                self._logged.add((protocol, error))
                _log.warning("no answer by %s: %s", protocol, error)
        if now_s - self._since_s >= _HOUR_S:
            self._tell()
            self._begin_hour(now_s)

    def _tell(self) -> None:
        rtt = f"RTT {1e3 * statistics.median(self._rtts_s):.1f} ms" if self._rtts_s else "no RTT"
        failed = "".join(f", {n} answers by {each} failed" for each, n in self._failed.items())
        _log.info("%d rounds, %s (median), %d outages%s", self._rounds, rtt, self._outages, failed)

    def on_outage(self, outage: Outage) -> None:  # noqa: D102  # as in the base
        began = outage.ended_unix_s is None
        self._outages += began
        _log.log(logging.WARNING if began else logging.INFO, "%s", _describe_outage(outage))

    def on_clock_step(self, stamp: Stamp, by_s: float) -> None:  # noqa: D102  # as in the base
        _log.info("%s", _step(by_s))

    def on_disk(self, stamp: Stamp, problem: str, waiting: int) -> None:  # noqa: D102  # as in the base
        _log.log(logging.ERROR if problem else logging.INFO, "%s", _disk(problem, waiting))


def _link(probe: Probe) -> str:
    rtt = f"{1e3 * statistics.median(probe.rtts_s):.1f} ms" if probe.rtts_s else "–"
    lost = f" ({probe.lost} lost)" if probe.lost else ""
    up, down = _rate(probe.up_bps, probe.up_bound), _rate(probe.down_bps, probe.down_bound)
    return f"RTT {rtt}{lost}   up {up} down {down} Mbit/s"


def _rate(bps: float | None, is_bound: bool) -> str:
    return "–" if bps is None else f"{'≥ ' if is_bound else ''}{bps * 1e-6:.1f}"


def _answer(answer: Answer) -> str:
    choice: Choice | None = answer.choice
    chosen = f" → {choice.protocol}" if choice is not None else ""
    token_s = steady_token_s(answer)
    speed = "–" if token_s is None else f"{1e3 * token_s:.0f}"
    return f"{answer.protocol}{chosen} {speed} ms/token"


def _describe_outage(outage: Outage) -> str:
    if outage.ended_clock_s is None:
        return f"the edge is away: {outage.reason}"
    return f"the edge is back after {outage.ended_clock_s - outage.began_clock_s:.0f} s"


def _step(by_s: float) -> str:
    return f"the wall clock was set by {by_s:+.0f} s; the watch goes on by its own clock"


def _disk(problem: str, waiting: int) -> str:
    if problem:
        return f"{problem} The rows stay in memory until they can be written."
    return "all rows are in the file again"
