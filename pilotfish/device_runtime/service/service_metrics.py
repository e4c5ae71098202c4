"""`/metrics`: a device service's metrics for Prometheus.

In:  each round, answer, request, refusal and reading of the link.
Out: Prometheus' text format.

Counters of speculation have vLLM's names with our prefix, so that vLLM's dashboards fit: the mean
length of a round is 1 + accepted / drafts. A value that is not measured is absent, not zero. The
number of series is bounded, whatever clients request.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector

from pilotfish.base.metrics import (
    Histogram,
    Histograms,
    counter,
    gauge,
    histogram,
    metric,
    metric_families,
    notes,
)
from pilotfish.base.version import SOFTWARE
from pilotfish.device_runtime.energy import Rail, Watch, rails
from pilotfish.device_runtime.link.connectivity import Connectivity, LinkStatus
from pilotfish.device_runtime.record import STAGES, Generation, Round
from pilotfish.engines.inspection import Inspection
from pilotfish.engines.language_model import Execution
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import counters, names

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "pilotfish_"
_POSITIONS = 32  # positions of a window with a series each; deeper positions share one
_KINDS = 40  # limit of routes with series of their own; also of refusals' reasons
_OTHER = "other"

_STAGE_S = [step * 10.0**power for power in range(-5, 1) for step in (1, 2.5, 5)] + [10.0]
_TOKEN_S = [0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0]
_FIRST_S = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0]
_REQUEST_S = [0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0]
_RECOVERY_S = [0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0]

# (metric, help, attribute of `LinkState`, factor to the metric's unit), one for each of `READINGS`.
# That list has names and units for people; Prometheus' names, texts and base units (bytes, not
# bits) are published, so they are written out here.
_READINGS = (
    ("link_rtt_seconds", "Round-trip time of a small message.", "rtt", 1.0),
    ("link_jitter_seconds", "Mean change from one round-trip time to the next.", "jitter", 1.0),
    ("link_goodput_up_bytes_per_second", "Payload rate from the device to the edge.", "up", 1 / 8),
    (
        "link_goodput_down_bytes_per_second",
        "Payload rate from the edge to the device.",
        "down",
        1 / 8,
    ),
    (
        "link_retransmitted_ratio",
        "Share of TCP segments that were sent again.",
        "retransmitted",
        1.0,
    ),
    (
        "link_retransmitted_down_ratio",
        "Share of TCP segments that the edge sent again.",
        "retransmitted_down",
        1.0,
    ),
    ("link_signal_dbm", "Signal strength of the radio.", "signal", 1.0),
)


@dataclass
class _Counts:
    """All counts since the start, declared by `base.metrics`."""

    drafts: Counter[str] = counter("spec_decode_num_drafts", "Verified windows.", "protocol")
    drafted: Counter[str] = counter(
        "spec_decode_num_draft_tokens", "Drafted tokens; of a tree, all nodes.", "protocol"
    )
    accepted: Counter[str] = counter(
        "spec_decode_num_accepted_tokens", "Accepted draft tokens.", "protocol"
    )
    hint_drafts: Counter[str] = counter(
        "hint_drafted_tokens",
        "Draft tokens from hints that target passes checked (protocol ahead).",
        "source",
    )
    hint_accepted: Counter[str] = counter(
        "hint_accepted_tokens", "Accepted draft tokens from hints (protocol ahead).", "source"
    )
    notes: dict[tuple[str, str], float] = notes(
        counters, lambda note: f"spec_decode_{'num_' if note.counts_tokens else ''}{note.metric}"
    )
    accepted_at: Counter[str] = counter(
        "spec_decode_num_accepted_tokens_per_pos",
        f"Accepted tokens by position in the window, from 0; all from {_POSITIONS} on together.",
        "position",
    )
    stages: Histograms = histogram(
        "stage_seconds", "Seconds of each stage of a round.", _STAGE_S, "protocol", "stage"
    )
    bytes: Counter[tuple[str, str]] = counter(
        "link_bytes",
        "Bytes of messages between device and edge, without the transport's overhead.",
        "direction",
        "purpose",
    )
    tokens: Counter[str] = counter("generation_tokens", "Tokens of answers, by origin.", "origin")
    prompt_tokens: int = counter("prompt_tokens", "Tokens of answered prompts.")
    generations: Counter[tuple[str, str, str]] = counter(
        "generations",
        "Finished answers, without interrupted and failed answers.",
        "protocol",
        "policy",
        "finish_reason",
    )
    chosen: dict[str, bool] = gauge(
        "protocol_in_use", "1 for the protocol of the newest answer, 0 for others.", "protocol"
    )
    first_s: Histogram = histogram(
        "time_to_first_token_seconds",
        "Seconds from a request to the answer's first token.",
        _FIRST_S,
    )
    each_s: Histogram = histogram(
        "time_per_output_token_seconds",
        "Seconds per token after an answer's first token.",
        _TOKEN_S,
    )
    recovery_s: Histogram = histogram(
        "recovery_seconds",
        "Seconds from a loss of the edge until tokens were verified again.",
        _RECOVERY_S,
    )
    unverified: int = counter(
        "recovery_local_tokens", "Tokens that the drafter generated alone while the edge was lost."
    )
    requests: Counter[tuple[str, str]] = counter(
        "http_requests", "Answered HTTP requests.", "route", "status"
    )
    latency_s: Histograms = histogram(
        "http_request_duration_seconds",
        "Seconds from an HTTP request to the end of its answer.",
        _REQUEST_S,
        "route",
    )
    refused: Counter[str] = counter("refusals", "Refused requests, by reason.", "reason")
    verified: bool = gauge(
        "weights_verified",
        "1 after the drafter's files were verified against the export's digests.",
    )
    damaged: bool = gauge(
        "weights_damaged", "1 after a file of the drafter was found damaged (its digest differs)."
    )
    waiting: int = gauge("num_requests_waiting", "Answers that wait for a lane.")
    running: int = gauge("num_requests_running", "Answers that are being generated.")
    connections: int = gauge("http_connections", "Open connections of clients.")
    crowded: bool = gauge(
        "http_connections_crowded",
        "1 while the limit of open files leaves no room for another connection.",
    )
    turned_away: int = counter(
        "http_connections_turned_away",
        "Connections that were closed at once because there was no room.",
    )


class ServiceMetrics:
    """The counts and measurements of a service. Thread-safe.

    power: the power rails whose energy is counted until `close`; None: this board's. drafter: its
    name. execution: how the drafter runs; None: the drafter is not a model.
    """

    def __init__(
        self,
        power: Sequence[Rail] | None = None,
        drafter: str = "",
        execution: Execution | None = None,
    ) -> None:
        how = ("none", "", "") if execution is None else (*execution[:2], str(execution.threads))
        self._gpu_idle = execution is not None and execution.idle_gpu is not None
        self._build = (SOFTWARE, drafter, *how)
        self.energy = Watch(rails() if power is None else power).start()
        self._counts = _Counts()
        # the link's state, its readings, and the readings' time (monotonic)
        self._link: tuple[Connectivity, LinkState | None, float] | None = None
        self._losses = 0
        self._lock = threading.Lock()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def add_round(self, record: Round) -> None:
        """Count a finished round."""
        protocol = record.protocol if record.protocol in names() else _OTHER
        with self._lock:
            counts = self._counts
            # under `ahead`: tokens drafted between two messages
            counts.drafted[protocol] += record.nodes
            if record.window:
                counts.drafts[protocol] += 1
                counts.accepted[protocol] += record.accepted
                for position in range(min(record.accepted, _POSITIONS)):
                    counts.accepted_at[str(position)] += 1
                if record.accepted > _POSITIONS:
                    counts.accepted_at[f"{_POSITIONS}+"] += record.accepted - _POSITIONS
            for name, value in record.notes.items():
                counts.notes[name, protocol] += value
            for stage in STAGES:
                seconds = getattr(record.timings, stage)
                if seconds or record.window:  # protocols without drafts lack most stages
                    counts.stages[protocol, stage].add(seconds)
            counts.bytes["up", "rounds"] += record.uplink_bytes
            counts.bytes["down", "rounds"] += record.downlink_bytes
            for origin, ids, _ in record.origins:
                if ids:
                    counts.tokens[origin] += len(ids)
            if record.source:
                counts.hint_drafts[record.source] += record.window
                counts.hint_accepted[record.source] += record.accepted

    def add_generation(self, generation: Generation) -> None:
        """Count a finished answer."""
        protocol = generation.protocol if generation.protocol in names() else _OTHER
        policy = generation.choice.policy if generation.choice is not None else "none"
        later = len(generation.tokens)
        if generation.rounds:
            later -= len(generation.rounds[0].tokens)
        with self._lock:
            counts = self._counts
            counts.generations[protocol, policy, generation.finish_reason] += 1
            counts.chosen = {name: name == protocol for name in names()}
            counts.prompt_tokens += generation.prompt_tokens
            counts.first_s.add(generation.first_token_s)
            if later > 0:
                counts.each_s.add((generation.total_s - generation.first_token_s) / later)
            counts.bytes["up", "probing"] += generation.probing.uplink_bytes
            counts.bytes["down", "probing"] += generation.probing.downlink_bytes
            for recovery in generation.recoveries:
                counts.recovery_s.add(recovery.lost_s)
                counts.unverified += recovery.local_tokens

    def add_request(self, route: str, status: int, seconds: float) -> None:
        """Count an answered HTTP request. route: template of the path."""
        with self._lock:
            route = _bounded(route, self._counts.latency_s)
            self._counts.requests[route, str(status)] += 1
            self._counts.latency_s[route].add(seconds)

    def count_refusal(self, reason: str) -> None:
        """Count a refused request. reason: "key", "busy", "too-long", "malformed", …."""
        with self._lock:
            self._counts.refused[_bounded(reason, self._counts.refused)] += 1

    def set_queue(self, waiting: int, running: int) -> None:
        """Set the numbers of waiting and of running answers."""
        with self._lock:
            self._counts.waiting, self._counts.running = waiting, running

    def set_connections(self, number: int, crowded: bool, turned_away: int) -> None:
        """Set the number of connections, whether there is a shortage, and how many were refused."""
        with self._lock:
            counts = self._counts
            counts.connections, counts.crowded, counts.turned_away = number, crowded, turned_away

    def set_link(self, status: LinkStatus | None, readings: LinkState | None) -> None:
        """Set the link's state and readings. Call it about each second, and before `exposition`.

        status: None without an edge, exposed as a link that is down.
        """
        state = Connectivity.CONNECTING if status is None else status.state
        up = Connectivity.CONNECTED
        with self._lock:
            self._losses += self._link is not None and self._link[0] is up and state is not up
            self._link = state, readings, time.monotonic()

    def set_inspection(self, inspection: Inspection) -> None:
        """Set the outcome of the inspection of the drafter's files."""
        with self._lock:
            self._counts.verified = inspection.passed
            self._counts.damaged = bool(inspection.damage)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format (media type `CONTENT_TYPE`)."""
        return generate_latest(self._registry)

    def collect(self) -> list[Metric]:
        """Return all metric families with their present values; called by the registry."""
        with self._lock:
            counted = [*metric_families(self._counts, PREFIX)]
            link = () if self._link is None else _link_metrics(*self._link, self._losses)
        labels = ("version", "model", "provider", "precision", "threads")
        build = _gauge(
            "build_info",
            "Always 1; the labels name the version, the model and how it is executed.",
            {self._build: 1},
            *labels,
        )
        idle = _gauge(
            "gpu_idle",
            "1 if the drafter runs on the CPU although there is a GPU and nobody chose the CPU.",
            self._gpu_idle,
        )
        return [build, idle, *counted, *link, *_energy_metrics(self.energy)]

    def close(self) -> None:
        """Stop sampling the power."""
        self.energy.close()


def _bounded(name: str, known: Counter[str] | Histograms) -> str:
    """Return the name; "other" for a new name beyond the limit `_KINDS`."""
    return name if name in known or len(known) < _KINDS else _OTHER


def _link_metrics(
    link: Connectivity, state: LinkState | None, read_s: float, losses: int
) -> Iterator[Metric]:
    """Yield the link's metrics whose values are known. read_s: time of the readings (monotonic)."""
    yield _gauge("link_up", "1 while the edge is connected.", link is Connectivity.CONNECTED)
    states = {each.value: each is link for each in Connectivity}
    yield _gauge(
        "link_state",
        "1 for the present state of the link to the edge, 0 for others.",
        states,
        "state",
    )
    yield _counter("link_losses", "Number of losses of the edge.", losses)
    if state is None:
        return
    ages = {}
    for name, text, attribute, scale in _READINGS:
        if (reading := getattr(state, attribute)) is not None:
            ages[attribute] = reading.age_s + time.monotonic() - read_s
            yield _gauge(name, text, reading.value * scale)
    yield _gauge("link_reading_age_seconds", "Age of each reading of the link.", ages, "reading")


def _energy_metrics(watch: Watch) -> Iterator[Metric]:
    """Yield power and energy of the board's rails; nothing without a sensor."""
    joules, watts, source = watch.joules, watch.watts, watch.source or ""
    if joules is not None:
        energy = "Energy used since the service started."
        yield _counter("energy_joules", energy, {source: joules}, "source")
    if watts is not None:
        yield _gauge("power_watts", "Present power of the rails whose energy is counted.", watts)


_gauge, _counter = partial(metric, "gauge", PREFIX), partial(metric, "counter", PREFIX)
