"""The edge's figures for Prometheus, over a small HTTP server of its own.

In:  the tally that the serving loop keeps, its connections, its gate. Out: the text format, made
when it is asked for, in that server's thread. Nothing here names a key: devices go by
their file's name on the allow-list.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from pilotfish import wire
from pilotfish.edge_runtime.exposition import Exposition
from pilotfish.edge_runtime.service import Service
from pilotfish.edge_runtime.tally import Tally
from pilotfish.edge_runtime.targets.target import Target
from pilotfish.engines.inspection import Inspection
from pilotfish.engines.manifest import Manifest
from pilotfish.wire.errors import ListenError, UnsupportedError
from pilotfish.wire.metrics import families, metric
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

    def collect(self) -> Iterable["Metric"]:
        """All families of metrics, as they stand now."""
        return () if self._sight is None else _families(self._sight)

    def close(self) -> None:
        """Answer no more."""
        self._server.close()


def _families(sight: MetricsSources) -> Iterator["Metric"]:
    manifest, tally, listener, service, target, inspection = sight
    connections, gate = listener.connections, listener.gate
    sessions = service.sessions_by_device()
    yield from families(tally, PREFIX)
    build = {(wire.SOFTWARE, manifest.model, target.digest): 1}
    yield _gauge("build_info", "Always 1; what runs here.", build, "software", "model", "digest")
    verified = "1 once the model's files were found to be those that were exported."
    yield _gauge("weights_verified", verified, inspection.passed)
    yield _gauge("weights_damaged", "1 once one was found to be another.", bool(inspection.damage))
    yield _gauge("sessions", "Open sessions.", sum(sessions.values()))
    if gate is not None:
        yield _gauge("device_sessions", "Open sessions of each device.", sessions, "device")
    yield _gauge("devices", "Devices (keys) that are connected.", connections.devices)
    yield _gauge("connections", "Connections, strangers' included.", len(connections))
    crowded = "1 while connections are turned away, since there are too many."
    yield _gauge("connections_crowded", crowded, connections.crowded)
    yield _gauge("node_up", "Whether a node of the target takes part.", target.nodes, "node")
    refused = {"broken": connections.broken, "key": gate.refused if gate else 0}
    yield _counter("handshakes_refused", "Strangers turned away.", refused, "reason")
    yield _counter("connections_cut", "Connections ended by the edge.", connections.cuts, "reason")


_gauge, _counter = partial(metric, "gauge", PREFIX), partial(metric, "counter", PREFIX)
