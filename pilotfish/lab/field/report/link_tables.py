"""The report's tables of the link: percentiles, outages, bytes; and sentences on the clock.

In: measured runs. Out: tables with units in the headings, and texts. None of it is escaped.
"""

from collections.abc import Sequence
from datetime import datetime, timezone

import numpy as np

from pilotfish.base.prose import one_line
from pilotfish.lab.field.report.answer_values import MEASURES
from pilotfish.lab.field.report.measured import MeasuredRun
from pilotfish.lab.field.report.samples import PERCENTILES, percentiles
from pilotfish.lab.field.report.tables import NONE, number
from pilotfish.lab.page import Table

_MOST_OUTAGES = 10  # rows of the table of outages: the longest
_MOST_STEPS = 3  # steps of the clock that a sentence tells
_REASON_LETTERS = 160
# seconds of a large and of a small unit, the most of the large unit, and their names
_UNITS = (
    (60.0, 1.0, 60.0, "min", "s"),
    (3600.0, 60.0, 48.0, "h", "min"),
    (86400.0, 3600.0, np.inf, "d", "h"),
)
_NO_VALUES = np.zeros(0)


def duration(seconds: float) -> str:
    """Format a time in two units: ``3 d 2 h``, ``1 h 5 min``, ``2 min 3 s``, ``4.2 s``."""
    if seconds < 10.0:
        return f"{seconds:.1f} s"
    for large_s, small_s, most, large, small in _UNITS:
        wholes, rest = divmod(round(seconds / small_s), round(large_s / small_s))
        if wholes < most:
            parts = [f"{wholes} {large}"] * (wholes > 0)
            return " ".join(parts + [f"{rest} {small}"] * (rest > 0 or not wholes))
    raise AssertionError  # never reached: the last unit takes all times


def utc(unix_s: float) -> str:
    """Format a time as date and clock time in UTC."""
    return f"{datetime.fromtimestamp(unix_s, timezone.utc):%Y-%m-%d %H:%M:%S}"


def rtt_percentiles(runs: Sequence[MeasuredRun]) -> Table:
    """Tabulate percentiles of the RTT in ms, a row for each run and source of the samples."""
    return Table(
        headings=[
            ("", "run"),
            ("", "RTT of"),
            ("", "n"),
            ("", "lost"),
            *(("RTT, ms", name) for name in PERCENTILES),
            ("RTT, ms", "most"),
        ],
        rows=[
            [
                run.name,
                source,
                f"{len(each):,}",
                f"{run.history.lost:,}" if source == "pings" else NONE,
                *(number(value) for value in percentiles(each.values).values()),
                number(float(each.values.max())),
            ]
            for run in runs
            for source, each in run.history.rtts.items()
        ],
    )


def answer_percentiles(runs: Sequence[MeasuredRun]) -> Table:
    """Tabulate percentiles over answers of each measure, a row for each run and configuration."""
    measures = [m for m in MEASURES if any(run.values[m] for run in runs)]
    return Table(
        headings=[
            ("", "run"),
            ("", "protocol"),
            ("", "n"),
            *(
                (m.heading.replace(" (", ", ").rstrip(")"), p)
                for m in measures
                for p in PERCENTILES
            ),
        ],
        rows=[
            [
                run.name,
                str(f.configuration),
                f"{f.n:,}",
                *(
                    number(value, 2 if m is MEASURES[2] else 1)
                    for m in measures
                    for value in percentiles(
                        run.values[m].get(f.configuration, _NO_VALUES)
                    ).values()
                ),
            ]
            for run in runs
            for f in run.figures
        ],
    )


def outages(run: MeasuredRun) -> Table:
    """Tabulate the longest outages of a run, in the order of time."""
    longest = sorted(run.history.outages, key=lambda outage: -outage.lasted_s)[:_MOST_OUTAGES]
    return Table(
        headings=[("", "began (UTC)"), ("", "ended (UTC)"), ("", "length"), ("", "reason")],
        rows=[
            [
                utc(outage.began_s),
                utc(outage.ended_s) if outage.ended else "still away at the file's end",
                duration(outage.lasted_s),
                one_line(outage.reason, _REASON_LETTERS) or NONE,
            ]
            for outage in sorted(longest, key=lambda outage: outage.began_s)
        ],
    )


def outage_summary(run: MeasuredRun) -> str:
    """Tell the outages and pauses of a watch in one or two sentences; "" for other runs."""
    history = run.history
    if history.available is None:
        return ""
    text = f"{availability(run)[0].upper()}{availability(run)[1:]}."
    if len(history.outages) > _MOST_OUTAGES:
        text += f" The table has the {_MOST_OUTAGES} longest of {len(history.outages)} outages."
    if history.pauses:
        paused = sum(end - begin for begin, end in history.pauses)
        times = _times(len(history.pauses))
        text += (
            f" Nothing was measured for {duration(paused)} ({times}), because the watch was off or "
            "its rows were lost; this counts neither as available nor as away."
        )
    return text


def availability(run: MeasuredRun) -> str:
    """Tell the total of the outages and the availability of a watch."""
    history, count = run.history, len(run.history.outages)
    share = 100.0 * (history.available or 0.0)
    if not count:
        return f"never away in {duration(history.observed_s)} of watching (100 % available)"
    return (
        f"away {duration(history.away_s)} in {count} outage{'s' * (count > 1)} "
        f"({share:.{1 if share < 99.9 else 3}f} % available)"
    )


def clock_steps(run: MeasuredRun) -> str:
    """Tell in words how often the wall clock was set; "" if it never was."""
    steps = run.history.steps
    if not steps:
        return ""
    texts = [
        f"by {'+' if step.by_s > 0 else '−'}{duration(abs(step.by_s))} at {utc(step.unix_s)}"
        for step in steps[:_MOST_STEPS]
    ]
    rest = ", …" if len(steps) > _MOST_STEPS else ""
    return (
        f"The device's wall clock was set {_times(len(steps))} ({', '.join(texts)}{rest}). "
        "All times of the report are by that setting of the clock which held longest."
    )


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def traffic(runs: Sequence[MeasuredRun]) -> Table:
    """Tabulate the bytes of a run in MB, of answers and of measuring the link."""
    return Table(
        headings=[
            ("", "run"),
            ("answers, MB", "up"),
            ("answers, MB", "down"),
            ("probes, MB", "up"),
            ("probes, MB", "down"),
            ("all, MB", "per hour"),
        ],
        rows=[
            [
                run.name,
                *(
                    number(count / 1e6, 2)
                    for count in (*run.history.traffic.answers, *run.history.traffic.probes)
                ),
                number(run.history.traffic.total / 1e6 / run.history.observed_s * 3600.0, 2)
                if run.history.observed_s > 0
                else NONE,
            ]
            for run in runs
        ],
    )
