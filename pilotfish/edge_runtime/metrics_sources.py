"""The edge's metrics: the objects that have their values, and the metric families of these.

No metric contains a key. Devices are named (by their files on the allow-list) only if the operator
has configured it.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from pilotfish.base.metrics import metric, metric_families
from pilotfish.base.version import SOFTWARE
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.message_handler import MessageHandler
from pilotfish.edge_runtime.targets.target import Target
from pilotfish.engines.inspection import Inspection
from pilotfish.engines.manifest import Manifest
from pilotfish.wire.transport import Listener

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


def edge_families(sources: MetricsSources, *, devices: bool) -> Iterator["Metric"]:
    """Yield the edge's metric families. devices: whether metrics have the devices' names."""
    manifest, metrics, listener, handler, target, inspection = sources
    connections, gate = listener.connections, listener.gate
    sessions = handler.sessions_by_device()
    yield from metric_families(metrics, PREFIX, without="" if devices else "device")
    yield _build(manifest, target)
    idle = "1 if the target runs on the CPU although there is a GPU and nobody chose the CPU."
    yield _gauge("gpu_idle", idle, target.idle_gpu is not None)
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
