"""Metrics of device and edge: plain numbers, declared once, cheap to count.

A dataclass declares each metric as a field: `counter`, `gauge`, `histogram`, `notes`. Its owner
counts by plain arithmetic: ``counts.pings += 1``, ``counts.windows["greedy"] += 1``,
``counts.queue_s.add(0.01)``. A field with labels is a dict; its keys are label values, or tuples of
them for several labels. `metric_families` and `metric` convert the fields for Prometheus' library
(extra `serve`); only these two functions need it.
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
    """Counts of values: one for each interval between ascending bounds, one above the last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Histograms(dict[Any, Histogram]):
    """Histograms with the same bounds, by label; each is created at its first use."""

    def __init__(self, bounds: Sequence[float]) -> None:
        super().__init__()
        self._bounds = bounds

    def __missing__(self, labels: Any) -> Histogram:
        self[labels] = Histogram(self._bounds)
        return self[labels]


def counter(name: str, text: str, *labels: str, known: Sequence[str] = ()) -> Any:
    """Declare a counter: an int; with labels, a `Counter` by label.

    text: the help text. known: label values that are exported as 0 before their first count.
    """
    first = Counter[str](dict.fromkeys(known, 0)).copy if labels else int
    return _declare(first, "counter", name, text, *labels)


def gauge(name: str, text: str, *labels: str, first: Callable[[], float] = int) -> Any:
    """Declare a gauge with the initial value ``first()``; with labels, a dict by label."""
    return _declare(dict if labels else first, "gauge", name, text, *labels)


def histogram(name: str, text: str, bounds: Sequence[float], *labels: str) -> Any:
    """Declare a `Histogram`; with labels, `Histograms`. bounds: the buckets' upper bounds."""
    kind = Histograms if labels else Histogram
    return _declare(lambda: kind(bounds), "histogram", name, text, *labels)


class Described(Protocol):
    """A quantity with a name and a help text."""

    @property
    def name(self) -> str:
        """The quantity's name."""

    @property
    def help(self) -> str:
        """The quantity's help text."""


_Described = TypeVar("_Described", bound=Described)


def notes(kinds: Callable[[], Mapping[str, _Described]], name: Callable[[_Described], str]) -> Any:
    """Declare the protocols' counters: a dict by (counter's name, protocol).

    kinds: returns the counters by name. name: returns a counter's metric name.
    """

    def make_metrics(prefix: str, sums: dict[tuple[str, str], float]) -> Iterator["Metric"]:
        for kind in kinds().values():
            labels = [protocol for what, protocol in [*sums] if what == kind.name]
            values = {protocol: sums[kind.name, protocol] for protocol in labels}
            yield metric("counter", prefix, name(kind), kind.help, values, "protocol")

    about = {"metrics": make_metrics, "labels": ("protocol",)}
    return field(default_factory=lambda: defaultdict(float), metadata=about)


def metric_families(counts: Any, prefix: str, *, without: str = "") -> Iterator["Metric"]:
    """Yield the metrics that the dataclass of ``counts`` declares, with their present values.

    without: a label; metrics that have this label are left out.
    """
    for metric_field in fields(counts):
        if metric_field.metadata and without not in metric_field.metadata["labels"]:
            yield from metric_field.metadata["metrics"](prefix, getattr(counts, metric_field.name))


def metric(
    kind: Literal["counter", "gauge", "histogram"],
    prefix: str,
    name: str,
    text: str,
    value: Any,
    *labels: str,
) -> "Metric":
    """Return a metric family of Prometheus' library. value: a field's value, with these labels."""
    from prometheus_client import core

    kinds = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    family: Any = kinds[kind](prefix + name, text, labels=labels)
    # `dict` copies the values, since other threads go on counting
    samples = sorted(dict(value).items()) if labels else [((), value)]
    for key, sample in samples:
        label_values = (key,) if isinstance(key, str) else key
        if isinstance(sample, Histogram):
            bounds = [*map(str, sample.bounds), "+Inf"]
            buckets = [*zip(bounds, accumulate([*sample.counts]), strict=True)]
            family.add_metric(label_values, buckets, sample.total)
        else:
            family.add_metric(label_values, sample)
    result: Metric = family
    return result


def _declare(first: Callable[[], object], kind: Any, name: str, *description: str) -> Any:
    def make_metrics(prefix: str, value: Any) -> Iterable["Metric"]:
        text, *labels = description
        return [metric(kind, prefix, name, text, value, *labels)]

    return field(
        default_factory=first, metadata={"metrics": make_metrics, "labels": description[1:]}
    )
