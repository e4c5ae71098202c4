"""The facts of a whole run: its settings, starts, models, edge and schedule."""

from dataclasses import dataclass
from typing import Any

from pilotfish.lab.field.matrix_settings import MatrixSettings
from pilotfish.lab.field.run_clock import Moment


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run: the first start, or a resumption.

    Host: the host's facts then. clock_s, boot_id, boot_s: the same moment by the run's clock, and
    by the seconds since a boot (`run_clock.Moment`). off_s: of a watch, the seconds before this
    start in which nothing tells that it ran.
    """

    unix_s: float
    host: dict[str, Any]  # result of `host.facts`
    clock_s: float = 0.0
    boot_id: str = ""
    boot_s: float = 0.0
    off_s: float = 0.0

    @property
    def moment(self) -> Moment:
        """The moment of the start by all clocks."""
        return Moment(
            unix_s=self.unix_s, clock_s=self.clock_s, boot_id=self.boot_id, boot_s=self.boot_s
        )


@dataclass(frozen=True, kw_only=True)
class Watch:
    """The schedule of a `field watch`: seconds between two rounds, and of the whole watch.

    for_s: None if the watch has no end. keep_s, most_bytes: bounds of the file; older rows are
    deleted.
    """

    every_s: float
    for_s: float | None = None
    keep_s: float | None = None
    most_bytes: int | None = None


@dataclass(frozen=True)
class Model:
    """The description of a model, from its manifest, or from the edge that serves it.

    digest: first 16 hex digits of the hash of the artifact's files.
    """

    name: str
    precision: str | None = None
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a whole run.

    energy: rails of the power sensor; None without a sensor. device: the device's name; "" in old
    files. watch: the schedule of a `field watch`; None for a run of `field measure`. alive_unix_s,
    alive_clock_s: when a watch last wrote that it runs, by both clocks; it writes so during an
    outage, which has no rows, and when it stops.
    """

    software: str  # name and version, for example "pilotfish 0.2.0"
    settings: MatrixSettings
    starts: tuple[Start, ...]
    drafter: Model
    target: Model | None  # None if only `local` was measured
    edge: str | None  # address of the edge, tcp://host:port; None if the run had no edge
    edge_software: str | None
    draft_path: str
    keys_path: str | None
    note: str
    energy: str | None
    device: str = ""
    watch: Watch | None = None
    alive_unix_s: float | None = None
    alive_clock_s: float | None = None

    @property
    def host(self) -> dict[str, Any]:
        """The host's facts at the first start."""
        return self.starts[0].host
