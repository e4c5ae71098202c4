"""Counters, gauges and histograms of the edge.

The serving thread (or the receiver thread, during a pass) writes the figures. The metrics server
reads them in another thread, so two figures of one answer may be a round apart.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pilotfish.base.metrics import Histogram, counter, gauge, histogram, notes
from pilotfish.edge_runtime.hint_sources import AttachedHints
from pilotfish.wire.protocols import SpeculationProtocol, counters

_WIDTHS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # histogram bounds: sessions in one pass
_TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)

# reasons: the session was idle for too long; a new session displaced it; its key was removed
_ENDINGS: Final = ("expired", "displaced", "revoked")


@dataclass
class EdgeMetrics:
    """All metrics since the start of the edge (declarations: `base.metrics`)."""

    batch_sessions: Histogram = histogram(
        "batch_sessions", "Sessions that share a target pass.", _WIDTHS
    )
    pass_tokens: Histogram = histogram("pass_tokens", "Tokens of a target pass.", _TOKENS)
    queue_s: Histogram = histogram(
        "queue_seconds", "Time that a window, or a stream's token, waits for its pass.", _SECONDS
    )
    verify_s: Histogram = histogram(
        "verify_seconds", "Time of such a pass and its verification.", _SECONDS
    )
    failed_passes: int = counter("failed_passes", "Target passes that ended in an error.")
    bytes_in: int = counter("received_bytes", "Bytes of messages from devices.")
    bytes_out: int = counter("sent_bytes", "Bytes of messages to devices.")
    pings: int = counter("pings", "Pings answered.")
    windows: Counter[str] = counter("windows", "Windows decided on.", "protocol")
    drafted: Counter[str] = counter("drafted_tokens", "Tokens of these windows.", "protocol")
    accepted: Counter[str] = counter("accepted_tokens", "Of these, accepted.", "protocol")
    notes: dict[tuple[str, str], float] = notes(counters, lambda each: each.metric)
    streamed: int = counter("streamed_tokens", "Tokens of protocol stream.")
    # outcomes: "kept"; "stale" (the hint follows other tokens than the edge's); "unknown" (its
    # generation does not run); "malformed"; "refused" (rate exceeded, or key not allowed)
    hints: Counter[str] = counter("hints", "Hints received, by outcome.", "outcome")
    hint_drafts: Counter[str] = counter(
        "hint_drafted_tokens", "Drafts that hints brought to a pass.", "source"
    )
    hint_accepted: Counter[str] = counter("hint_accepted_tokens", "Of these, accepted.", "source")
    drafter_passes: int = counter("drafter_passes", "Passes of the edge's drafter.")
    drafter_tokens: int = counter("drafter_tokens", "Tokens that it drafted.")
    drafter_s: float = counter("drafter_seconds", "Time that it computed.")
    refusals: Counter[str] = counter("refusals", "Requests refused.", "code")
    sessions_ended: Counter[str] = counter(
        "sessions_ended", "Sessions that the edge ended by itself.", "reason", known=_ENDINGS
    )
    dropped_replies: int = counter("dropped_replies", "Replies that their device did not take.")
    # results: "done"; "refused" (a part of the configuration or keys could not be applied)
    reloads: Counter[str] = counter("reloads", "Configuration and keys read again.", "result")
    config_valid: bool = gauge(
        "config_last_reload_successful",
        "Whether the last read of configuration and keys was fully applied.",
        first=lambda: True,
    )
    config_valid_s: float = gauge(
        "config_last_reload_success_timestamp_seconds",
        "When they were last fully applied, in seconds since 1970.",
        first=time.time,
    )
    broken_keys: int = gauge("broken_key_files", "Files on the allow-list without a key.")
    device_jobs: Counter[str] = counter(
        "device_jobs", "Windows, prompts and streamed tokens done for each device.", "device"
    )
    node_events: Counter[tuple[str, str]] = counter(
        "node_events", "Events of the target's nodes, such as losses.", "node", "event"
    )
    node_bytes: Counter[tuple[str, str]] = counter(
        "node_bytes", "Bytes to and from a node.", "node", "direction"
    )
    node_compute_s: dict[str, float] = counter(
        "node_compute_seconds", "Computing time that a node reports.", "node"
    )

    @property
    def passes(self) -> int:
        """Number of target passes so far."""
        return sum(self.batch_sessions.counts)

    def record_hints(self, attached: AttachedHints, accepted: int) -> None:
        """Count the drafts of a pass under protocol `ahead`, and the accepted drafts."""
        if attached.budget is not None:
            self.hint_drafts[attached.budget.name] += len(attached.ids)
            self.hint_accepted[attached.budget.name] += accepted

    def record_window(
        self,
        protocol: SpeculationProtocol[Any],
        drafted: int,
        accepted: int,
        notes: Sequence[float],
        queue_s: float,
        verify_s: float,
    ) -> None:
        """Record a window after its decision: tokens, notes and times."""
        name = protocol.name
        self.windows[name] += 1
        self.drafted[name] += drafted
        self.accepted[name] += accepted
        for note, value in zip(protocol.counters, notes, strict=True):
            self.notes[note.name, name] += value
        self.record_times(queue_s, verify_s)

    def record_times(self, queue_s: float, verify_s: float) -> None:
        """Record the queue time and the verification time of a window or of a stream's pass."""
        self.queue_s.add(queue_s)
        self.verify_s.add(verify_s)
