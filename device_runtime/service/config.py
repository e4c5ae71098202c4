"""What a device service is told when it starts, and again at each reload."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from pilotfish.device_runtime.plan import Options

LinkLoss: TypeAlias = Literal["wait", "local", "fail"]


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Where what is, and how much of it.

    listen: ``HOST:PORT``; port 0 takes a free one. api_keys: see `access.ApiKeys`. tls_cert,
    tls_key: see `tls.tls_context`; without them it is HTTP in clear text. lanes:
    conversations held at once. queue: requests that may wait for one. patience_s: how long a lost
    edge is waited for. options: what holds for a request that does not say otherwise. drain_s: how
    long running answers may take when the service is told to stop. model: the name that clients
    ask for.
    """

    draft: Path
    edge: str | None = None
    keys: Path | None = None
    listen: str = "127.0.0.1:8080"
    api_keys: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    lanes: int = 2
    queue: int = 16
    on_link_loss: LinkLoss = "wait"
    patience_s: float = 120.0
    options: Options = field(default_factory=Options)
    provider: str = "auto"
    threads: int | None = None
    context: int | None = None
    drain_s: float = 20.0
    model: str = "pilotfish"
