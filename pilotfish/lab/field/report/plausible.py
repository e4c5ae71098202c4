"""Check that the values of a run file are possible.

In: rows with values of the right types. Out: nothing, or a `RunFileError`, which names the row and
    the value. After this check, statistics and plots can divide by values and take logarithms, and
    every number that they or an export use is finite and fits into 64 bits.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

from pilotfish.base.errors import RunFileError
from pilotfish.base.prose import one_line
from pilotfish.device_runtime.record import STAGES, Choice, Forecast, Round
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.link_rows import LARGEST, Outage, Probe
from pilotfish.lab.field.run_facts import Facts, Start, Watch
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import counters

_Bounded: TypeAlias = tuple[str, float, float, float]  # name, value, lower and upper bound

_LARGEST_DEG: Final = {"lat": 90.0, "lon": 180.0}  # bounds of a position, in both directions
_LONGEST_S: Final = 1e7  # maximum time of a stage or answer (s): four months
_LATEST_UNIX_S: Final = 4e9  # upper bound of a Unix time (s): the year 2096


def expect_plausible(path: Path, rows: Iterable[Facts | Answer | Probe | Outage]) -> None:
    """Raise `RunFileError` if a row has an impossible value; the error names the first."""
    for row in rows:
        if isinstance(row, Facts):
            _expect(path, "the run", _facts_values(row))
        elif isinstance(row, Answer):
            _expect(path, f"answer {row.id}", _answer_values(row))
        elif isinstance(row, Probe):
            _expect(path, f"probe {row.id}", _probe_values(row))
        else:
            _expect(path, f"outage {row.id}", _outage_values(row))


def are_possible_times(times_s: Iterable[float]) -> bool:
    """Return whether seconds since 1970, or since a run began, are possible in a row."""
    return all(0.0 <= time_s <= _LATEST_UNIX_S for time_s in times_s)


def _expect(path: Path, row: str, values: Iterable[_Bounded]) -> None:
    for what, value, low, high in values:
        if not low <= value <= high:  # NaN fails both comparisons, and so is refused
            raise RunFileError(
                f"{path} is damaged: {row} has {_format_number(value)} as its {what}, which is "
                "impossible. Restore a copy of the file."
            )


def _format_number(value: float) -> str:
    try:
        return f"{value:g}"
    except OverflowError:  # an integer, which JSON may have at any length
        return "a number of more than 300 digits"


def _facts_values(facts: Facts) -> Iterator[_Bounded]:
    if (watch := facts.watch) is not None:
        yield "interval", watch.every_s, 1e-3, _LONGEST_S
        yield "length", watch.for_s or 0.0, 0.0, _LATEST_UNIX_S
        for name, value in _numbers(watch):
            yield f"watch's {name}", value, 0.0, LARGEST
    for start in facts.starts:
        for name, value in _numbers(start):
            yield f"start's {name}", value, 0.0, _LATEST_UNIX_S
    for name, value in _numbers(facts):
        yield name, value, 0.0, _LATEST_UNIX_S


def _numbers(record: Facts | Start | Watch) -> Iterator[tuple[str, float]]:
    """Yield the fields of a record that are numbers: name, value."""
    for name, value in vars(record).items():
        if isinstance(value, int | float):
            yield name, value


def _probe_values(probe: Probe) -> Iterator[_Bounded]:
    yield "begin", probe.began_unix_s, 0.0, _LATEST_UNIX_S
    yield "time by the run's clock", probe.clock_s, 0.0, _LATEST_UNIX_S
    yield "duration", probe.took_s, 0.0, _LONGEST_S
    for rtt_s in probe.rtts_s:
        yield "RTT", rtt_s, 0.0, _LONGEST_S
    yield "lost pings", probe.lost, 0, LARGEST
    for way in ("up", "down"):
        yield f"goodput {way}", getattr(probe, f"{way}_bps") or 0.0, 0.0, LARGEST
        yield f"bytes {way}", getattr(probe, f"{way}link_bytes"), 0, LARGEST
    yield "power", probe.power_w or 0.0, -LARGEST, LARGEST
    for name, value in (probe.signal or {}).items():
        if not isinstance(value, str):
            yield f"signal's {one_line(name, 40)}", value, -LARGEST, LARGEST
    for name, value in (probe.position or {}).items():
        if not isinstance(value, str):
            largest = _LARGEST_DEG.get(name, LARGEST)
            yield f"position's {one_line(name, 40)}", value, -largest, largest
    if probe.link is not None:
        yield from _link_values(probe.link)


def _outage_values(outage: Outage) -> Iterator[_Bounded]:
    begin_s = outage.began_clock_s
    yield "begin", outage.began_unix_s, 0.0, _LATEST_UNIX_S
    yield "begin by the run's clock", begin_s, 0.0, _LATEST_UNIX_S
    if outage.ended_clock_s is not None or outage.ended_unix_s is not None:
        # an end by one clock only is no number, and so is refused
        for what, value, low in (
            ("end", outage.ended_unix_s, 0.0),
            ("end by the run's clock", outage.ended_clock_s, begin_s),
        ):
            yield what, math.nan if value is None else value, low, _LATEST_UNIX_S


def _answer_values(answer: Answer) -> Iterator[_Bounded]:
    yield "begin", answer.started_unix_s, 0.0, _LATEST_UNIX_S
    yield "time", answer.total_s, 0.0, _LONGEST_S
    yield "first token's time", answer.first_token_s, 0.0, _LONGEST_S
    yield "recording's time", answer.recording_s, 0.0, _LONGEST_S
    yield "temperature", answer.temperature, 0.0, LARGEST
    yield "tokens", answer.tokens, 0, LARGEST
    yield "prompt's tokens", answer.prompt_tokens, 0, LARGEST
    yield "energy", answer.energy_j or 0.0, -LARGEST, LARGEST
    for what, window in ("window", answer.window), ("used window", answer.window_used):
        if isinstance(window, int):
            yield what, window, 0, LARGEST
    for at_s in answer.at_s:
        yield "time of a round's commit", at_s, 0.0, _LONGEST_S
    for round_ in answer.rounds:
        yield from _round_values(round_)
    for way in ("up", "down"):
        total = sum(getattr(round_, f"{way}link_bytes") for round_ in answer.rounds)
        yield f"bytes {way} of all rounds", total, 0, LARGEST
    if answer.clock_s is not None:
        yield "begin by the run's clock", answer.clock_s, 0.0, _LATEST_UNIX_S
    for sample in answer.rtts:
        yield "time of an RTT", sample.at_s, 0.0, _LONGEST_S
        yield "RTT", sample.rtt_s, 0.0, _LONGEST_S
    yield "pings", answer.pings, 0, LARGEST
    yield "probes' bytes up", answer.probe_uplink_bytes, 0, LARGEST
    yield "probes' bytes down", answer.probe_downlink_bytes, 0, LARGEST
    if answer.link is not None:
        yield from _link_values(answer.link)
    if answer.choice is not None:
        yield from _choice_values(answer.choice)


def _choice_values(choice: Choice) -> Iterator[_Bounded]:
    yield "choice's seconds per token", choice.token_s or 0.0, 0.0, _LONGEST_S
    yield from _chosen_values("choice", choice)
    for forecast in choice.forecasts:
        yield from _chosen_values("forecast", forecast)
        yield "forecast's seconds per token", forecast.token_s, 0.0, _LONGEST_S
        yield "forecast's seconds of the edge", forecast.edge_s or 0.0, 0.0, _LONGEST_S


def _chosen_values(what: str, chosen: Choice | Forecast) -> Iterator[_Bounded]:
    yield f"{what}'s window", chosen.window, 0, LARGEST
    yield f"{what}'s top_k", chosen.top_k, 0, LARGEST
    for branches in chosen.expansion:
        yield f"{what}'s expansion", branches, 0, LARGEST


def _link_values(link: LinkState) -> Iterator[_Bounded]:
    for name in LinkState.__dataclass_fields__:
        if (reading := getattr(link, name)) is not None:
            what = f"link's {name}"
            yield what, reading.value, -LARGEST if name == "signal" else 0.0, LARGEST
            # an age may be below 0 by the time between two readings of the clock
            yield f"{what} age", reading.age_s, -_LATEST_UNIX_S, _LATEST_UNIX_S
            yield f"{what} samples", reading.samples, 0, LARGEST


def _round_values(round_: Round) -> Iterator[_Bounded]:
    yield "tokens before a round", round_.start, 0, LARGEST
    yield "window of a round", round_.window, 0, 1e4
    yield "drafted tokens of a round", round_.nodes, 0, LARGEST
    yield "accepted tokens of a round", round_.accepted, 0, round_.window
    for name, counter in counters().items():
        yield (
            f"{counter.metric.replace('_', ' ')} of a round",
            round_.notes.get(name, 0),
            0,
            counter.count_units([round_]),
        )
    yield "hidden states of a round", round_.inquired, 0, round_.window
    yield "bytes up of a round", round_.uplink_bytes, 0, LARGEST
    yield "bytes down of a round", round_.downlink_bytes, 0, LARGEST
    for stage in STAGES:
        yield f"{stage} time of a round", getattr(round_.timings, stage), 0.0, _LONGEST_S
