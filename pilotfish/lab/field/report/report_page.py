"""Write the report: one HTML page that needs no network, no other file and no script; and PNGs.

In: measured runs. Out: a folder with ``report.html``, which embeds the pictures, and with each
picture as a separate PNG file.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from pilotfish.base.files import PRIVATE, private_folder, write_whole
from pilotfish.lab.field.report import link_tables, tables
from pilotfish.lab.field.report.answer_values import choice_shares, chosen_protocols
from pilotfish.lab.field.report.figures import lowest
from pilotfish.lab.field.report.measured import MeasuredRun
from pilotfish.lab.field.report.pictures import Gallery, draw
from pilotfish.lab.field.report.samples import percentiles
from pilotfish.lab.field.report.template import TEMPLATE
from pilotfish.lab.page import render_page
from pilotfish.lab.statistics import FEWEST_VALUES, RESAMPLES

PAGE = "report.html"


def write(
    runs: Sequence[MeasuredRun], folder: Path, show: Callable[[int, int], None] = lambda *_: None
) -> Path:
    """Create ``folder``; write the page and the plots into it; return the page's path.

    show: callback after each plot; arguments: number of finished plots, number of all plots. Raises
    `OSError` if a file cannot be written.
    """
    private_folder(folder)
    path = folder / PAGE
    write_whole(path, page(runs, draw(runs, folder, show)).encode(), PRIVATE)
    return path


def page(runs: Sequence[MeasuredRun], gallery: Gallery) -> str:
    """Render the page's HTML; escape all text that comes from run files."""
    return render_page(
        TEMPLATE,
        runs=runs,
        gallery=gallery,
        summaries={run.name: _summary(run) for run in runs},
        measured=any(run.figures for run in runs),
        clock={run.name: link_tables.clock_steps(run) for run in runs},
        away={run.name: link_tables.outage_summary(run) for run in runs},
        outages={run.name: link_tables.outages(run) for run in runs},
        rtts=link_tables.rtt_percentiles(runs),
        traffic=link_tables.traffic(runs),
        answer_percentiles=link_tables.answer_percentiles(runs),
        differences=tables.differences(runs),
        common=tables.common(runs),
        latencies={run.name: tables.latencies(run) for run in runs},
        positions={run.name: tables.positions(run) for run in runs},
        choices={run.name: tables.choices(run.hindsight) for run in runs if run.hindsight},
        auto={run.name: _auto_summary(run) for run in runs if run.hindsight},
        resamples=RESAMPLES,
        few=FEWEST_VALUES,
    )


def _summary(run: MeasuredRun) -> str:
    """Summarise a run in one or two sentences; that of a watch begins with the link."""
    return f"{_watch_summary(run)} {_run_summary(run)}".strip()


def _watch_summary(run: MeasuredRun) -> str:
    """Summarise the link of a watch in a sentence; "" for other runs."""
    history = run.history
    if run.facts.watch is None:
        return ""
    of = "" if history.rounds == history.slots else f" of {history.slots:,}"
    parts = [
        link_tables.duration(history.ended_s - history.began_s),
        f"{history.rounds:,}{of} rounds",
    ]
    known = percentiles(history.rtt.values)
    texts = [f"{name} {known[name]:.1f}" for name in ("p50", "p99") if known[name] is not None]
    if texts:
        parts.append(f"RTT {', '.join(texts)} ms")
    parts.append(link_tables.availability(run))
    if shares := choice_shares(run.answers):
        protocol, share = next(iter(shares.items()))
        number = len(chosen_protocols(run.answers))
        parts.append(f"auto chose {protocol} in {100 * share:.0f} % of its {number:,} answers")
    return f"{'; '.join(parts)}."


def _run_summary(run: MeasuredRun) -> str:
    """Summarise a run's answers in one or two sentences."""
    if not run.figures:
        return "No answer was finished."
    best = lowest(run.figures)
    if best is None or best.token_ms is None:
        return "No fixed choice with a target has answers with steady rounds."
    spread = best.token_ms
    bounds = tables.interval(spread)
    interval = "" if bounds == tables.NONE else f", 95 % interval {bounds}"
    text = (
        f"Of the fixed choices, {best.configuration} took the shortest time: "
        f"{spread.median:.1f} ms per "
        f"committed token (median, n = {spread.n}{interval})."
    )
    if run.hindsight is not None and run.hindsight.auto is not None:
        auto = run.hindsight.auto
        text += f" auto took {auto.median:.1f} ms (n = {auto.n})."
    return text


def _auto_summary(run: MeasuredRun) -> str:
    """Summarise the choices of `auto` in one or two sentences."""
    hindsight = run.hindsight
    if hindsight is None or hindsight.auto is None:
        return "No answer of auto has steady rounds."
    auto = hindsight.auto
    text = f"auto took {auto.median:.1f} ms per committed token (median, n = {auto.n})"
    if (
        hindsight.best is not None
        and hindsight.best.fixed is not None
        and hindsight.excess is not None
    ):
        text += (
            f", {_format_excess(hindsight.excess)} the best fixed choice of the same run, "
            f"{hindsight.best.configuration} at {hindsight.best.fixed.median:.1f} ms"
        )
    else:
        text += "; the run has no fixed choice to compare it with"
    if hindsight.error is not None:
        text += f". Its predictions were off by {hindsight.error * 100:.0f} % in the median"
    return text + "."


def _format_excess(excess: float) -> str:
    if abs(excess) < 0.005:
        return "as much as"
    return f"{abs(excess) * 100:.0f} % {'more' if excess > 0 else 'less'} than"
