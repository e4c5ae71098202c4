"""A dashboard as data: sections of panels, each with its PromQL expressions.

`monitoring.grafana` converts a dashboard to Grafana's JSON. Each expression is written only once,
in `edge_dashboard`, `device_dashboard` or `watch_dashboard`.

Grafana replaces two variables in an expression: ``$instance``, the instances that the reader has
chosen, and ``$__rate_interval``, a time of at least four scrapes.
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

INSTANCE: Final = 'instance=~"$instance"'  # the selector that each metric of a panel has
_RATE: Final = "[$__rate_interval]"

# Grafana's panels: values over time, values now, a table of values now, a histogram over time
Kind: TypeAlias = Literal["timeseries", "stat", "table", "heatmap"]


@dataclass(frozen=True)
class Query:
    """A PromQL expression. legend: name of each series, with labels in Grafana's form {{label}}."""

    expression: str
    legend: str = "{{instance}}"


@dataclass(frozen=True)
class Panel:
    """A panel of a dashboard.

    unit: Grafana's name of the unit. width: of 24 columns. needs: what a machine must have, so that
    the panel is not empty; "" if every machine has it. stacked: whether series add up.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    width: int = 8
    needs: str = ""
    stacked: bool = False


@dataclass(frozen=True)
class Section:
    """A row of a dashboard: panels under one title."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """A dashboard. name: edge, device or watch. instances: a metric that every instance has."""

    name: str
    title: str
    description: str
    instances: str
    sections: tuple[Section, ...]

    @property
    def uid(self) -> str:
        """The identity in Grafana, which stays the same over versions."""
        return f"pilotfish-{self.name}"

    @property
    def panels(self) -> list[Panel]:
        """All panels, from top to bottom."""
        return [panel for section in self.sections for panel in section.panels]


def series(metric: str, selector: str = "") -> str:
    """Return the expression of a metric of the chosen instances. selector: further labels."""
    return f"{metric}{{{', '.join([INSTANCE, selector][: 2 if selector else 1])}}}"


def rate(metric: str, by: str = "instance", selector: str = "") -> str:
    """Return the expression of a counter's sum per second, by these labels."""
    return f"sum by ({by}) (rate({series(metric, selector)}{_RATE}))"


def ratio(above: str, below: str, by: str = "instance", selector: str = "") -> str:
    """Return the expression of one counter's growth divided by another's; both by these labels."""
    return f"{rate(above, by, selector)} / {rate(below, by, selector)}"


def mean(histogram: str, by: str = "instance") -> str:
    """Return the expression of the mean of a histogram's values."""
    return ratio(f"{histogram}_sum", f"{histogram}_count", by)


def quantile(share: float, histogram: str, by: str = "", selector: str = "") -> str:
    """Return the expression of a quantile of a histogram's values. by: labels, besides ``le``."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', labels, selector)})"


def quantiles(histogram: str) -> tuple[Query, ...]:
    """Return the queries of the median, the 90th and the 99th percentile of all instances."""
    return tuple(
        Query(quantile(share, histogram), f"p{share * 100:g}") for share in (0.5, 0.9, 0.99)
    )


def heatmap(histogram: str) -> tuple[Query, ...]:
    """Return the query of a histogram's buckets over time."""
    buckets = f"increase({series(f'{histogram}_bucket')}{_RATE})"
    return (Query(f"sum by (le) ({buckets})", "{{le}}"),)


def process_section(instances: str) -> Section:
    """Return the section about the processes of those instances that have this metric."""
    known = f"and on (instance) {series(instances)}"
    return Section(
        "Process",
        (
            Panel(
                "Memory",
                "Resident memory of the process, without GPU memory.",
                "bytes",
                (Query(f"{series('process_resident_memory_bytes')} {known}"),),
            ),
            Panel(
                "CPU",
                "CPU time per second. 1 is one CPU in full use.",
                "none",
                (Query(f"rate({series('process_cpu_seconds_total')}{_RATE}) {known}"),),
            ),
            Panel(
                "Open files",
                "Share of the permitted open files that are in use. Each connection is a file.",
                "percentunit",
                (
                    Query(
                        f"{series('process_open_fds')} / {series('process_max_fds')} {known}",
                    ),
                ),
            ),
        ),
    )
