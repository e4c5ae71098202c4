"""What an edge daemon is told: its model, its address, its keys and its limits."""

from dataclasses import dataclass, field
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


@dataclass(frozen=True, kw_only=True)
class EdgeConfig:
    """A daemon's settings. Without ``keys`` it may listen on loopback only."""

    target: Path
    listen: str = "tcp://127.0.0.1:7077"
    keys: Path | None = None
    provider: str = "auto"
    threads: int | None = None
    limits: EdgeLimits = field(default_factory=EdgeLimits)
