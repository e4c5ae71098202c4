"""Tabulate what each protocol of a sweep costs: quality, tokens per round, bytes, seconds."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from pilotfish.lab.judge.costs import RELAXED, Cost
from pilotfish.lab.judge.figures import Figure, Interval
from pilotfish.lab.judge.sweep_file import LinkProfile
from pilotfish.lab.statistics import share_interval

_HEADINGS = (
    *("protocol", "n", "right, %", "points", "AAL", "AAL, %", "lossy"),
    *("kB up", "kB down", "s", "tok/s"),
)
_UNBOUNDED = 10_000  # columns; a terminal that is narrower than the table breaks its lines


def empty_table(title: str, headings: Sequence[str]) -> Table:
    """Make a table of a sweep without rows; all cells are right-justified and never broken."""
    table = Table(title=title, title_justify="left", box=None, collapse_padding=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def print_protocols(
    console: Console,
    rows: Sequence[Figure],
    spent: Mapping[tuple[int, LinkProfile], Mapping[str, Cost]],
    profile: LinkProfile,
    window: int,
) -> None:
    """Print every protocol at every setting over one link, at one window; no baselines.

    points, AAL, %: differences from greedy, or from the lowest τ. lossy: share of the mismatches
    that a head forgave; under adaptive the deviation of a position and the share of key tokens.
    """
    heads = {figure.setting.head for figure in rows if figure.setting.head}
    title = f"Protocols over {profile}, window {window}: bytes and seconds of an answer"
    table = empty_table(title, _HEADINGS)
    for at, figure in enumerate(rows):
        is_protocol = figure.setting.baseline is None
        if is_protocol and figure.setting.window == window and (at, profile) in spent:
            for protocol, cost in spent[at, profile].items():
                table.add_row(*_row(protocol, figure, cost, names_head=len(heads) > 1))
    needed = Console(width=_UNBOUNDED).measure(table).maximum
    Console(highlight=False, width=max(console.width, needed)).print(table)


def _row(protocol: str, figure: Figure, cost: Cost, *, names_head: bool) -> list[str]:
    setting, name, lossy = figure.setting, protocol, ""
    if setting.tau is not None:
        name = f"{RELAXED} τ {setting.tau:g}"
        lossy = f"{figure.deviation or 0.0:.3f}, {figure.key or 0.0:.0%} key"
    elif setting.head is not None:
        name = f"{protocol} ρ {setting.threshold:.3g}" + f" {setting.head}" * names_head
        lossy = f"{figure.forgiven:.0%}"
    low, high = share_interval(figure.right, figure.n)
    return [
        name,
        str(figure.n),
        f"{100 * figure.accuracy:.1f} ({100 * low:.0f}…{100 * high:.0f})",
        _difference(figure.gained, figure.gained_within),
        f"{figure.aal:.2f}",
        _difference(figure.aal_gained, figure.aal_within),
        lossy,
        f"{cost.up / 1e3:.2f}",
        f"{cost.down / 1e3:.2f}",
        f"{cost.seconds:.2f}",
        f"{figure.tokens / cost.seconds:.1f}",
    ]


def _difference(value: float, within: Interval) -> str:
    """Format a difference in hundredths with its interval; "" for the baseline itself."""
    if value == 0.0 and within == (0.0, 0.0):
        return ""
    low, high = within
    return f"{100 * value:+.0f} ({100 * low:+.0f}…{100 * high:+.0f})"
