"""What an edge daemon and a node's are told: model, address, keys and limits.

Each setting stands here once: flags, TOML keys, help and reloads follow (`wire.settings`).
"""

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct, field

from pilotfish.engines.settings import EngineSettings
from pilotfish.wire.errors import ConfigError
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.settings import setting

MEBIBYTE = 1024 * 1024

_Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
_Listen: TypeAlias = Annotated[
    str, setting("tcp://HOST:PORT; a socket that systemd gives goes before", metavar="ADDRESS")
]
_Keys: TypeAlias = Annotated[
    Path,
    setting(
        "the folder with edge.key and allowed/; needed beyond loopback",
        form="keys",
        metavar="DIR",
        live=True,
    ),
]


class EdgeLimits(Struct, frozen=True, kw_only=True):
    """What the edge gives at most; every one of them ends in a typed error, not in a fall.

    context is further bounded by the model's own. The rate is a client's, sustained; its bursts may
    be as long as one second. A device has one connection for each conversation that it can hold.
    """

    sessions: Annotated[int, setting("conversations held at once", ge=1)] = 16
    sessions_per_client: Annotated[int, setting("of one key", ge=1, live=True)] = 8
    context: Annotated[int, setting("tokens of one conversation", ge=2)] = 2048
    window: Annotated[
        int, setting("draft tokens of one round", ge=0, le=MAX_WINDOW, flag="max_window")
    ] = 64
    message_mib: Annotated[int, setting("size of one message", ge=1, le=2047, metavar="MIB")] = 64
    messages_per_s: Annotated[
        float, setting("messages a second of one key", gt=0, flag="rate", metavar="N", live=True)
    ] = 2000.0
    idle_s: Annotated[
        float, setting("after which a session yields to a new one", gt=0, live=True)
    ] = 60.0
    expire_s: Annotated[
        float, setting("after which an idle session ends anyway", gt=0, live=True)
    ] = 900.0
    connections: Annotated[int, setting("at once", ge=2, live=True)] = 256
    connections_per_client: Annotated[int, setting("of one key", ge=1, live=True)] = 32


class ClusterPlan(Struct, frozen=True, kw_only=True):
    """A target on a cluster: replicas, each of so many stages."""

    runner: Annotated[
        Literal["ray"] | None,
        setting(
            "the target runs as actors on a Ray cluster (pip install 'pilotfish[ray]')",
            flag="cluster",
        ),
    ] = None
    replicas: Annotated[int, setting("of the target", ge=1, le=1024, metavar="M")] = 1
    stages: Annotated[
        int,
        setting(
            "of each replica; a --target that is whole is cut first, into the cache", ge=1, le=256
        ),
    ] = 1
    address: Annotated[
        str,
        setting(
            'HOST:PORT of a Ray cluster to join; "auto": the one that this machine is part of '
            "(default: one of its own, on this machine only)",
            flag="cluster_address",
            metavar="ADDRESS",
        ),
    ] = ""
    late_s: Annotated[
        float, setting("after which actors that do not answer are started again", gt=0)
    ] = 10.0
    give_up_s: Annotated[
        float, setting("after which a pass over actors fails in any case", gt=0)
    ] = 120.0


class EdgeConfig(EngineSettings, frozen=True, kw_only=True):
    """An edge daemon's settings; `ConfigError` for those that contradict each other."""

    target: Annotated[Path, setting("the target's artifact", metavar="DIR")]
    federate: Annotated[
        Path | None,
        setting(
            "the target is an ensemble of the workers in this TOML file; of --target only "
            "vocabulary and chat template are used (docs/scale.md)",
            metavar="FILE",
        ),
    ] = None
    pipeline: Annotated[
        Path | None,
        setting(
            "the target is cut into stages (pilotfish export split): --target is the folder of "
            "stage 1, this TOML file lists the nodes with the others",
            metavar="FILE",
        ),
    ] = None
    cluster: ClusterPlan = field(default_factory=ClusterPlan)
    listen: _Listen = "tcp://127.0.0.1:7077"
    keys: _Keys | None = None
    metrics: Annotated[
        tuple[str, int] | None,
        setting(
            "where Prometheus may read figures; without HOST: on loopback (default: nowhere)",
            form="host:port",
            metavar="HOST:PORT",
        ),
    ] = None
    drain_s: Annotated[
        float,
        setting(
            "seconds in which an edge that is told to stop answers what it has", ge=0, live=True
        ),
    ] = 5.0
    heads: Annotated[
        tuple[str, ...] | None,
        setting(
            "a decision head, for wisv-full and wisv-selective: a path, or the name of one that "
            'ships (default: those that ship for this target); may be repeated; "none": none at '
            "all",
            flag="head",
            metavar="NAME",
            repeat=True,
        ),
    ] = None
    threshold: Annotated[
        _Share | None,
        setting(
            "reject a mismatch that its head finds harmful with more than this probability, where "
            "a request does not say (default: as each head recommends)",
            metavar="ρ",
        ),
    ] = None
    relaxation: Annotated[
        Path | None,
        setting(
            "how far protocol adaptive deviates where a request does not say, as judge calibrate "
            "wrote it (default: built in)",
            metavar="FILE",
        ),
    ] = None
    limits: Annotated[
        EdgeLimits, setting("a request beyond them is refused by name", title="limits")
    ] = field(default_factory=EdgeLimits)

    def __post_init__(self) -> None:
        if len(self._kinds) > 1:
            raise ConfigError(
                "An edge has one kind of target: one of --federate, --pipeline and --cluster."
            )
        plan = self.cluster
        if plan.runner is None and plan != ClusterPlan():
            raise ConfigError(
                "--replicas, --stages, --cluster-address, --late and --give-up go with --cluster "
                "ray; the lists of --federate and --pipeline have late_s and give_up_s of their "
                "own."
            )
        if plan.late_s > plan.give_up_s:
            raise ConfigError(
                f"--late is {plan.late_s:g} s, more than --give-up, {plan.give_up_s:g} s."
            )

    @property
    def _kinds(self) -> list[str]:
        asked = {
            "federated": self.federate,
            "pipeline": self.pipeline,
            "cluster": self.cluster.runner,
        }
        return [kind for kind, given in asked.items() if given]

    @property
    def kind(self) -> str:
        """Of target (`edge_runtime.targets`)."""
        return (*self._kinds, "local")[0]

    @property
    def nodes(self) -> Path | None:
        """The file that lists what the target consists of, where it is not all in this process."""
        return self.federate or self.pipeline

    @property
    def judges(self) -> tuple[str, ...] | None:
        """The decision heads to load; None: those that ship and were made for the target."""
        # a federation's own artifact is there for its vocabulary: no head was made for its target
        if self.heads == ("none",) or (self.heads is None and self.kind == "federated"):
            return ()
        return self.heads


class NodeConfig(EngineSettings, frozen=True, kw_only=True):
    """A node's settings. sessions and context: as of the edge that it is to serve, at least."""

    target: Annotated[
        Path,
        setting(
            "an artifact, or one stage of one that was cut (pilotfish export split)", metavar="DIR"
        ),
    ]
    listen: _Listen = "tcp://127.0.0.1:7078"
    keys: _Keys | None = None
    sessions: Annotated[int, setting("slots: as many as the edge has, or more", ge=1)] = 16
    context: Annotated[int, setting("tokens of a slot", ge=2)] = 2048
    message_mib: Annotated[int, setting("size of one step", ge=1, le=2047, metavar="MIB")] = 256
