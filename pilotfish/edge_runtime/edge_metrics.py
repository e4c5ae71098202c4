"""Counters, gauges and histograms of the edge.

The serving thread (or the receiver thread, during a pass) writes the values. The metrics server
reads them in another thread, so two values of one response may be a round apart.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.metrics import Histogram, counter, gauge, histogram, notes
from pilotfish.edge_runtime.hint_sources import AttachedHints
from pilotfish.wire.protocols import OMITTED_MASS, STREAM, SpeculationProtocol, counters

_WIDTHS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # histogram bounds: sessions in one pass
_TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)

# reasons: the session was idle for too long; a new session displaced it; its key was removed
_ENDINGS: Final = ("expired", "displaced", "revoked")
# the codes that alerts wait for: Prometheus does not see the first count of a new series
_REFUSALS: Final = ("busy", "internal", "too-many-sessions")


@dataclass
class EdgeMetrics:
    """All metrics since the start of the edge (declarations: `base.metrics`)."""

    batch_sessions: Histogram = histogram(
        "batch_sessions", "Number of sessions that share a target pass.", _WIDTHS
    )
    pass_tokens: Histogram = histogram("pass_tokens", "Number of tokens in a target pass.", _TOKENS)
    queue_s: Histogram = histogram(
        "queue_seconds",
        "Time that a window, or a streamed token, waits for its target pass.",
        _SECONDS,
    )
    verify_s: Histogram = histogram(
        "verify_seconds",
        "Time of a window's or streamed token's target pass and verification.",
        _SECONDS,
    )
    failed_passes: int = counter("failed_passes", "Target passes that ended in an error.")
    bytes_in: int = counter("received_bytes", "Bytes of messages from devices.")
    bytes_out: int = counter("sent_bytes", "Bytes of messages to devices.")
    pings: int = counter("pings", "Pings answered.")
    windows: Counter[str] = counter("windows", "Verified windows.", "protocol")
    drafted: Counter[str] = counter(
        "drafted_tokens", "Draft tokens in verified windows.", "protocol"
    )
    accepted: Counter[str] = counter(
        "accepted_tokens", "Accepted draft tokens in verified windows.", "protocol"
    )
    notes: dict[tuple[str, str], float] = notes(counters, lambda each: each.metric)
    streamed: int = counter("streamed_tokens", "Tokens sent under protocols stream and ahead.")
    # outcomes: "kept"; "stale" (the hint follows other tokens than the edge's); "unknown" (its
    # generation does not run); "malformed"; "refused" (rate exceeded, or key not allowed)
    hints: Counter[str] = counter("hints", "Received hints, by outcome.", "outcome")
    hint_drafts: Counter[str] = counter(
        "hint_drafted_tokens", "Draft tokens from hints that target passes checked.", "source"
    )
    hint_accepted: Counter[str] = counter(
        "hint_accepted_tokens", "Accepted draft tokens from hints.", "source"
    )
    drafter_passes: int = counter("drafter_passes", "Passes of the edge's drafter.")
    drafter_tokens: int = counter("drafter_tokens", "Tokens drafted by the edge's drafter.")
    drafter_s: float = counter("drafter_seconds", "Computing time of the edge's drafter.")
    refusals: Counter[str] = counter("refusals", "Refused requests.", "code", known=_REFUSALS)
    sessions_ended: Counter[str] = counter(
        "sessions_ended",
        "Sessions that the edge ended without a request.",
        "reason",
        known=_ENDINGS,
    )
    dropped_replies: int = counter(
        "dropped_replies", "Replies that could not be delivered to the device."
    )
    # results: "done"; "refused" (a part of the configuration or keys could not be applied)
    reloads: Counter[str] = counter("reloads", "Reloads of configuration and keys.", "result")
    config_valid: bool = gauge(
        "config_last_reload_successful",
        "Whether the last reload of configuration and keys was fully applied.",
        first=lambda: True,
    )
    config_valid_s: float = gauge(
        "config_last_reload_success_timestamp_seconds",
        "Time at which configuration and keys were last fully applied, in seconds since 1970.",
        first=time.time,
    )
    broken_keys: int = gauge("broken_key_files", "Files on the allow-list that hold no valid key.")
    device_jobs: Counter[str] = counter(
        "device_jobs",
        "Jobs completed for each device: windows, prompts and streamed tokens.",
        "device",
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
    node_rows: Counter[str] = counter(
        "node_rows", "Distributions that a worker of a federation has sent for passes.", "node"
    )
    node_mass: dict[str, float] = counter(
        "node_retained_mass",
        "Retained mass (specfed's rho) of a worker's distributions, summed over node_rows.",
        "node",
    )
    ensemble_rows: int = counter("ensemble_rows", "Distributions averaged by a federation.")
    ensemble_omitted: float = counter(
        "ensemble_omitted_mass",
        "Upper bound of the change of acceptance by truncation (specfed (19)), summed over "
        "ensemble_rows.",
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

    def record_average(
        self, retained: Mapping[str, NDArray[np.float64]], omitted: NDArray[np.float64]
    ) -> None:
        """Record a pass of a federation. retained: ρ of each node's rows. omitted: bound (19)."""
        for node, masses in retained.items():
            self.node_rows[node] += len(masses)
            self.node_mass[node] += float(masses.sum())
        self.ensemble_rows += len(omitted)
        self.ensemble_omitted += float(omitted.sum())

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
        # only an ensemble reports the last counter
        for note, value in zip(protocol.round_counters, notes, strict=False):
            self.notes[note.name, name] += value
        self.record_times(queue_s, verify_s)

    def record_omitted(
        self, protocol: SpeculationProtocol[Any] | None, omitted_mass: float
    ) -> None:
        """Record what an ensemble left out of a stream's tokens. protocol: None for `stream`."""
        name = STREAM if protocol is None else protocol.name
        self.notes[OMITTED_MASS.name, name] += omitted_mass

    def record_times(self, queue_s: float, verify_s: float) -> None:
        """Record the queue time and the verification time of a window or of a stream's pass."""
        self.queue_s.add(queue_s)
        self.verify_s.add(verify_s)
