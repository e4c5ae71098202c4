"""`GET /status`: the service's state as JSON, for people.

In:  each round, answer and reading of the link. Out: `ServiceStatus.snapshot`. Only sums, the
last rounds and recoveries, and the last minutes (`status_history`) are kept. Times are seconds,
rates bit/s; unknown values are null.
"""

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from pilotfish.base.version import SOFTWARE
from pilotfish.boards.misfit import Misfit
from pilotfish.device_runtime.energy import Watch
from pilotfish.device_runtime.link.connectivity import Connectivity, LinkStatus
from pilotfish.device_runtime.record import STAGES, Generation, Round, acceptance
from pilotfish.device_runtime.service.status_history import STEP_S, StatusHistory
from pilotfish.wire.link.state import READINGS, LinkState, Reading
from pilotfish.wire.protocols import counters

_ROUNDS = 64
_RECOVERIES = 16
_NOW_S = 3.0  # "now" is a mean over this time
# names of readings in the body, where they differ: "up" already says whether there is a link
_NAMES = {"up": "goodput_up", "down": "goodput_down"}


def freshest(states: Iterable[LinkState | None]) -> LinkState | None:
    """Combine the states of several connections to one edge: the latest value of each reading."""
    known = [state for state in states if state is not None]
    if not known:
        return None
    readings: dict[str, Reading] = {}
    for name in READINGS:
        taken = [sample for state in known if (sample := getattr(state, name)) is not None]
        if taken:
            readings[name] = min(taken, key=lambda reading: reading.age_s)
    return LinkState(**readings)


def link_body(status: LinkStatus) -> dict[str, Any]:
    """Return the link's state as JSON types."""
    state, message, remedy = status
    return {"state": state.value, "message": message, "remedy": remedy or None}


def _reading_body(reading: Reading, since_s: float) -> dict[str, Any]:
    """Return a reading as JSON types. since_s: seconds since it was taken from its connection."""
    return {
        "value": reading.value,
        "age_s": reading.age_s + since_s,
        "samples": reading.samples,
    }


class ServiceStatus:
    """The collected recent rounds and answers. Thread-safe, and of bounded size.

    drafter: the drafter's name. lanes: number of lanes. energy: `ServiceMetrics.energy`. misfits:
    why the drafter's model does not suit this machine.
    """

    def __init__(
        self,
        *,
        drafter: str,
        lanes: int,
        energy: Watch | None = None,
        misfits: Sequence[Misfit] = (),
    ) -> None:
        self._drafter, self._lanes, self._energy = drafter, lanes, energy
        self._misfits = [{"kind": each.kind, "message": each.message} for each in misfits]
        self._began_s = time.monotonic()
        self._connections = 0, False
        self._lock = threading.Lock()
        self._rounds: deque[tuple[float, Round]] = deque(maxlen=_ROUNDS)  # with their ends, s
        self._history = StatusHistory(self._began_s)
        # since the start: numbers of verified, averaged and accepted positions; sums of protocols'
        # notes, by name
        self._parts: Counter[str] = Counter()
        self._noted: dict[str, float] = defaultdict(int)
        # since the start, by source of hints: (drafted tokens, accepted tokens)
        self._hints: dict[str, tuple[int, int]] = {}
        self._recoveries: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_RECOVERIES)
        self._recovered = 0
        self._answers = 0
        self._last: dict[str, Any] | None = None
        self._choice: dict[str, Any] | None = None
        self._link_status: LinkStatus | None = None
        self._since_s = self._began_s
        self._connected_s: float | None = None  # when the link was last seen connected
        self._link: tuple[LinkState | None, float] = None, self._began_s
        self._queue = 0, 0

    def add_round(self, record: Round) -> None:
        """Add a round."""
        now_s = time.monotonic()
        with self._lock:
            self._rounds.append((now_s, record))
            self._history.add_round(record, now_s)
            self._parts["verified"] += record.verified
            self._parts["averaged"] += record.averaged
            self._parts["accepted"] += record.accepted
            for name, value in record.notes.items():
                self._noted[name] += value
            if record.source:
                drafted, accepted = self._hints.get(record.source, (0, 0))
                self._hints[record.source] = (drafted + record.window, accepted + record.accepted)

    def add_generation(self, generation: Generation) -> None:
        """Add a complete answer."""
        now_s = time.monotonic()
        with self._lock:
            self._answers += 1
            self._last = {
                "tokens": len(generation.tokens),
                "tokens_per_s": generation.tokens_per_s,
                "first_token_s": generation.first_token_s,
                "finish_reason": generation.finish_reason,
                **generation.notes,
            }
            self._choice = _choice_body(generation)
            for recovery in generation.recoveries:
                self._recovered += 1
                fields = {
                    "at": recovery.at,
                    "lost_s": recovery.lost_s,
                    "local_tokens": recovery.local_tokens,
                }
                self._recoveries.append((now_s, fields))

    def set_link(self, status: LinkStatus | None, state: LinkState | None) -> None:
        """Set the link's state and readings. Call it about each second, and before `snapshot`."""
        now_s = time.monotonic()
        with self._lock:
            before = self._link_status
            if before is None or status is None or status.state is not before.state:
                self._since_s = now_s
            self._link = state, now_s
            self._link_status = status
            connected = status is not None and status.state is Connectivity.CONNECTED
            if connected:
                self._connected_s = now_s
            rtt = state.rtt if state is not None and connected else None
            self._history.set_link(
                away=status is not None and not connected,
                rtt_s=rtt.value if rtt is not None and rtt.age_s < STEP_S else None,
                now_s=now_s,
            )

    def set_queue(self, waiting: int, running: int) -> None:
        """Set the numbers of waiting and running requests."""
        with self._lock:
            self._queue = waiting, running

    def set_connections(self, number: int, crowded: bool) -> None:
        """Set the number of clients' connections, and whether descriptors are short."""
        with self._lock:
            self._connections = number, crowded

    def snapshot(
        self,
        *,
        edge: str | None = None,
        target: str | None = None,
        on_link_loss: str | None = None,
        protocols: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """Return the status as JSON types.

        edge: the edge's address. target: its model's name. on_link_loss: what answers do while the
        edge is away; None without an edge. protocols: those that a request may name.
        """
        with self._lock:
            now_s = time.monotonic()
            rounds = [record for _, record in self._rounds]
            waiting, running = self._queue
            return {
                "software": SOFTWARE,
                "uptime_s": now_s - self._began_s,
                "drafter": self._drafter,
                "misfits": self._misfits,
                "target": target,
                "edge": edge,
                "on_link_loss": on_link_loss,
                "protocols": list(protocols),
                "link": self._link_body(now_s),
                "acceptance": {
                    "recent": acceptance(rounds) if any(r.window for r in rounds) else None,
                    "total": self._parts["accepted"] / self._parts["verified"]
                    if self._parts["verified"]
                    else None,
                },
                **{
                    name: note.summarize_total(self._noted.get(name, 0), self._parts[note.unit])
                    for name, note in counters().items()
                },
                "hints": {
                    source: {"drafted": drafted, "accepted": accepted}
                    for source, (drafted, accepted) in self._hints.items()
                },
                "rounds": _recent(rounds),
                "tokens_per_s": self._speed(now_s) if running else None,
                "protocol": self._choice,
                "answers": self._answers,
                "last": self._last,
                "recoveries": {
                    "count": self._recovered,
                    "recent": [
                        {"ago_s": now_s - at_s, **fields} for at_s, fields in self._recoveries
                    ],
                },
                "lanes": {"total": self._lanes, "running": running, "waiting": waiting},
                "connections": {"open": self._connections[0], "crowded": self._connections[1]},
                "energy": self._energy_body(),
                "history": self._history.body(now_s),
            }

    def _speed(self, now_s: float) -> float | None:
        """Return the tokens per second of the last `_NOW_S`, over all lanes; None: unknown.

        The first of these rounds only marks the beginning: its own duration is not known.
        """
        recent = [(at_s, len(r.tokens)) for at_s, r in self._rounds if now_s - at_s <= _NOW_S]
        if not recent:
            return 0.0 if self._rounds else None
        if len(recent) == 1:
            return None
        began_s = recent[0][0]
        tokens = sum(count for _, count in recent[1:])
        return tokens / (now_s - began_s) if now_s > began_s else None

    def _link_body(self, now_s: float) -> dict[str, Any]:
        state, at_s = self._link
        readings: dict[str, Any] = {}
        for name in READINGS:
            reading: Reading | None = getattr(state, name) if state is not None else None
            readings[_NAMES.get(name, name)] = reading and _reading_body(reading, now_s - at_s)
        status = self._link_status
        return {
            "up": None if status is None else status.state is Connectivity.CONNECTED,
            "since_s": now_s - self._since_s,
            "away_s": self._away_s(now_s),
            **(dict.fromkeys(LinkStatus._fields) if status is None else link_body(status)),
            **readings,
        }

    def _away_s(self, now_s: float) -> float | None:
        """Return the seconds since the edge was last connected; None: it is, or it never was."""
        status = self._link_status
        if status is None or status.state is Connectivity.CONNECTED or self._connected_s is None:
            return None
        return now_s - self._connected_s

    def _energy_body(self) -> dict[str, Any] | None:
        watch = self._energy
        if watch is None or watch.joules is None:
            return None
        return {"source": watch.source, "watts": watch.watts, "joules": watch.joules}


def _recent(rounds: Sequence[Round]) -> dict[str, Any] | None:
    """Return medians over the last rounds that have the newest round's protocol."""
    if not rounds:
        return None
    alike = [r for r in rounds if r.protocol == rounds[-1].protocol]
    return {
        "protocol": rounds[-1].protocol,
        "count": len(alike),
        "tokens": sum(len(r.tokens) for r in alike) / len(alike),
        "window": median(r.window for r in alike),
        "uplink_bytes": median(r.uplink_bytes for r in alike),
        "downlink_bytes": median(r.downlink_bytes for r in alike),
        "stages_s": {stage: median(getattr(r.timings, stage) for r in alike) for stage in STAGES},
    }


def _choice_body(generation: Generation) -> dict[str, Any]:
    """Return the answer's protocol, and why it was chosen."""
    choice = generation.choice
    if choice is None:
        return {
            "name": generation.protocol,
            "window": None,
            "top_k": None,
            "expansion": None,
            "policy": None,
            "reason": None,
        }
    return {
        "name": choice.protocol,
        "window": choice.window,
        "top_k": choice.top_k or None,
        "expansion": choice.expansion or None,
        "policy": choice.policy,
        "reason": choice.reason,
    }
