"""Metrics of both ends: plain numbers that are declared once, and cost a round next to nothing.

A dataclass declares them, a field each: `counter`, `gauge`, `histogram`, `notes`. Its owner counts
by plain arithmetic: ``own.pings += 1``, ``own.windows["greedy"] += 1``, ``own.queue_s.add(0.01)``;
a field with labels is a dict by the label's value, or by a tuple of them if there are several.
`families` and `metric` make of that what Prometheus' library writes out (extra `serve`); nothing
else needs it.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from prometheus_client import Metric


class Histogram:
    """How many values were at most each of some bounds (ascending), and beyond the last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Histograms(dict[Any, Histogram]):
    """Histograms with the same bounds by their labels; they begin when they are first asked for."""

    def __init__(self, bounds: Sequence[float]) -> None:
        super().__init__()
        self._bounds = bounds

    def __missing__(self, labels: Any) -> Histogram:
        self[labels] = Histogram(self._bounds)
        return self[labels]


def counter(name: str, text: str, *labels: str, known: Sequence[str] = ()) -> Any:
    """Declare what only grows: an int, or a `Counter` by its labels. text: its help.

    known: labels that are told before they are counted.
    """
    first = Counter[str](dict.fromkeys(known, 0)).copy if labels else int
    return _declare(first, "counter", name, text, *labels)


def gauge(name: str, text: str, *labels: str, first: Callable[[], float] = int) -> Any:
    """Declare what rises and falls: ``first()`` to begin with, or a dict by its labels."""
    return _declare(dict if labels else first, "gauge", name, text, *labels)


def histogram(name: str, text: str, bounds: Sequence[float], *labels: str) -> Any:
    """Declare a `Histogram`, or `Histograms` by their labels; bounds are written as they are."""
    kind = Histograms if labels else Histogram
    return _declare(lambda: kind(bounds), "histogram", name, text, *labels)


class Described(Protocol):
    """A quantity with a name of its own and a help text."""

    @property
    def name(self) -> str:
        """Return its name."""

    @property
    def help(self) -> str:
        """Return its help text."""


_Described = TypeVar("_Described", bound=Described)


def notes(kinds: Callable[[], Mapping[str, _Described]], name: Callable[[_Described], str]) -> Any:
    """Declare the protocols' own counters: a dict by the counter's name and the protocol.

    kinds: lists them by name; name: makes the metric's name of one.
    """

    def make_metrics(prefix: str, sums: dict[tuple[str, str], float]) -> Iterator["Metric"]:
        for kind in kinds().values():
            labels = [protocol for what, protocol in [*sums] if what == kind.name]
            values = {protocol: sums[kind.name, protocol] for protocol in labels}
            yield metric("counter", prefix, name(kind), kind.help, values, "protocol")

    about = {"metrics": make_metrics, "labels": ("protocol",)}
    return field(default_factory=lambda: defaultdict(float), metadata=about)


def metric_families(counts: Any, prefix: str, *, without: str = "") -> Iterator["Metric"]:
    """Yield everything that the dataclass of ``own`` declares, as it stands now.

    without: a label; what has it is left out.
    """
    for one in fields(counts):
        if one.metadata and without not in one.metadata["labels"]:
            yield from one.metadata["metrics"](prefix, getattr(counts, one.name))


def metric(
    kind: Literal["counter", "gauge", "histogram"],
    prefix: str,
    name: str,
    text: str,
    value: Any,
    *labels: str,
) -> "Metric":
    """Make a family of samples. value: as a field of this kind with these labels holds it."""
    from prometheus_client import core

    kinds = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    family: Any = kinds[kind](prefix + name, text, labels=labels)
    samples = sorted(dict(value).items()) if labels else [((), value)]  # a copy: counting goes on
    for key, one in samples:
        at = (key,) if isinstance(key, str) else key
        if isinstance(one, Histogram):
            bounds = [*map(str, one.bounds), "+Inf"]
            buckets = [*zip(bounds, accumulate([*one.counts]), strict=True)]
            family.add_metric(at, buckets, one.total)
        else:
            family.add_metric(at, one)
    result: Metric = family
    return result


def _declare(first: Callable[[], object], kind: Any, name: str, *description: str) -> Any:
    def make_metrics(prefix: str, value: Any) -> Iterable["Metric"]:
        text, *labels = description
        return [metric(kind, prefix, name, text, value, *labels)]

    return field(
        default_factory=first, metadata={"metrics": make_metrics, "labels": description[1:]}
    )
