"""Show a comparison of drafters: tables, a recommendation, and JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pilotfish.lab.field.comparison import WINDOWS, DrafterComparison, Recommendation
from pilotfish.lab.field.resampling import FEWEST, Estimate
from pilotfish.lab.field.target_answers import AnswerHeader

# numbers k of drafts accepted in a row; the tables have a column S(k) for each
_SHOWN = (1, 2, 4, 8)


def print_comparison(comparison: DrafterComparison, target: str) -> None:
    """Print a comparison of drafters for this target."""
    console = Console(highlight=False)
    console.print(
        _agreement(comparison, target), _depths(comparison), _speeds(comparison), sep="\n"
    )
    warning = [f"Warning: {comparison.warning}"] if comparison.warning else []
    for line in [*_remarks(comparison), *warning, "", *_verdict(comparison)]:
        console.print(line, markup=False, soft_wrap=True)


def _agreement(comparison: DrafterComparison, target: str) -> Table:
    survival = (f"S({length})" for length in _SHOWN)
    table = _table(f"drafts for {target}", ["MiB", "ms a\ndraft", "α", *survival, "tokens"])
    for drafter in comparison.drafters:
        table.add_row(
            escape(drafter.name),
            f"{drafter.size_bytes / 2**20:.0f}",
            f"{drafter.draft_s * 1e3:.1f}",
            _share(drafter.acceptance),
            *(_share(drafter.survival[length]) for length in _SHOWN),
            f"{drafter.tokens}",
        )
    return table


def _depths(comparison: DrafterComparison) -> Table:
    depths = [
        f"{first}" if end == first + 1 else f"{first}–{end - 1}"
        for first, end, *_ in comparison.drafters[0].by_depth
    ]
    table = _table("α by depth: number of accepted drafts right before the draft", depths)
    for drafter in comparison.drafters:
        table.add_row(
            escape(drafter.name), *(_share(depth.reliable_acceptance) for depth in drafter.by_depth)
        )
    return table


def _speeds(comparison: DrafterComparison) -> Table:
    rtts = [f"{best.rtt_s * 1e3:g} ms" for best in comparison.ship]
    table = _table("expected tokens/s, by RTT", rtts)
    for drafter in comparison.drafters:
        cells = [
            f"{speed.tokens_per_s.value:.1f}\n{_way(speed.protocol, speed.window)}"
            if drafter.prompts
            else "–"
            for speed in drafter.expected
        ]
        best = [
            f"[bold]{cell}[/]" if ship.drafter == drafter.name else cell
            for cell, ship in zip(cells, comparison.ship, strict=True)
        ]
        table.add_row(escape(drafter.name), *best)
    table.add_row("stream, none", *[f"{comparison.streamed_per_s:.1f}"] * len(comparison.ship))
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    """Return an empty table for a row per drafter.

    On a narrow terminal it folds names, not numbers.
    """
    table = Table(title=escape(title), title_justify="left")
    table.add_column("drafter", overflow="fold")
    for heading in headings:
        table.add_column(escape(heading), justify="right", no_wrap=True)
    return table


def _remarks(comparison: DrafterComparison) -> Iterator[str]:
    """Explain the tables, and name the drafters and prompts that they leave out."""
    interval = "±: 95 % confidence interval, by resampling the prompts"
    if comparison.prompts < FEWEST:
        interval = f"no confidence intervals, which need {FEWEST} prompts"
    yield (
        f"α: share of drafts that equal the target's token. S(k): probability that k drafts in "
        f"a row do; {interval}. γ: rounds with this window, at most {WINDOWS}. tokens/s: after the "
        f"first round, which reads the prompt, as in field measure. Measured on "
        f"{_prompts(comparison.prompts)}. A pass of the target takes "
        f"{comparison.pass_s[0] * 1e3:.1f} ms, and with 4 drafts "
        f"{comparison.pass_s[4] * 1e3:.1f} ms."
    )
    for drafter in comparison.drafters:
        if not drafter.prompts:
            yield (
                f"{drafter.name} was not measured: no prompt fits its context together with the "
                "answer."
            )
        elif drafter.left_out:
            yield (
                f"{drafter.name} was measured without {drafter.left_out} of the prompts, which "
                f"do not fit its context together with their answers."
            )


def _prompts(count: int) -> str:
    return "1 prompt" if count == 1 else f"{count} prompts"


def _verdict(comparison: DrafterComparison) -> Iterator[str]:
    """Yield recommendations; neighbouring RTTs with the same recommendation share a line."""
    for _, alike in groupby(
        comparison.ship,
        key=lambda recommendation: (
            recommendation.drafter,
            recommendation.protocol,
            recommendation.alike,
        ),
    ):
        yield _shipped(list(alike))


def _shipped(same: Sequence[Recommendation]) -> str:
    first, last = same[0], same[-1]
    span = f"{first.rtt_s * 1e3:g}"
    if last is not first:
        span += f" to {last.rtt_s * 1e3:g}"
    if first.drafter is None:
        return f"At RTT {span} ms no drafter gains 5 %: use the target without a drafter (stream)."
    gains = [f"{recommendation.gain:.2f}" for recommendation in same]
    gain = gains[0] if len({*gains}) == 1 else f"{gains[0]} to {gains[-1]}"
    others = ""
    if first.alike:
        others = f"; equally fast within the error: {', '.join(first.alike)}"
    return f"At RTT {span} ms ship {first.drafter}: {first.protocol}, {gain} × stream{others}."


def _way(protocol: str, window: int) -> str:
    return f"γ={window}" if window else protocol


def _share(estimate: Estimate) -> str:
    """Format a share, and in a second line half the width of its confidence interval."""
    value, low, high = estimate
    if value is None:
        return "–"
    if low is None or high is None:
        return f"{value:.2f}"
    return f"{value:.2f}\n±{(high - low) / 2:.2f}".replace("0.", ".")


def as_json(header: AnswerHeader, comparison: DrafterComparison) -> dict[str, Any]:
    """Return the comparison as JSON: times in seconds, shares from 0 to 1, with their intervals."""
    return {
        "target": header.target,
        "max_tokens": header.max_tokens,
        "temperature": header.temperature,
        "seed": header.seed,
        **_plain(asdict(comparison)),
    }


def _plain(value: Any) -> Any:
    """Convert named tuples at any depth to objects."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(name): _plain(field) for name, field in value.items()}
    return [_plain(field) for field in value] if isinstance(value, list | tuple) else value
