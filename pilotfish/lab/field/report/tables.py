"""The report's tables, as headings and cells. The text in them is not escaped.

In: measured runs. Out: tables with units in the headings.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from pilotfish.lab.field.axes import format_point, of_link
from pilotfish.lab.field.configuration import has_windows
from pilotfish.lab.field.report.figures import Figures, counters_with_values, lowest
from pilotfish.lab.field.report.hindsight import Hindsight
from pilotfish.lab.field.report.measured import MeasuredRun
from pilotfish.lab.field.run_facts import Model
from pilotfish.lab.page import Table
from pilotfish.lab.statistics import Spread
from pilotfish.wire.protocols import RoundCounter

NONE = "–"  # text of a cell without a measured value


def number(value: float | None, digits: int = 1) -> str:
    """Format a number; None becomes –."""
    return NONE if value is None else f"{value:,.{digits}f}"


def _percent(share: float | None) -> str:
    return NONE if share is None else number(100 * share)


def interval(spread: Spread | None, digits: int = 1) -> str:
    """Format an interval as low–high; a missing interval becomes –."""
    if spread is None or spread.low is None:
        return NONE
    return f"{number(spread.low, digits)}–{number(spread.high, digits)}"


def _median(pick: Callable[[Figures], Spread | None], digits: int = 1) -> Callable[[Figures], str]:
    def cell(figures: Figures) -> str:
        spread = pick(figures)
        return NONE if spread is None else number(spread.median, digits)

    return cell


def _p95(pick: Callable[[Figures], Spread | None], digits: int = 1) -> Callable[[Figures], str]:
    def cell(figures: Figures) -> str:
        spread = pick(figures)
        return NONE if spread is None else number(spread.p95, digits)

    return cell


_COLUMNS: tuple[tuple[str, str, Callable[[Figures], str]], ...] = (
    ("", "protocol", lambda f: str(f.configuration)),
    ("", "n", lambda f: str(f.n)),
    ("ms per token", "median", _median(lambda f: f.token_ms)),
    ("ms per token", "95 % interval", lambda f: interval(f.token_ms)),
    ("ms per token", "p95", _p95(lambda f: f.token_ms)),
    ("ms per round", "median", _median(lambda f: f.round_ms)),
    ("ms per round", "p95", _p95(lambda f: f.round_ms)),
    ("first token, ms", "median", _median(lambda f: f.first_token_ms, 0)),
    ("first token, ms", "p95", _p95(lambda f: f.first_token_ms, 0)),
    ("after first token", "tokens/s", lambda f: number(f.tokens_per_s)),
    ("", "α", lambda f: number(f.acceptance, 2)),
    ("", "tokens per round", lambda f: number(f.tokens_per_round, 2)),
    ("bytes per token", "up", lambda f: number(f.up_bytes_per_token)),
    ("bytes per token", "down", lambda f: number(f.down_bytes_per_token)),
    ("energy", "J per token", _median(lambda f: f.joules_per_token, 2)),
)
_STATES_REQUESTED: tuple[str, str, Callable[[Figures], str]] = (
    *("rounds, %", "with a request for states"),
    lambda f: _percent(f.asked),
)


def _counter_column(counter: RoundCounter) -> tuple[str, str, Callable[[Figures], str]]:
    name = counter.name
    if counter.counts_tokens:
        return f"of {counter.unit}, %", name, lambda f: _percent(f.notes[name])
    return "", counter.heading, lambda f: number(f.notes[name], 4)


def latencies(run: MeasuredRun) -> Table:
    """Tabulate the medians and tails of each (protocol, window) of a run."""
    best = lowest(run.figures)
    columns = [*_COLUMNS, *map(_counter_column, counters_with_values(run.figures))]
    if any(figures.asked is not None for figures in run.figures):
        columns.append(_STATES_REQUESTED)
    return Table(
        headings=[(group, heading) for group, heading, _ in columns],
        rows=[[cell(figures) for _, _, cell in columns] for figures in run.figures],
        best=None if best is None else run.figures.index(best),
    )


def positions(run: MeasuredRun) -> Table:
    """Tabulate the numbers of rounds that drafted, reached and accepted each depth."""
    return Table(
        headings=[
            ("", "protocol"),
            ("", "depth"),
            ("rounds", "drafted"),
            ("rounds", "reached"),
            ("rounds", "accepted"),
            ("accepted of", "drafted, %"),
            ("accepted of", "reached, %"),
        ],
        rows=[
            [
                str(f.configuration),
                *map(str, (p.depth, p.drafted, p.reached, p.accepted)),
                number(100 * p.accepted / p.drafted, 0),
                number(100 * p.accepted / p.reached, 0) if p.reached else NONE,
            ]
            for f in run.figures
            for p in f.positions
        ],
    )


def choices(hindsight: Hindsight) -> Table:
    """Tabulate the configurations that ``auto`` can choose, with numbers of choices and times."""

    def median(spread: Spread | None) -> str:
        return NONE if spread is None else number(spread.median)

    return Table(
        headings=[
            ("", "protocol"),
            ("", "chosen"),
            ("ms per token", "forecast"),
            ("ms per token", "measured when chosen"),
            ("ms per token", "measured as fixed choice"),
            ("ms per token", "95 % interval as fixed choice"),
            ("", "reason of the last choice"),
        ],
        rows=[
            [
                str(alternative.configuration),
                f"{alternative.chosen}×" if alternative.chosen else NONE,
                number(alternative.forecast_ms),
                median(alternative.measured),
                median(alternative.fixed),
                interval(alternative.fixed),
                alternative.reason or NONE,
            ]
            for alternative in hindsight.alternatives
        ],
    )


def differences(runs: Sequence[MeasuredRun]) -> Table:
    """Tabulate the facts that differ between runs, with a row per fact and a column per run."""
    facts = _facts(runs)
    return Table(
        headings=[("", "")] + [("", run.name) for run in runs],
        rows=[[name, *values] for name, values in facts.items() if len(set(values)) > 1],
    )


def common(runs: Sequence[MeasuredRun]) -> Table:
    """Tabulate the facts that are the same in all runs; for a single run, all its facts."""
    facts = _facts(runs)
    return Table(
        headings=[("", ""), ("", "all runs" if len(runs) > 1 else runs[0].name)],
        rows=[[name, values[0]] for name, values in facts.items() if len(set(values)) == 1],
    )


def _facts(runs: Sequence[MeasuredRun]) -> dict[str, list[str]]:
    """Return the values of each fact in all runs, by the fact's name."""
    columns = [dict(_conditions(run)) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name, NONE) for column in columns] for name in names}


def _conditions(run: MeasuredRun) -> Iterator[tuple[str, str]]:
    facts, settings = run.facts, run.facts.settings
    yield "device", facts.device or NONE
    yield "note", facts.note or NONE
    yield "file", run.path.name
    yield "measured (UTC)", _span(run.history.began_s, run.history.ended_s)
    if (watch := facts.watch) is not None:
        until = "until stopped" if watch.for_s is None else f"for {watch.for_s / 3600.0:,.1f} h"
        yield "schedule", f"a round every {watch.every_s:g} s, {until}"
    yield "starts", str(len(facts.starts))
    yield "counted answers", f"n = {len(run.answers)}"
    yield "left out", f"{run.warm_up} warm-up, {run.unfinished} unfinished"
    yield "drafter", _model(facts.drafter)
    yield "target", NONE if facts.target is None else _model(facts.target)
    yield "edge", facts.edge or NONE
    yield "edge's software", facts.edge_software or NONE
    yield "software", facts.software
    yield "encrypted", "no" if facts.keys_path is None else "yes"
    yield "protocols", ", ".join(settings.protocols)
    if any(map(has_windows, settings.protocols)):
        yield "windows", ", ".join(map(str, settings.windows))
    if facts.watch is None:
        yield "prompts × repeats", f"{len(settings.prompts)} × {settings.repeat}"
    else:
        yield "prompts", str(len(settings.prompts))
    yield "maximum tokens", str(settings.max_tokens)
    yield "temperature", f"{settings.temperature:g}"
    for name, value in settings.options.items():
        yield name, f"{value:g}" if isinstance(value, float) else str(value)
    for name, several in settings.varied.items():
        yield f"{name} varied", format_point((name, value) for value in several)
    if settings.link or of_link(settings.varied.items()):
        yield "emulated link", format_point(settings.link.items()) or "as varied"
    yield "seed", str(settings.seed)
    yield "provider, threads", f"{settings.provider}, {settings.threads or 'all'}"
    yield "energy from", facts.energy or "not measured"
    for name, value in _leaves(facts.host):
        yield f"host: {name}", value


def _span(began_s: float, ended_s: float) -> str:
    """Format begin and end of a run; omit the end's date if it is the begin's."""
    began, ended = (datetime.fromtimestamp(time_s, timezone.utc) for time_s in (began_s, ended_s))
    until = "%H:%M" if began.date() == ended.date() else "%Y-%m-%d %H:%M"
    return f"{began:%Y-%m-%d %H:%M} to {ended:{until}}"


def _model(model: Model) -> str:
    parts = [model.name, model.precision, model.digest[:12] if model.digest else None]
    return ", ".join(part for part in parts if part)


def _leaves(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Flatten nested facts into pairs of name and text; convert bytes to GiB."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        elif name.endswith("_bytes") and isinstance(value, int):
            yield name.removesuffix("_bytes"), f"{value / 2**30:.1f} GiB"
        else:
            yield name.replace("_", " "), str(value)
