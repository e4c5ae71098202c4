"""Turn the rows of a run file into rows of the exported tables (`columns`), one at a time.

In: an open run, its name. Out: pairs of a table's name and a row, a value for each column by name.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import chain
from statistics import median
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from pilotfish.device_runtime.record import STAGES, Choice
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.export.columns import POSITION, with_unit
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.report.plausible import are_possible_times, expect_plausible
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.run_clock import on_wall_clock
from pilotfish.lab.field.token_speed import steady_token_s, tokens_per_s
from pilotfish.wire.link.state import READINGS, LinkState

Row: TypeAlias = dict[str, Any]
_Read = TypeVar("_Read", Answer, Probe, Outage)
_EPOCH = datetime(1970, 1, 1)  # the columns' names say that they are UTC


class RunRows:
    """The rows of one run for all tables. name: the column ``run``."""

    def __init__(self, run: Run, name: str) -> None:
        self._run = run
        self._names_of_run = {"run": name, "device": run.facts.device}
        expect_plausible(run.path, [run.facts])
        # an impossible moment is left out here, and its row is refused when it is reached
        moments = [moment for moment in run.moments() if are_possible_times(moment)]
        clock_s, unix_s = [moment[0] for moment in moments], [moment[1] for moment in moments]
        self._clock_s = np.array(clock_s)
        self._unix_s = on_wall_clock(clock_s, unix_s).unix_s

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        """Yield each row with its table's name; raise `RunFileError` for impossible values."""
        for table, row in self._rows():
            yield table, {**self._names_of_run, **row}

    def _rows(self) -> Iterator[tuple[str, Row]]:
        for answer in self._only_plausible(self._run.answers(warm_up=True, finished=False)):
            began_s = self._corrected_s(answer.started_unix_s, answer.clock_s)
            yield "answers", {**self._moment("", answer.started_unix_s, answer.clock_s),
                              **_answer(answer)}  # fmt: skip
            yield from self._rounds(answer, began_s)
            for number, sample in enumerate(answer.rtts):
                at = {
                    "unix_s": began_s + sample.at_s,
                    "time_utc": self._time(began_s + sample.at_s),
                }
                yield "rtts", {"answer": answer.id, "number": number, **at, **sample._asdict()}
        for probe in self._only_plausible(self._run.probes()):
            moment = self._moment("", probe.began_unix_s, probe.clock_s)
            yield "probes", {**moment, **_probe(probe)}
            at = {name: moment[name] for name in ("unix_s", "time_utc")}
            for number, rtt_s in enumerate(probe.rtts_s):
                yield "rtts", {"probe": probe.id, "number": number, **at, "rtt_s": rtt_s}
        for outage in self._only_plausible(self._run.outages()):
            yield "outages", self._outage(outage)

    def _only_plausible(self, rows: Iterator[_Read]) -> Iterator[_Read]:
        """Yield the rows of the file; raise `RunFileError` at one with an impossible value."""
        for row in rows:
            expect_plausible(self._run.path, [row])
            yield row

    def _rounds(self, answer: Answer, began_s: float) -> Iterator[tuple[str, Row]]:
        timed = zip(answer.rounds, answer.at_s, strict=True)
        for number, (round_, at_s) in enumerate(timed):
            names = ("protocol", "start", "window", "nodes", "accepted", "inquired")
            yield (
                "rounds",
                {
                    "answer": answer.id,
                    "round": number,
                    "time_utc": self._time(began_s + at_s),
                    "unix_s": began_s + at_s,
                    "at_s": at_s,
                    **{name: getattr(round_, name) for name in names},
                    "tokens": len(round_.tokens),
                    "token_ids": _json(round_.tokens),
                    "uplink_bytes": round_.uplink_bytes,
                    "downlink_bytes": round_.downlink_bytes,
                    **{f"{stage}_s": getattr(round_.timings, stage) for stage in STAGES},
                    "total_s": round_.timings.total,
                    "notes": _json(round_.notes) if round_.notes else None,
                },
            )

    def _outage(self, outage: Outage) -> Row:
        row = {
            "outage": outage.id,
            "reason": outage.reason,
            **self._moment("began_", outage.began_unix_s, outage.began_clock_s),
        }
        if outage.ended_unix_s is not None and outage.ended_clock_s is not None:
            row |= self._moment("ended_", outage.ended_unix_s, outage.ended_clock_s)
            row["took_s"] = outage.ended_clock_s - outage.began_clock_s
        return row

    def _moment(self, prefix: str, wall_unix_s: float, clock_s: float | None) -> Row:
        unix_s = self._corrected_s(wall_unix_s, clock_s)
        return {
            f"{prefix}time_utc": self._time(unix_s),
            f"{prefix}unix_s": unix_s,
            f"{prefix}wall_unix_s": wall_unix_s,
            f"{prefix}clock_s": clock_s,
        }

    def _corrected_s(self, wall_unix_s: float, clock_s: float | None) -> float:
        """Return a time by that setting of the wall clock that held longest (`run_clock`)."""
        if clock_s is None or len(self._clock_s) == 0:
            return wall_unix_s
        at = max(0, int(np.searchsorted(self._clock_s, clock_s, side="right")) - 1)
        return float(self._unix_s[at] + (clock_s - self._clock_s[at]))

    def _time(self, unix_s: float) -> datetime:
        return _EPOCH + timedelta(milliseconds=round(unix_s * 1e3))


def _answer(answer: Answer) -> Row:
    names = ("protocol", "prompt", "repeat", "warm_up", "finished", "error", "temperature", "seed")
    used = ("protocol_used", "prompt_tokens", "tokens", "finish_reason", "first_token_s", "total_s")
    cost = ("recording_s", "pings", "probe_uplink_bytes", "probe_downlink_bytes", "energy_j")
    token_s = steady_token_s(answer)
    return {
        "answer": answer.id,
        "configuration": str(answer.configuration),
        "window": _tokens_or_none(answer.window),
        "window_auto": answer.window == "auto",
        "window_used": _tokens_or_none(answer.window_used),
        **{name: getattr(answer, name) for name in chain(names, used, cost)},
        "token_s": token_s,
        "tokens_per_s": tokens_per_s(token_s),
        "acceptance": answer.acceptance if any(r.window for r in answer.rounds) else None,
        "rounds": len(answer.rounds),
        "uplink_bytes": sum(round_.uplink_bytes for round_ in answer.rounds),
        "downlink_bytes": sum(round_.downlink_bytes for round_ in answer.rounds),
        "options": _json(dict(answer.point)) if answer.point else None,
        **_choice(answer.choice),
        **_link(answer.link),
    }


def _choice(choice: Choice | None) -> Row:
    if choice is None:
        return {}
    names = ("policy", "protocol", "window", "token_s", "hints", "top_k", "reason")
    return {
        **{f"choice_{name}": getattr(choice, name) for name in names},
        "choice_expansion": ",".join(map(str, choice.expansion)),
        "choice_forecasts": _json([each._asdict() for each in choice.forecasts]),
    }


def _link(link: LinkState | None) -> Row:
    row: Row = {}
    for name, kind in READINGS.items():
        if reading := getattr(link, name, None):
            row[f"link_{with_unit(name, kind.unit)}"] = reading.value
            row[f"link_{name}_age_s"] = reading.age_s
            row[f"link_{name}_samples"] = reading.samples
    return row


def _probe(probe: Probe) -> Row:
    names = ("took_s", "lost", "up_bps", "up_bound", "down_bps", "down_bound", "uplink_bytes")
    position, signal = probe.position or {}, probe.signal or {}
    return {
        "probe": probe.id,
        **{name: getattr(probe, name) for name in (*names, "downlink_bytes", "power_w")},
        "pings": len(probe.rtts_s),
        "rtt_median_s": median(probe.rtts_s) if probe.rtts_s else None,
        "signal_dbm": _float_or_none(signal.get("dbm")),
        "signal": _json(signal) if signal else None,
        **{
            f"position_{with_unit(name, unit)}": _float_or_none(position.get(name))
            for name, unit in POSITION.items()
        },
        **_link(probe.link),
    }


def _tokens_or_none(window: int | str | None) -> int | None:
    return window if isinstance(window, int) else None


def _float_or_none(value: float | str | None) -> float | None:
    return None if value is None or isinstance(value, str) else float(value)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
