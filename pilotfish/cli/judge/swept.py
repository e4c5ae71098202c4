"""What `pilotfish judge sweep` shows of a sweep: tables, JSON, a plot."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pilotfish.cli.options import write_json
from pilotfish.field.report.statistics import share_interval
from pilotfish.judge.costs import FULL, GREEDY, JUDGED, Cost, ModelPace
from pilotfish.judge.figures import Figure, costs, figures
from pilotfish.judge.sweep_file import LinkProfile, SweepFile, SweepHeader

_HEADINGS = (
    *("ρ", "right, %", "less greedy's", "forg.", "AAL", "rounds"),
    *("T full", "T sel.", "tok/s"),
)
_MODELLED = (
    "Tokens and rounds are the real models'; seconds are modelled: γ·T_draft + T_verify(γ+1) + "
    "bytes and round trips over the link, without reading the prompt. T_draft {draft:.1f} ms, "
    "T_verify {verify} ms. In brackets 95 % intervals. AAL: tokens a round. T: seconds an answer "
    "under wisv-full (or greedy) and wisv-selective; tok/s: under the former."
)


def show(kept: SweepFile, pace: ModelPace, json_path: str | None) -> None:
    """Print a table for each link and window; write the figures as JSON if asked."""
    assert kept.plan is not None
    plan, tallies = kept.plan, list(kept.tallies.values())
    result, spent = figures(plan, tallies), costs(plan, tallies, pace)
    if json_path:
        write_json(json_path, as_json(plan, result, spent, pace))
    if json_path == "-":
        return
    console = Console(highlight=False)
    for profile in plan.profiles:
        for window in plan.windows:
            console.print(_table(result, spent, profile, window))
    verify = ", ".join(f"{width}: {s * 1e3:.0f}" for width, s in sorted(pace.verify_s.items()))
    info = _MODELLED.format(draft=pace.draft_s * 1e3, verify=verify)
    console.print(info, style="dim", soft_wrap=True)


def as_json(
    plan: SweepHeader,
    found: Sequence[Figure],
    spent: dict[tuple[int, LinkProfile], dict[str, Cost]],
    pace: ModelPace,
) -> dict[str, Any]:
    """Collect all figures: those of `greedy` for each link."""
    lines = []
    for (at, profile), each in spent.items():
        item = found[at]
        options = {
            **item.setting._asdict(),
            **{name: value for name, value in asdict(item).items() if name != "setting"},
        }
        options |= {"profile": profile._asdict(), "accuracy": item.accuracy}
        options["accuracy_within"] = share_interval(item.right, item.n)
        options["modelled"] = {
            name: {**cost._asdict(), "tokens_per_s": item.tokens / cost.seconds}
            for name, cost in each.items()
        }
        lines.append(options)
    return {
        "modelled": "seconds, tokens_per_s",
        "pace": asdict(pace),
        "plan": {name: value for name, value in asdict(plan).items() if name != "settings"},
        "figures": lines,
    }


def _table(
    found: Sequence[Figure],
    spent: dict[tuple[int, LinkProfile], dict[str, Cost]],
    profile: LinkProfile,
    window: int,
) -> Table:
    """Tabulate what the thresholds do under one link and window."""
    ours = [
        (item, spent[at, profile])
        for at, item in enumerate(found)
        if (at, profile) in spent and item.setting.window == window
    ]
    table = Table(
        title=f"{profile}, window {window}, {ours[0][0].n} questions",
        title_justify="left",
        box=None,
        collapse_padding=True,
    )
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    head = None
    for item, cost in ours:
        if item.setting.head != head:
            head = item.setting.head
            table.add_row(head, end_section=True)
        table.add_row(*(_plain_row(item, cost) if head is None else _judged_row(item, cost)))
    return table


def _plain_row(one: Figure, cost: dict[str, Cost]) -> list[str]:
    seconds = cost[GREEDY].seconds
    figures_ = [f"{one.aal:.2f}", f"{one.rounds:.1f}", f"{seconds:.2f}", ""]
    return [GREEDY, _accuracy(one), "", "", *figures_, f"{one.tokens / seconds:.1f}"]


def _judged_row(one: Figure, cost: dict[str, Cost]) -> list[str]:
    low, high = one.gained_within
    return [
        f"{one.setting.threshold:.3g}",
        _accuracy(one),
        f"{100 * one.gained:+.1f} ({100 * low:+.1f}…{100 * high:+.1f})",
        f"{one.forgiven:.0%}",
        f"{one.aal:.2f}",
        f"{one.rounds:.1f}",
        *(f"{cost[each].seconds:.2f}" for each in JUDGED),
        f"{one.tokens / cost[FULL].seconds:.1f}",
    ]


def _accuracy(one: Figure) -> str:
    low, high = share_interval(one.right, one.n)
    return f"{100 * one.accuracy:.1f} ({100 * low:.0f}…{100 * high:.0f})"


def draw(path: Path, kept: SweepFile) -> None:
    """Draw accuracy over threshold, a line for each link, at the first window (wisv figure 3)."""
    from pilotfish.field.drawing import MARKERS, PALETTE, plot

    assert kept.plan is not None
    plan, result = kept.plan, figures(kept.plan, list(kept.tallies.values()))
    window = plan.windows[0]
    plain = next(item for item in result if item.setting.head is None)
    judged = [item for item in result if item.setting.head and item.setting.window == window]
    head = judged[0].setting.head
    thresholds = sorted(
        {item.setting.threshold or 0.0 for item in judged if item.setting.head == head}
    )
    title = f"Accuracy by threshold: {head}, window {window}, n = {plain.n}"
    with plot(path, title, "threshold of ρ, evenly spaced", "answered rightly (%)") as axes:
        axes.axhline(100 * plain.accuracy, color=PALETTE[-1], linestyle="--", label=GREEDY)
        for number, profile in enumerate(plan.profiles):
            line = {
                item.setting.threshold: 100 * item.accuracy
                for item in judged
                if (item.setting.head, item.setting.profile) == (head, profile)
            }
            axes.plot(
                range(len(thresholds)),
                [line[item] for item in thresholds],
                marker=MARKERS[number % len(MARKERS)],
                color=PALETTE[number % len(PALETTE)],
                label=str(profile),
            )
        every = max(1, len(thresholds) // 7)
        ticks = range(0, len(thresholds), every)
        axes.set_xticks(list(ticks), [f"{thresholds[at]:.2g}" for at in ticks])
        axes.legend()
