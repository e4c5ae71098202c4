"""What an edge daemon is told: its model, its address, its keys and its limits."""

from dataclasses import dataclass, field, fields
from pathlib import Path

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class EdgeLimits:
    """What the edge gives at most; every one of them ends in a typed error, not in a fall.

    context is further bounded by the model's own. window is in tokens, message_mib in MiB.
    """

    sessions: int = 16
    sessions_per_client: int = 8
    context: int = 2048
    window: int = 64
    message_mib: int = 64
    messages_per_s: float = 2000.0  # per client, sustained; bursts may be as long as one second
    idle_s: float = 60.0  # a session that idles for so long yields its place to a new one
    expire_s: float = 900.0  # and after so long it ends, whether its place is wanted or not
    connections: int = 256  # in all; a device has one for each conversation that it can hold
    connections_per_client: int = 32


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """A target on a cluster: replicas, each of so many stages.

    address: of the cluster; "": one of its own, on this machine. late_s: after which actors that do
    not answer are started again; give_up_s: after which a pass fails in any case.
    """

    replicas: int = 1
    stages: int = 1
    address: str = ""
    late_s: float = 10.0
    give_up_s: float = 120.0


@dataclass(frozen=True, kw_only=True)
class EdgeConfig:
    """A daemon's settings. Without ``keys`` it may listen on loopback only.

    drain_s: how long a daemon that is told to stop still answers what it has received.
    metrics: where Prometheus may ask for figures, as (host, port). heads: decision heads, by name
    or path; None: those that ship and were made for the target. threshold: of requests that name
    none; None: each head's own. relaxation: a file of `judge calibrate`; None: built in. kind: of
    target (`edge_runtime.targets`); nodes: the file that lists what it consists of, where it is not
    all in this process; cluster: its actors.
    """

    target: Path
    listen: str = "tcp://127.0.0.1:7077"
    keys: Path | None = None
    provider: str = "auto"
    threads: int | None = None
    drain_s: float = 5.0
    metrics: tuple[str, int] | None = None
    heads: tuple[str, ...] | None = None
    threshold: float | None = None
    relaxation: Path | None = None
    kind: str = "local"
    nodes: Path | None = None
    cluster: ClusterPlan = field(default_factory=ClusterPlan)
    limits: EdgeLimits = field(default_factory=EdgeLimits)


# What a running daemon can change; everything else needs a restart.
_CHANGEABLE = {
    "keys", "drain_s", "sessions_per_client", "messages_per_s", "idle_s", "expire_s", "connections",
    "connections_per_client",
}  # fmt: skip


def fixed_changes(old: EdgeConfig, new: EdgeConfig) -> list[str]:
    """The settings that differ and that only a restart can change."""
    found = []
    for before, after in ((old, new), (old.limits, new.limits)):
        found += [
            item.name
            for item in fields(before)
            if item.name not in {*_CHANGEABLE, "limits"}
            and getattr(before, item.name) != getattr(after, item.name)
        ]
    if (old.keys is None) != (new.keys is None):
        found.append("keys")
    return found
