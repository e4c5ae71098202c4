"""Settings of the edge daemon and the node daemon.

Each setting is declared once; its flag, TOML key, help and reload follow from the declaration
(`base.settings`).
"""

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct, field

from pilotfish.base.cpus import usable_cpus
from pilotfish.base.errors import ConfigError
from pilotfish.base.settings import setting
from pilotfish.base.tracing import TracesUrl
from pilotfish.edge_runtime.metrics_server import MetricsAddress, MetricsHosts
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.wire.messages import MAX_WINDOW

MEBIBYTE = 1024 * 1024

_Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
_Listen: TypeAlias = Annotated[
    str,
    setting(
        "address to listen on, tcp://HOST:PORT, unless systemd passes a socket; HOST *: all IPv4 "
        "addresses, [::]: all IPv4 and IPv6 addresses",
        metavar="ADDRESS",
    ),
]
_Keys: TypeAlias = Annotated[
    Path,
    setting(
        "folder with edge.key and allowed/; required unless the edge listens on loopback",
        form="keys",
        metavar="DIR",
        live=True,
    ),
]


class EdgeLimits(Struct, frozen=True, kw_only=True):
    """Limits of the edge; a request beyond a limit gets a typed error.

    The model also limits the context. The message rate limits one client in the long run; a burst
    may have as many messages as the rate allows in one second. A device has one connection for each
    lane.
    """

    sessions: Annotated[int, setting("maximum number of open sessions", ge=1)] = 16
    sessions_per_client: Annotated[
        int, setting("maximum number of open sessions per key", ge=1, live=True)
    ] = 8
    context: Annotated[int, setting("maximum number of tokens in a session", ge=2)] = 2048
    window: Annotated[
        int,
        setting(
            "maximum number of draft tokens in a round", ge=0, le=MAX_WINDOW, flag="max_window"
        ),
    ] = 64
    message_mib: Annotated[
        int, setting("maximum size of a message, in MiB", ge=1, le=2047, metavar="MIB")
    ] = 64
    messages_per_s: Annotated[
        float,
        setting(
            "maximum number of messages per second and key",
            gt=0,
            flag="rate",
            metavar="N",
            live=True,
        ),
    ] = 2000.0
    idle_s: Annotated[
        float, setting("seconds after which an idle session yields to a new one", gt=0, live=True)
    ] = 60.0
    expire_s: Annotated[
        float, setting("seconds after which an idle session ends in any case", gt=0, live=True)
    ] = 900.0
    connections: Annotated[int, setting("maximum number of open connections", ge=2, live=True)] = (
        256
    )
    connections_per_client: Annotated[
        int, setting("maximum number of open connections per key", ge=1, live=True)
    ] = 32


class ClusterPlan(Struct, frozen=True, kw_only=True):
    """Target on a cluster: a number of replicas, each with a number of stages."""

    runner: Annotated[
        Literal["ray"] | None,
        setting(
            "run the target as actors on a Ray cluster; needs the extra 'ray' (docs/scale.md)",
            flag="cluster",
        ),
    ] = None
    replicas: Annotated[
        int, setting("number of replicas of the target", ge=1, le=1024, metavar="M")
    ] = 1
    stages: Annotated[
        int,
        setting(
            "number of stages in each replica; a whole --target is first cut into stages, in the "
            "cache",
            ge=1,
            le=256,
        ),
    ] = 1
    address: Annotated[
        str,
        setting(
            'HOST:PORT of a Ray cluster to join; "auto": the cluster of this machine (default: '
            "start a private cluster on this machine)",
            flag="cluster_address",
            metavar="ADDRESS",
        ),
    ] = ""
    late_s: Annotated[
        float, setting("seconds after which actors that do not answer are restarted", gt=0)
    ] = 10.0
    give_up_s: Annotated[float, setting("seconds after which a pass over actors fails", gt=0)] = (
        120.0
    )


class EdgeConfig(EngineSettings, frozen=True, kw_only=True):
    """Settings of an edge daemon; raises `ConfigError` if they contradict each other."""

    target: Annotated[
        Path,
        setting(
            'the target: an artifact\'s folder; or "default", a hub id, a GGUF file or a '
            "checkpoint's folder, which is exported into the cache on first use",
            metavar="MODEL",
        ),
    ]
    federate: Annotated[
        Path | None,
        setting(
            "use the ensemble of the workers in this TOML file as target, with vocabulary and "
            "chat template of --target (docs/scale.md)",
            metavar="FILE",
        ),
    ] = None
    pipeline: Annotated[
        Path | None,
        setting(
            "use a target in stages (pilotfish export split): --target is the folder of stage 1, "
            "and this TOML file lists the nodes of the other stages (docs/scale.md)",
            metavar="FILE",
        ),
    ] = None
    cluster: ClusterPlan = field(default_factory=ClusterPlan)
    draft: Annotated[
        Path | None,
        setting(
            "run this drafter beside the target, for devices that use protocol ahead "
            "(docs/operations.md); it must have the target's vocabulary; named like --target "
            "(default: no drafter)",
            metavar="MODEL",
        ),
    ] = None
    draft_threads: Annotated[
        int,
        setting(
            "CPU threads of the drafter (--draft); the target does not use these cores",
            ge=1,
            metavar="N",
        ),
    ] = 1
    listen: _Listen = "tcp://127.0.0.1:7077"
    keys: _Keys | None = None
    metrics: MetricsAddress | None = None
    metrics_hosts: MetricsHosts = ()
    metrics_devices: Annotated[
        bool, setting("label metrics with device names, taken from the files of the allow-list")
    ] = False
    traces: TracesUrl | None = None
    drain_s: Annotated[
        float,
        setting(
            "seconds after SIGTERM in which the edge still answers the windows that it has "
            "received",
            ge=0,
            live=True,
        ),
    ] = 5.0
    heads: Annotated[
        tuple[str, ...] | None,
        setting(
            'path of a decision head for wisv-full and wisv-selective; "default": the shipped '
            'head, for target "default" and drafter "default-28"; may be repeated; "none": no head '
            "(default: none)",
            flag="head",
            metavar="NAME",
            repeat=True,
        ),
    ] = None
    threshold: Annotated[
        _Share | None,
        setting(
            "reject a mismatch if the decision head gives it more than this probability of harm, "
            "unless the request has its own value (default: the value in each head's file)",
            metavar="ρ",
        ),
    ] = None
    relaxation: Annotated[
        Path | None,
        setting(
            "file of judge calibrate with the relaxation for protocol adaptive, unless the "
            "request has its own values (default: a built-in relaxation)",
            metavar="FILE",
        ),
    ] = None
    limits: Annotated[EdgeLimits, setting("requests beyond these are refused", title="limits")] = (
        field(default_factory=EdgeLimits)
    )

    def __post_init__(self) -> None:
        if len(self._kinds) > 1:
            raise ConfigError(
                "An edge has one kind of target: give only one of --federate, --pipeline and "
                "--cluster."
            )
        if self.metrics is None and (self.metrics_hosts or self.metrics_devices):
            raise ConfigError(
                "--metrics-host and --metrics-devices can only be used together with --metrics."
            )
        if self.draft is None and self.draft_threads != 1:
            raise ConfigError("--draft-threads can only be used together with --draft.")
        plan = self.cluster
        if plan.runner is None and plan != ClusterPlan():
            raise ConfigError(
                "--replicas, --stages, --cluster-address, --late and --give-up can only be used "
                "together with --cluster ray; the files of --federate and --pipeline set late_s "
                "and give_up_s themselves."
            )
        if plan.late_s > plan.give_up_s:
            raise ConfigError(
                f"--late is {plan.late_s:g} s, more than --give-up, {plan.give_up_s:g} s."
            )

    @property
    def _kinds(self) -> list[str]:
        options = {
            "federated": self.federate,
            "pipeline": self.pipeline,
            "cluster": self.cluster.runner,
        }
        return [kind for kind, value in options.items() if value]

    @property
    def kind(self) -> str:
        """Kind of the target: "federated", "pipeline", "cluster" or "local"."""
        return (*self._kinds, "local")[0]

    @property
    def target_threads(self) -> int | None:
        """Number of CPU threads of a target in this process; None: all usable CPUs."""
        if self.threads is not None or self.draft is None:
            return self.threads
        return max(1, usable_cpus() - self.draft_threads)

    @property
    def nodes(self) -> Path | None:
        """File that lists the target's nodes; None if the configuration names no such file."""
        return self.federate or self.pipeline

    @property
    def head_names(self) -> tuple[str, ...]:
        """Paths of the decision heads to load."""
        return () if self.heads in (None, ("none",)) else self.heads or ()


class NodeConfig(EngineSettings, frozen=True, kw_only=True):
    """Settings of a node; its sessions and context must be at least as large as its edge's."""

    target: Annotated[
        Path,
        setting(
            "an artifact, or a stage of an artifact (pilotfish export split); or a model that is "
            "exported into the cache on first use, as for `edge serve`",
            metavar="MODEL",
        ),
    ]
    listen: _Listen = "tcp://127.0.0.1:7078"
    keys: _Keys | None = None
    sessions: Annotated[int, setting("number of slots; at least the edge's --sessions", ge=1)] = 16
    context: Annotated[int, setting("maximum number of tokens in a slot", ge=2)] = 2048
    message_mib: Annotated[
        int, setting("maximum size of a step, in MiB", ge=1, le=2047, metavar="MIB")
    ] = 256
