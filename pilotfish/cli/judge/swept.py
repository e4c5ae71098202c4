"""Show a sweep: tables, JSON, a plot."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pilotfish.base.errors import UnsupportedError
from pilotfish.cli.judge.swept_protocols import empty_table, print_protocols
from pilotfish.cli.options import write_json
from pilotfish.lab.judge.costs import FULL, GREEDY, JUDGED, Cost, ModelPace
from pilotfish.lab.judge.figures import Figure, costs, figures
from pilotfish.lab.judge.rivals import Rivalry, rivalries
from pilotfish.lab.judge.sweep_file import LinkProfile, SweepFile, SweepHeader
from pilotfish.lab.statistics import share_interval

_HEADINGS = (
    *("ρ", "right, %", "less greedy's", "forg.", "AAL", "rounds"),
    *("T full", "T sel.", "tok/s"),
)
_RIVAL_HEADINGS = (
    *("ρ", "rule", "head right, %", "rule right, %", "head less rule"),
    *("head forg.", "rule forg.", "head AAL", "rule AAL"),
)
_MODELLED = (
    "Tokens and rounds come from the real models. Seconds are modelled: γ·T_draft + "
    "T_verify(γ+1) + the time of bytes and round trips on the link, without the time to read "
    "the prompt. T_draft is {draft:.1f} ms, T_verify {verify} ms. Brackets hold 95 % "
    "confidence intervals. AAL: tokens per round. T: seconds per answer with wisv-full (or "
    "greedy) and with wisv-selective; tok/s: with wisv-full (or greedy). points, AAL %: "
    "differences from greedy, or from the lowest τ. lossy: forgiven mismatches, or a position's "
    "deviation and key tokens. kB, s: of an answer."
)


def show(sweep_file: SweepFile, pace: ModelPace, json_path: str | None) -> None:
    """Print a table for each link and window; write the same values as JSON to ``json_path``."""
    assert sweep_file.plan is not None
    plan, tallies = sweep_file.plan, list(sweep_file.tallies.values())
    rows, spent = figures(plan, tallies), costs(plan, tallies, pace)
    compared = rivalries(plan, tallies)
    if json_path:
        write_json(json_path, as_json(plan, rows, spent, pace, compared))
    if json_path == "-":
        return
    console = Console(highlight=False)
    for profile in plan.profiles:
        for window in plan.windows:
            if plan.heads:
                console.print(_table(rows, spent, profile, window))
            if plan.has_baselines:
                console.print(_rivals_table(rows, compared, profile, window))
            print_protocols(console, rows, spent, profile, window)
    verify = ", ".join(f"{width}: {s * 1e3:.0f}" for width, s in sorted(pace.verify_s.items()))
    caption = _MODELLED.format(draft=pace.draft_s * 1e3, verify=verify)
    console.print(caption, style="dim", soft_wrap=True)


def as_json(
    plan: SweepHeader,
    rows: Sequence[Figure],
    spent: dict[tuple[int, LinkProfile], dict[str, Cost]],
    pace: ModelPace,
    compared: Sequence[Rivalry] = (),
) -> dict[str, Any]:
    """Return all results as JSON types: an object for each setting and link."""
    lines = []
    for (at, profile), each in spent.items():
        figure = rows[at]
        line = {
            **figure.setting._asdict(),
            **{name: value for name, value in asdict(figure).items() if name != "setting"},
        }
        line |= {"profile": profile._asdict(), "accuracy": figure.accuracy}
        line["accuracy_within"] = share_interval(figure.right, figure.n)
        line["modelled"] = {
            name: {**cost._asdict(), "tokens_per_s": figure.tokens / cost.seconds}
            for name, cost in each.items()
        }
        lines.append(line)
    return {
        "modelled": "seconds, tokens_per_s",
        "pace": asdict(pace),
        "plan": {name: value for name, value in asdict(plan).items() if name != "settings"},
        "figures": lines,
        "rivals": [
            {**asdict(each), "setting": each.setting._asdict(), "is_won": each.is_won}
            for each in compared
        ],
    }


def _table(
    rows: Sequence[Figure],
    spent: dict[tuple[int, LinkProfile], dict[str, Cost]],
    profile: LinkProfile,
    window: int,
) -> Table:
    """Tabulate the thresholds under one link and window."""
    selected = [
        (figure, spent[at, profile])
        for at, figure in enumerate(rows)
        if (at, profile) in spent
        and figure.setting.window == window
        and figure.setting.tau is None
        and figure.setting.baseline is None
    ]
    table = empty_table(f"{profile}, window {window}, {selected[0][0].n} questions", _HEADINGS)
    head = None
    for figure, cost in selected:
        if figure.setting.head != head:
            head = figure.setting.head
            table.add_row(head, end_section=True)
        table.add_row(*(_plain_row(figure, cost) if head is None else _judged_row(figure, cost)))
    return table


def _rivals_table(
    rows: Sequence[Figure], compared: Sequence[Rivalry], profile: LinkProfile, window: int
) -> Table:
    """Tabulate each threshold of the heads against its baselines under one link and window."""
    title = "against rules that forgive the same share of the mined mismatches"
    table = empty_table(title, _RIVAL_HEADINGS)
    head_rows = {figure.setting: figure for figure in rows}
    for each in compared:
        if (each.setting.profile, each.setting.window) != (profile, window):
            continue
        figure, (low, high) = head_rows[each.setting], each.gained_within
        table.add_row(
            f"{each.setting.threshold:.3g}",
            each.rule,
            f"{100 * figure.accuracy:.1f}",
            f"{100 * each.accuracy:.1f}",
            f"{100 * each.gained:+.1f} ({100 * low:+.1f}…{100 * high:+.1f})",
            f"{figure.forgiven:.0%}",
            f"{each.forgiven:.0%}",
            f"{figure.aal:.2f}",
            f"{each.aal:.2f}",
        )
    return table


def _plain_row(figure: Figure, cost: dict[str, Cost]) -> list[str]:
    seconds = cost[GREEDY].seconds
    figures_ = [f"{figure.aal:.2f}", f"{figure.rounds:.1f}", f"{seconds:.2f}", ""]
    return [GREEDY, _accuracy(figure), "", "", *figures_, f"{figure.tokens / seconds:.1f}"]


def _judged_row(figure: Figure, cost: dict[str, Cost]) -> list[str]:
    low, high = figure.gained_within
    return [
        f"{figure.setting.threshold:.3g}",
        _accuracy(figure),
        f"{100 * figure.gained:+.1f} ({100 * low:+.1f}…{100 * high:+.1f})",
        f"{figure.forgiven:.0%}",
        f"{figure.aal:.2f}",
        f"{figure.rounds:.1f}",
        *(f"{cost[each].seconds:.2f}" for each in JUDGED),
        f"{figure.tokens / cost[FULL].seconds:.1f}",
    ]


def _accuracy(figure: Figure) -> str:
    low, high = share_interval(figure.right, figure.n)
    return f"{100 * figure.accuracy:.1f} ({100 * low:.0f}…{100 * high:.0f})"


def draw(path: Path, sweep_file: SweepFile) -> None:
    """Draw accuracy over threshold, a line for each link, at the first window (wisv figure 3)."""
    from pilotfish.lab.drawing import MARKERS, PALETTE, plot

    assert sweep_file.plan is not None
    plan, rows = sweep_file.plan, figures(sweep_file.plan, list(sweep_file.tallies.values()))
    window = plan.windows[0]
    plain = next(figure for figure in rows if figure.setting.is_greedy)
    judged = [
        figure
        for figure in rows
        if figure.setting.head
        and figure.setting.window == window
        and figure.setting.baseline is None
    ]
    if not judged:
        raise UnsupportedError("--plot shows the thresholds of a head, and this sweep has none.")
    head = judged[0].setting.head
    thresholds = sorted(
        {figure.setting.threshold or 0.0 for figure in judged if figure.setting.head == head}
    )
    title = f"Accuracy by threshold: {head}, window {window}, n = {plain.n}"
    with plot(path, title, "threshold of ρ, evenly spaced", "answered correctly (%)") as axes:
        axes.axhline(100 * plain.accuracy, color=PALETTE[-1], linestyle="--", label=GREEDY)
        profiles = dict.fromkeys(figure.setting.profile for figure in judged)
        for number, profile in enumerate(profiles):
            line = {
                figure.setting.threshold: 100 * figure.accuracy
                for figure in judged
                if (figure.setting.head, figure.setting.profile) == (head, profile)
            }
            axes.plot(
                range(len(thresholds)),
                [line.get(threshold, math.nan) for threshold in thresholds],
                marker=MARKERS[number % len(MARKERS)],
                color=PALETTE[number % len(PALETTE)],
                label=str(profile),
            )
        every = max(1, len(thresholds) // 7)
        ticks = range(0, len(thresholds), every)
        axes.set_xticks(list(ticks), [f"{thresholds[at]:.2g}" for at in ticks])
        axes.legend()
