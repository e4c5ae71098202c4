"""Serve the edge's metrics to Prometheus, over a small HTTP server.

In:  the serving loop's metrics, connections and gate. Out: the metrics in Prometheus's text format,
     generated for each request in a thread of the HTTP server. No metric contains a key. Devices
     are named (by their files on the allow-list) only if the operator has configured it. The
     ``Host`` of a request must be this machine (`is_own_host`), so that a foreign page in a browser
     cannot read the metrics.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pilotfish.base.errors import ListenError, UnsupportedError
from pilotfish.base.extras import install_command
from pilotfish.base.metrics import metric, metric_families
from pilotfish.base.version import SOFTWARE
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.exposition import Application, Exposition
from pilotfish.edge_runtime.message_handler import MessageHandler
from pilotfish.edge_runtime.targets.target import Target
from pilotfish.engines.inspection import Inspection
from pilotfish.engines.manifest import Manifest
from pilotfish.wire.transport import Listener, is_own_host

if TYPE_CHECKING:
    from prometheus_client import Metric

PREFIX: Final = "pilotfish_edge_"


class MetricsSources(NamedTuple):
    """Objects from which the metrics are read."""

    manifest: Manifest
    metrics: EdgeMetrics
    listener: Listener
    handler: MessageHandler
    target: Target
    inspection: Inspection


class MetricsServer:
    """Metrics server on (host, port) until it is closed; with port 0 the system chooses a port.

    hosts: further names of this machine that requests may use. devices: whether metrics have the
    devices' names. address: the address with the real port. Answers are empty until `set_sources`
    is called. Raises `UnsupportedError` without the Prometheus library, `ListenError` if the
    address cannot be used.
    """

    def __init__(
        self, host: str, port: int, hosts: Sequence[str] = (), devices: bool = False
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError:
            raise UnsupportedError(
                f"--metrics needs the extra `serve`: {install_command('serve')}."
            ) from None
        registry = CollectorRegistry()
        self._sources: MetricsSources | None = None
        self._devices = devices
        registry.register(self)
        try:
            application = _for_own_hosts(make_wsgi_app(registry), (host, *hosts))
            self._server = Exposition(application, host, port)
        except (OSError, OverflowError) as error:
            raise ListenError(f"Metrics cannot be served on {host}:{port}: {error}.") from error
        self.address = f"{host}:{self._server.port}"

    def set_sources(self, sources: MetricsSources) -> None:
        """Serve the metrics of these objects from now on."""
        self._sources = sources

    def describe(self) -> list["Metric"]:
        """Return no metric names, so that the registration does not have to collect metrics."""
        return []

    def collect(self) -> Iterable["Metric"]:
        """Return all metric families with their present values."""
        return () if self._sources is None else _families(self._sources, devices=self._devices)

    def close(self) -> None:
        """Stop serving."""
        self._server.close()


def _for_own_hosts(answered: Application, hosts: Sequence[str]) -> Application:
    """Wrap an application: it answers requests for this machine; others are refused.

    hosts: further names of this machine.
    """
    names = frozenset(host.lower() for host in hosts)

    def application(environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        host = environment.get("HTTP_HOST", "")
        if is_own_host(host, names):
            return answered(environment, start)
        start("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        message = (
            f"{host[:100]!r} is not a known name of this machine: use its IP address, or allow "
            "the name by --metrics-host"
        )
        return [f"{message}.\n".encode()]

    return application


def _families(sources: MetricsSources, *, devices: bool) -> Iterator["Metric"]:
    manifest, metrics, listener, handler, target, inspection = sources
    connections, gate = listener.connections, listener.gate
    sessions = handler.sessions_by_device()
    yield from metric_families(metrics, PREFIX, without="" if devices else "device")
    yield _build(manifest, target)
    verified = "1 after the model's files were verified against the export's digests."
    yield _gauge("weights_verified", verified, inspection.passed)
    yield _gauge(
        "weights_damaged",
        "1 after a file of the model was found damaged (its digest differs).",
        bool(inspection.damage),
    )
    yield _gauge("sessions", "Open sessions.", sum(sessions.values()))
    if gate is not None and devices:
        yield _gauge("device_sessions", "Open sessions of each device.", sessions, "device")
        shut_out = "Refused handshakes of devices that were removed from the allow-list."
        yield _counter("device_handshakes_refused", shut_out, gate.refused.by_name, "device")
    if gate is not None:
        former = "Number of devices that last connected with the edge's former key."
        yield _gauge("former_key_devices", former, len(gate.clients_of_former_key))
    yield _gauge("devices", "Number of connected devices (keys).", connections.devices)
    yield _gauge(
        "connections",
        "Number of connections, including those that have sent no message yet.",
        len(connections),
    )
    crowded = "1 while connections are refused because there are too many."
    yield _gauge("connections_crowded", crowded, connections.crowded)
    yield _gauge(
        "node_up", "Whether a node of the target takes part in passes.", target.nodes, "node"
    )
    refused = {
        "broken": connections.broken,
        "key": gate.refused.total if gate else 0,
        "edge-key": connections.undecipherable,
    }
    yield _counter("handshakes_refused", "Failed or refused handshakes.", refused, "reason")
    yield _counter("connections_cut", "Connections ended by the edge.", connections.cuts, "reason")


def _build(manifest: Manifest, target: Target) -> "Metric":
    run = target.execution  # None: nodes compute, each with its own settings
    how = ("nodes", "", "") if run is None else (run.provider, run.precision, str(run.threads))
    build = {(SOFTWARE, manifest.model, target.digest, *how): 1}
    labels = ("software", "model", "digest", "provider", "precision", "threads")
    return _gauge(
        "build_info",
        "Always 1; the labels name the software, the model and how it is executed.",
        build,
        *labels,
    )


_gauge, _counter = partial(metric, "gauge", PREFIX), partial(metric, "counter", PREFIX)
