"""What the edge counts of its work, as plain numbers: to count costs a round next to nothing.

The serving thread (or the receiver, on its turn) writes; whoever shows the figures reads them
from another thread, and may see one a round older than the next.
"""

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pilotfish.wire.protocols import Exchange

_WIDTHS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # sessions in one pass
_TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SECONDS: Final = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip


class Histogram:
    """How many values were at most each of some bounds (ascending), and beyond the last."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass
class Tally:
    """Everything that is counted since the start; by protocol, by code or by device where named."""

    bytes_in: int = 0
    bytes_out: int = 0
    pings: int = 0
    windows: Counter[str] = field(default_factory=Counter)  # by protocol, decided on
    drafted: Counter[str] = field(default_factory=Counter)  # tokens of these
    accepted: Counter[str] = field(default_factory=Counter)
    # what the protocols' counters noted, by counter and protocol
    notes: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    streamed: int = 0  # tokens of `stream`
    refusals: Counter[str] = field(default_factory=Counter)  # by the error's code
    expired: int = 0  # sessions that idled for too long
    displaced: int = 0  # sessions that yielded to a new one
    revoked: int = 0  # sessions of keys that were taken off the list
    drops: int = 0  # replies that their device did not take
    failed_passes: int = 0
    reloads: Counter[str] = field(default_factory=Counter)  # "done"; "refused": not all of it
    sound: bool = True  # all that was read last, at the start or since, could be taken over
    sound_s: float = field(default_factory=time.time)  # Unix time when that was so last
    broken_keys: int = 0  # files on the allow-list that hold no key
    # of a target's nodes: what happened to each, and the bytes to and from it
    nodes: Counter[tuple[str, str]] = field(default_factory=Counter)
    node_bytes_out: Counter[str] = field(default_factory=Counter)
    node_bytes_in: Counter[str] = field(default_factory=Counter)
    node_compute_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    work: Counter[str] = field(default_factory=Counter)  # windows, prompts, tokens, by device
    batch: Histogram = field(default_factory=lambda: Histogram(_WIDTHS))
    pass_tokens: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
    queue_s: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    verify_s: Histogram = field(default_factory=lambda: Histogram(_SECONDS))

    @property
    def passes(self) -> int:
        """Target passes made."""
        return sum(self.batch.counts)

    def verdict(
        self,
        exchange: Exchange[Any],
        drafted: int,
        accepted: int,
        notes: Sequence[float],
        queue_s: float,
        verify_s: float,
    ) -> None:
        """A window has been decided on."""
        protocol = exchange.name
        self.windows[protocol] += 1
        self.drafted[protocol] += drafted
        self.accepted[protocol] += accepted
        for counter, value in zip(exchange.counters, notes, strict=True):
            self.notes[counter.name, protocol] += value
        self.queue_s.add(queue_s)
        self.verify_s.add(verify_s)
