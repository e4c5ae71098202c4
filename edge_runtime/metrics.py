"""The edge's figures for Prometheus, over a small HTTP server of its own.

In:  the tally that the serving loop keeps, its connections, its gate. Out: the text format, made
when it is asked for, in that server's thread. Nothing here names a key: devices go by
their file's name on the allow-list.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from pilotfish import wire
from pilotfish.edge_runtime.exposition import Exposition
from pilotfish.edge_runtime.service import Service
from pilotfish.edge_runtime.tally import Histogram, Tally
from pilotfish.edge_runtime.targets.target import Target
from pilotfish.engines.artifact import Manifest
from pilotfish.engines.inspection import Inspection
from pilotfish.wire.errors import ListenError, UnsupportedError
from pilotfish.wire.protocols import counters
from pilotfish.wire.transport import Listener

if TYPE_CHECKING:
    from prometheus_client import Metric

PREFIX: Final = "pilotfish_edge_"


class MetricsSources(NamedTuple):
    """What the figures are of."""

    manifest: Manifest
    tally: Tally
    listener: Listener
    service: Service
    target: Target
    inspection: Inspection


class MetricsServer:
    """Answers on (host, port) until it is closed; port 0 takes a free one, see ``address``.

    Shows nothing but the build until `show` says of what. Raises `UnsupportedError` without the
    library, `ListenError` if the address cannot be had.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError:
            raise UnsupportedError(
                "--metrics needs the extra `serve`: pip install 'pilotfish[serve]'."
            ) from None
        registry = CollectorRegistry()
        self._sight: MetricsSources | None = None
        registry.register(self)
        try:
            self._server = Exposition(make_wsgi_app(registry), host, port)
        except (OSError, OverflowError) as error:
            raise ListenError(f"Metrics cannot be served on {host}:{port}: {error}.") from error
        self.address = f"{host}:{self._server.port}"

    def show(self, sight: MetricsSources) -> None:
        """From now on the figures are of this; ``sight`` may be replaced at any time."""
        self._sight = sight

    def describe(self) -> list["Metric"]:
        """No names in advance: the registry would ask for figures to learn them."""
        return []

    def collect(self) -> Iterator["Metric"]:
        """All families of metrics, as they stand now."""
        sight = self._sight
        if sight is not None:
            yield from _families(sight)

    def close(self) -> None:
        """Answer no more."""
        self._server.close()


def _families(sight: MetricsSources) -> Iterable["Metric"]:
    from prometheus_client.core import GaugeMetricFamily

    manifest, tally, listener, service, target, inspection = sight
    connections, gate = listener.connections, listener.gate
    sessions = service.sessions_by_device()
    build = GaugeMetricFamily(
        f"{PREFIX}build_info",
        "Always 1; what runs here.",
        labels=["software", "model", "digest"],
    )
    build.add_metric([wire.SOFTWARE, manifest.model, target.digest], 1)
    yield build
    verified = "1 once the model's files were found to be those that were exported."
    yield _gauge("weights_verified", verified, inspection.passed)
    yield _gauge("weights_damaged", "1 once one was found to be another.", bool(inspection.damage))
    yield _gauge("sessions", "Open sessions.", sum(sessions.values()))
    yield _gauge("devices", "Devices (keys) that are connected.", connections.devices)
    yield _gauge("connections", "Connections, strangers' included.", len(connections))
    if gate is not None:
        by_device = GaugeMetricFamily(
            f"{PREFIX}device_sessions", "Open sessions of each device.", labels=["device"]
        )
        for device, count in sorted(sessions.items()):
            by_device.add_metric([device], count)
        yield by_device
        work = "Windows, prompts and streamed tokens done for each device."
        yield _counters("device_jobs", work, "device", tally.work)
    yield _histogram("batch_sessions", "Sessions that share a target pass.", tally.batch)
    yield _histogram("pass_tokens", "Tokens of a target pass.", tally.pass_tokens)
    yield _histogram("queue_seconds", "Time that a window waits for its pass.", tally.queue_s)
    yield _histogram("verify_seconds", "Time of a window's pass and rule.", tally.verify_s)
    yield _counter("failed_passes", "Target passes that ended in an error.", tally.failed_passes)
    yield _counter("received_bytes", "Bytes of messages from devices.", tally.bytes_in)
    yield _counter("sent_bytes", "Bytes of messages to devices.", tally.bytes_out)
    yield _counter("pings", "Pings answered.", tally.pings)
    yield _counters("windows", "Windows decided on.", "protocol", tally.windows)
    yield _counters("drafted_tokens", "Tokens of these windows.", "protocol", tally.drafted)
    yield _counters("accepted_tokens", "Of these, accepted.", "protocol", tally.accepted)
    notes = dict(tally.notes)  # a copy: the loop goes on counting
    for name, counter in counters().items():
        noted = {protocol: value for (one, protocol), value in notes.items() if one == name}
        yield _counters(counter.metric, counter.help, "protocol", noted)
    yield _counter("streamed_tokens", "Tokens of protocol stream.", tally.streamed)
    yield _counters("refusals", "Requests refused.", "code", tally.refusals)
    ended = {
        "expired": tally.expired, "displaced": tally.displaced, "revoked": tally.revoked
    }  # fmt: skip
    yield _counters("sessions_ended", "Sessions that the edge ended by itself.", "reason", ended)
    yield _counter("dropped_replies", "Replies that their device did not take.", tally.drops)
    refused = {"broken": connections.broken, "key": gate.refused if gate else 0}
    yield _counters("handshakes_refused", "Strangers turned away.", "reason", refused)
    yield _counters("connections_cut", "Connections ended by the edge.", "reason", connections.cuts)
    yield _counters("reloads", "Configuration and keys read again.", "result", tally.reloads)
    sound = "Whether all of configuration and keys could be taken over when they were read last."
    yield _gauge("config_last_reload_successful", sound, tally.sound)
    when = "When they last could, in seconds since 1970."
    yield _gauge("config_last_reload_success_timestamp_seconds", when, tally.sound_s)
    yield _gauge("broken_key_files", "Files on the allow-list without a key.", tally.broken_keys)
    if nodes := target.nodes:
        yield from _of_nodes(nodes, tally)


def _of_nodes(nodes: Mapping[str, bool], tally: Tally) -> Iterable["Metric"]:
    """Of a target's nodes by name, and whether each takes part."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    up = GaugeMetricFamily(
        f"{PREFIX}node_up", "Whether a node of the target takes part.", labels=["node"]
    )
    for node, takes_part in nodes.items():
        up.add_metric([node], takes_part)
    yield up
    events = CounterMetricFamily(
        f"{PREFIX}node_events", "What befell a node of the target.", labels=["node", "event"]
    )
    for (node, event), count in sorted(dict(tally.nodes).items()):
        events.add_metric([node, event], count)
    yield events
    moved = CounterMetricFamily(
        f"{PREFIX}node_bytes", "Bytes to and from it.", labels=["node", "direction"]
    )
    for node in sorted(nodes.keys() & (tally.node_bytes_out.keys() | tally.node_bytes_in.keys())):
        moved.add_metric([node, "to"], tally.node_bytes_out[node])
        moved.add_metric([node, "from"], tally.node_bytes_in[node])
    yield moved
    computed = dict(tally.node_compute_s)
    yield _counters("node_compute_seconds", "Time that it says it computed.", "node", computed)


def _gauge(name: str, what: str, value: float) -> "Metric":
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(PREFIX + name, what, value)


def _counter(name: str, what: str, value: float) -> "Metric":
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(PREFIX + name, what, value)


def _counters(name: str, what: str, label: str, values: Mapping[str, float]) -> "Metric":
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(PREFIX + name, what, labels=[label])
    for key, value in sorted(dict(values).items()):  # a copy: the loop goes on counting
        family.add_metric([key], value)
    return family


def _histogram(name: str, what: str, histogram: Histogram) -> "Metric":
    from prometheus_client.core import HistogramMetricFamily

    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    buckets = [*zip(bounds, accumulate(list(histogram.counts)), strict=True)]
    return HistogramMetricFamily(PREFIX + name, what, buckets=buckets, sum_value=histogram.total)
