"""`/metrics`: what Prometheus is told of a device service.

In:  each round, answer, request, refusal and look at the link, as they happen.
Out: Prometheus' text format.

Speculation is counted under vLLM's names with our prefix, so that its dashboards fit: mean length
of a round = 1 + accepted / drafts. What was never measured, or cannot be measured here, is absent
and never zero. The number of series is bounded, whatever clients ask for.
"""

import threading
import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client import disable_created_metrics as _without_created
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from pilotfish import wire
from pilotfish.device_runtime.energy import Rail, Watch, rails
from pilotfish.device_runtime.record import STAGES, Generation, Round
from pilotfish.engines.inspection import Inspection
from pilotfish.wire.link.state import LinkState, Reading
from pilotfish.wire.protocols import EXCHANGES, LOCAL, STREAM, counters, names

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_POSITIONS = 32  # of a window; what is deeper is counted together
_KINDS = 40  # of routes, and of reasons to refuse
_OTHER = "other"

_STAGE_BUCKETS_S = [step * 10.0**power for power in range(-5, 1) for step in (1, 2.5, 5)] + [10.0]
_TOKEN_BUCKETS_S = [0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5]
_FIRST_BUCKETS_S = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120]
_REQUEST_BUCKETS_S = [0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300]
_RECOVERY_BUCKETS_S = [0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 30, 60, 120, 600]


def origins(record: Round) -> dict[str, int]:
    """How many of a round's tokens came from where; see `device_runtime.record.Piece`."""
    count = len(record.tokens)
    if record.protocol not in EXCHANGES:
        return {"target" if record.protocol == STREAM else LOCAL: count}
    drafted = min(record.accepted, count)
    last = "bonus" if record.accepted == record.window else "corrected"
    return {"drafted": drafted, last: count - drafted}


class Metrics:
    """Counts what a service does. Thread-safe.

    power: the rails whose energy is counted from now until `close`; those of this board if None.
    """

    def __init__(self, power: Sequence[Rail] | None = None) -> None:
        _without_created()  # type: ignore[no-untyped-call]  # the library does not type it
        self.energy = Watch(rails() if power is None else power).start()
        self.registry = CollectorRegistry()
        self._link = _Link()
        self._routes, self._reasons = _Kinds(), _Kinds()
        ProcessCollector(registry=self.registry)
        self.registry.register(self._link)
        self.registry.register(_Energy(self.energy))
        Info("pilotfish_build", "The software that runs.", registry=self.registry).info(
            {"version": wire.SOFTWARE}
        )
        self._build_speculation()
        self._build_answers()
        self._build_service()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pilotfish_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(
            f"pilotfish_{name}_seconds", text, labels, buckets=buckets, registry=self.registry
        )

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"pilotfish_{name}", text, labels, registry=self.registry)

    def _build_speculation(self) -> None:
        self._drafts = self._counter(
            "spec_decode_num_drafts", "Windows that were verified.", "protocol"
        )
        self._drafted = self._counter(
            "spec_decode_num_draft_tokens",
            "Tokens drafted; of a tree, all its distinct nodes.",
            "protocol",
        )
        self._accepted = self._counter(
            "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", "protocol"
        )
        self._notes = {
            name: self._counter(
                f"spec_decode_{'num_' if one.whole else ''}{one.metric}", one.help, "protocol"
            )
            for name, one in counters().items()
        }
        self._accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            f"Accepted tokens by position in the window, from 0; {_POSITIONS} and deeper together.",
            "position",
        )
        self._stages = self._histogram(
            "stage",
            "Seconds of each stage of a round.",
            _STAGE_BUCKETS_S,
            "protocol",
            "stage",
        )
        self._bytes = self._counter(
            "link_bytes",
            "Bytes of messages as handed to the transport; up is from the device to the edge.",
            "direction",
            "purpose",
        )

    def _build_answers(self) -> None:
        self._tokens = self._counter(
            "generation_tokens", "Tokens of answers, by where they came from.", "origin"
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of the prompts answered.")
        self._generations = self._counter(
            "generations",
            "Answers that ended by themselves; policy says who chose the protocol.",
            "protocol",
            "policy",
            "finish_reason",
        )
        self._chosen = self._gauge(
            "protocol_in_use", "1 for the protocol of the newest answer.", "protocol"
        )
        self._first = self._histogram(
            "time_to_first_token", "Seconds until an answer's first token.", _FIRST_BUCKETS_S
        )
        self._each = self._histogram(
            "time_per_output_token", "Seconds of each token after the first.", _TOKEN_BUCKETS_S
        )
        self._recovery = self._histogram(
            "recovery",
            "Seconds without the edge within an answer, until tokens were verified again.",
            _RECOVERY_BUCKETS_S,
        )
        self._unverified = self._counter(
            "recovery_local_tokens", "Tokens that the drafter gave alone while the edge was lost."
        )

    def _build_service(self) -> None:
        self._requests = self._counter(
            "http_requests", "HTTP requests answered.", "route", "status"
        )
        self._latency = self._histogram(
            "http_request_duration", "Seconds of a request.", _REQUEST_BUCKETS_S, "route"
        )
        self._refused = self._counter("refusals", "Requests refused, by reason.", "reason")
        verified = "1 once the drafter's files were found to be those that were exported."
        self._verified = self._gauge("weights_verified", verified)
        self._damaged = self._gauge("weights_damaged", "1 once one was found to be another.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for a lane.")
        self._running = self._gauge("num_requests_running", "Requests that are being answered.")

    def round(self, record: Round) -> None:
        """A round is over."""
        protocol = record.protocol if record.protocol in names() else _OTHER
        if record.window:
            self._drafts.labels(protocol).inc()
            self._drafted.labels(protocol).inc(record.nodes)
            self._accepted.labels(protocol).inc(record.accepted)
            for name, value in record.notes.items():
                self._notes[name].labels(protocol).inc(value)
            for position in range(min(record.accepted, _POSITIONS)):
                self._accepted_at.labels(str(position)).inc()
            if record.accepted > _POSITIONS:
                self._accepted_at.labels(f"{_POSITIONS}+").inc(record.accepted - _POSITIONS)
        for stage in STAGES:
            seconds = getattr(record.timings, stage)
            if seconds or record.window:  # the baselines lack most stages
                self._stages.labels(protocol, stage).observe(seconds)
        self._bytes.labels("up", "rounds").inc(record.uplink_bytes)
        self._bytes.labels("down", "rounds").inc(record.downlink_bytes)
        for origin, count in origins(record).items():
            self._tokens.labels(origin).inc(count)

    def generation(self, generation: Generation) -> None:
        """An answer has come to its end."""
        protocol = generation.protocol if generation.protocol in names() else _OTHER
        policy = generation.choice.policy if generation.choice is not None else "none"
        self._generations.labels(protocol, policy, generation.finish_reason).inc()
        for name in names():
            self._chosen.labels(name).set(name == protocol)
        self._prompt_tokens.inc(generation.prompt_tokens)
        self._first.observe(generation.first_token_s)
        first = generation.rounds[0].tokens if generation.rounds else []
        later = len(generation.tokens) - len(first)
        if later > 0:
            self._each.observe((generation.total_s - generation.first_token_s) / later)
        self._bytes.labels("up", "probing").inc(generation.probing.uplink_bytes)
        self._bytes.labels("down", "probing").inc(generation.probing.downlink_bytes)
        for recovery in generation.recoveries:
            self._recovery.observe(recovery.lost_s)
            self._unverified.inc(recovery.local_tokens)

    def request(self, route: str, status: int, seconds: float) -> None:
        """An HTTP request has been answered. route: the template, not the path."""
        route = self._routes.name(route)
        self._requests.labels(route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def refused(self, reason: str) -> None:
        """A request was turned away: "key", "busy", "too-long", "malformed", …."""
        self._refused.labels(self._reasons.name(reason)).inc()

    def queue(self, waiting: int, running: int) -> None:
        """So many requests wait for a lane, and so many have one."""
        self._waiting.set(waiting)
        self._running.set(running)

    def link(self, up: bool, state: LinkState | None) -> None:
        """What is known of the link now; call it every second or so, and before `exposition`."""
        self._link.tell(up, state)

    def weights(self, inspection: Inspection) -> None:
        """What is known of the drafter's files."""
        self._verified.set(inspection.passed)
        self._damaged.set(bool(inspection.damage))

    def exposition(self) -> bytes:
        """All of it, in Prometheus' text format; its media type is `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def close(self) -> None:
        """Stop to sample the power."""
        self.energy.close()


class _Kinds:
    """Lets so many different names pass; all later ones are "other"."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def name(self, name: str) -> str:
        with self._lock:
            if len(self._known) < _KINDS:
                self._known.add(name)
            return name if name in self._known else _OTHER


class _Link(Collector):
    """The link as it was told last. Only what is known is exposed."""

    def __init__(self) -> None:
        self._told: tuple[bool, LinkState | None, float] | None = None
        self._losses = 0
        self._lock = threading.Lock()

    def tell(self, up: bool, state: LinkState | None) -> None:
        with self._lock:
            self._losses += self._told is not None and self._told[0] and not up
            self._told = up, state, time.monotonic()

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            told, losses = self._told, self._losses
        if told is None:
            return
        up, state, at_s = told
        yield _gauge("link_up", "1 while the edge answers.", float(up))
        yield CounterMetricFamily(
            "pilotfish_link_losses", "How often the edge ceased to answer.", value=losses
        )
        if state is not None:
            yield from _readings(state, time.monotonic() - at_s)


def _readings(state: LinkState, since_s: float) -> Iterator[Metric]:
    """A gauge of each reading; since_s: what has passed since they were taken."""
    known: dict[str, Reading] = {}
    for name, text, attribute, scale in (
        ("link_rtt_seconds", "Round trip of a small message.", "rtt", 1.0),
        ("link_jitter_seconds", "Mean change from one round trip to the next.", "jitter", 1.0),
        ("link_goodput_up_bytes_per_second", "Payload that goes up.", "up", 1 / 8),
        ("link_goodput_down_bytes_per_second", "Payload that comes down.", "down", 1 / 8),
        ("link_retransmitted_ratio", "TCP segments that were sent again.", "retransmitted", 1.0),
        ("link_signal_dbm", "Radio signal.", "signal", 1.0),
    ):
        reading = getattr(state, attribute)
        if reading is not None:
            known[attribute] = reading
            yield _gauge(name, text, reading.value * scale)
    ages = GaugeMetricFamily(
        "pilotfish_link_reading_age_seconds", "How old each reading is.", labels=["reading"]
    )
    for attribute, reading in known.items():
        ages.add_metric([attribute], reading.age_s + since_s)
    yield ages


class _Energy(Collector):
    """Power and energy of this board; nothing at all without a sensor."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        joules, watts, source = self._watch.joules, self._watch.watts, self._watch.source
        if joules is not None:
            energy = CounterMetricFamily(
                "pilotfish_energy_joules", "Energy since the service began.", labels=["source"]
            )
            energy.add_metric([source or ""], joules)
            yield energy
        if watts is not None:
            yield _gauge("power_watts", "Power now, of the same rails as the energy.", watts)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"pilotfish_{name}", text, value=value)
