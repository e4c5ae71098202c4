"""How true the meter's first readings are: a table over simulated links.

    python -m tests.channel_grid [--repeats N] [--jitter segment|message] [--window] [--answers N]

The simulation has no sockets and no clock, so a seed repeats it exactly. It drives the product's
`LinkMeter` and `RateProbe`. A link has an RTT, a rate, jitter and loss as in `docs/emulation.md`:
jitter delays each segment (or each message) by up to half of it, no segment overtakes another, and
a lost segment delays the later ones. With --window, TCP's first window is 10 segments, and each
acknowledgement lets two more go.

The true rate is the link's: the goodput of 1 MB while the sender is never idle.

--answers also prints the readings after N answers of 16 rounds. Before each answer but the first
the device sends one small ping, as a decision head wants it. Each round is one window up and one
small verdict down; --bytes is the size of a window. The trains ran once, before the first answer.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from random import Random
from typing import NamedTuple

from pilotfish.wire.link.meter import LinkMeter
from pilotfish.wire.link.train import RateProbe

RATES_MBPS = (1, 2, 5, 10, 20, 50, 100, 200)
RTTS_MS = (5, 20, 50, 100)
JITTERS_MS = (0, 5, 10, 20, 40)
LOSSES = (0.0, 0.01, 0.03)
FACTOR, CLOSE = 1.5, 1.25
_SEGMENT = 1_448
_FIRST_WINDOW = 10
_READ_S = 1e-4  # longest delay (s) until a process reads a message
_WRITE_S = 5e-5  # time (s) to write a message
_SMALL = 60  # bytes of a small ping with its headers
_VERDICT = 90  # bytes of a verdict
_ROUNDS = 16  # rounds of an answer
_DRAFT_S, _HELD_S = 0.04, 0.03  # time (s) to draft a window, and that the edge holds it
_OFFSET_NS = 987_654_321_000  # the edge's clock minus the device's


class Link(NamedTuple):
    """A simulated link; jitter_s: maximum additional delay of a round trip."""

    rate_bps: float
    rtt_s: float
    jitter_s: float
    loss: float

    @property
    def is_easy(self) -> bool:
        """Whether 0.3 s of the link are at most 100 kB and the jitter at most half the RTT."""
        return self.rate_bps * 0.3 / 8 <= 100e3 and self.jitter_s <= self.rtt_s / 2


class Way:
    """One direction of a link, in virtual time (s)."""

    def __init__(self, link: Link, random: Random, *, by_message: bool, window: bool) -> None:
        self._link, self._random = link, random
        self._by_message, self._has_window = by_message, window
        self._left_s = self._arrived_s = 0.0
        self._acknowledged = 0

    def send(self, sizes: Sequence[int], sent_s: Sequence[float]) -> list[float]:
        """Send messages; returns the time at which each one was read."""
        link, random = self._link, self._random
        ends = list(accumulate(sizes))
        message_delays = [random.random() for _ in sizes]
        window = _FIRST_WINDOW + self._acknowledged
        latest_s, acknowledgements = 0.0, []
        segments = []  # (end, departure, arrival, lost)
        for number, start in enumerate(range(0, ends[-1], _SEGMENT)):
            end = min(ends[-1], start + _SEGMENT)
            message = next(at for at, last in enumerate(ends) if last >= end)
            ready_s = sent_s[message]
            if self._has_window and number >= window:
                ready_s = max(ready_s, acknowledgements[(number - window) // 2])
            self._left_s = max(self._left_s, ready_s) + 8 * (end - start) / link.rate_bps
            share = message_delays[message] if self._by_message else random.random()
            due_s = self._left_s + link.rtt_s / 2 + share * link.jitter_s / 2
            latest_s = max(latest_s, due_s)
            acknowledgements.append(latest_s + link.rtt_s / 2)
            segments.append((end, self._left_s, due_s, random.random() < link.loss))
        self._acknowledged += len(segments)
        return [at + random.random() * _READ_S for at in self._deliver(segments, ends)]

    def _deliver(
        self, segments: Sequence[tuple[int, float, float, bool]], ends: Sequence[int]
    ) -> Iterator[float]:
        """Yield each message's arrival, in order, after the retransmissions of lost segments."""
        rtt_s, ends = self._link.rtt_s, list(ends)
        for at, (end, left_s, due_s, lost) in enumerate(segments):
            if lost:
                repaired_s = due_s + rtt_s + 0.2
                if at + 3 < len(segments):
                    noticed_s = segments[at + 3][1] - left_s
                    repaired_s = min(repaired_s, due_s + noticed_s + rtt_s)
                due_s = repaired_s
            self._arrived_s = max(self._arrived_s, due_s)
            while ends and ends[0] <= end:
                ends.pop(0)
                yield self._arrived_s


class Reading(NamedTuple):
    """A first reading of both directions (bit/s; None: unknown), and the bytes that it cost."""

    rates_bps: tuple[float | None, float | None]
    cost_bytes: tuple[int, int]


class SimulatedDevice:
    """A device at a simulated link, and its meter."""

    def __init__(
        self, link: Link, seed: int, *, by_message: bool = False, window: bool = False
    ) -> None:
        random = Random(f"{seed} {link}")
        self._rtt_s = 0.0
        self._now_s = 10.0
        self.meter = LinkMeter(lambda: int(self._now_s * 1e9))
        self._up, self._down = (
            Way(link, random, by_message=by_message, window=window) for _ in range(2)
        )

    def ping(self) -> None:
        """Send a small ping, and show it to the meter."""
        self._rtt_s = self._exchange(_SMALL, _SMALL)

    def _exchange(self, up_bytes: int, down_bytes: int, held_s: float = 0.0) -> float:
        """Exchange two messages, and show them to the meter; returns the time on the link."""
        sent_s = self._now_s
        there_s = self._up.send([up_bytes], [sent_s])[0]
        self._now_s = self._down.send([down_bytes], [there_s + held_s])[0]
        self.meter.record_exchange(
            up_bytes=up_bytes,
            down_bytes=down_bytes,
            sent_ns=int(sent_s * 1e9),
            received_ns=int(self._now_s * 1e9),
            edge_received_ns=int(there_s * 1e9) + _OFFSET_NS,
            held_ns=int(held_s * 1e9),
        )
        return self._now_s - sent_s - held_s

    def answer(self, window_bytes: int) -> None:
        """Measure the RTT and speculate for the rounds of an answer, as for a decision head."""
        self.ping()
        self.meter.begin_answer()
        for _ in range(_ROUNDS):
            self._now_s += _DRAFT_S
            self._exchange(window_bytes, _VERDICT, _HELD_S)

    def rates_bps(self) -> tuple[float | None, float | None]:
        """The meter's present readings."""
        state = self.meter.state()
        return state.up and state.up.value, state.down and state.down.value

    def read_by_trains(self) -> Reading:
        """Measure the rates by a small ping and trains, as a device does."""
        self.ping()
        rtt_s = self._rtt_s
        results = []
        for way, back, is_up in ((self._up, self._down, True), (self._down, self._up, False)):
            probe, cost = RateProbe(), 0
            while sizes := probe.sizes:
                cost += sum(sizes)
                sent_s = self._now_s
                messages = (_SMALL, *sizes)  # a small one comes first: a request, or its reply
                times_s = [sent_s + at * _WRITE_S for at in range(len(messages))]
                if not is_up:
                    asked_s = back.send([_SMALL], [sent_s])[0]
                    times_s = [asked_s + at - sent_s for at in times_s]
                begun_s, *arrivals_s = way.send(messages, times_s)
                self._now_s = arrivals_s[-1]
                took_s = self._now_s - (begun_s if is_up else sent_s + rtt_s)
                if is_up:
                    self._now_s = back.send([_SMALL], [self._now_s])[0]
                probe.on_train(arrivals_s, took_s, may_repeat=True, rtt_s=rtt_s)
            results.append((probe.rate_bps, cost))
        (up, up_cost), (down, down_cost) = results
        self.meter.record_rates(up, down)
        return Reading((up, down), (up_cost, down_cost))


class Score:
    """Counts of readings: all, unknown, and those within a factor of the truth.

    true: within ``FACTOR``; close: within ``CLOSE``.
    """

    def __init__(self) -> None:
        self.all = self.unknown = self.true = self.close = self.costly = 0

    def add(self, link: Link, reading: Reading) -> None:
        """Count both directions of a reading."""
        most = min(100e3, max(12e3, 0.3 * link.rate_bps / 8))
        for rate_bps, cost in zip(*reading, strict=True):
            self.all += 1
            self.costly += cost > 1.1 * most
            if rate_bps is None:
                self.unknown += 1
            else:
                ratio = rate_bps / link.rate_bps
                self.true += 1 / FACTOR <= ratio <= FACTOR
                self.close += 1 / CLOSE <= ratio <= CLOSE

    @property
    def unknown_share(self) -> float:
        """Share of the readings that are unknown."""
        return self.unknown / self.all

    @property
    def true_share(self) -> float:
        """Share of the given readings that are within the factor."""
        return self.true / max(1, self.all - self.unknown)

    @property
    def close_share(self) -> float:
        """Share of the given readings that are within the smaller factor."""
        return self.close / max(1, self.all - self.unknown)


def links() -> Iterator[Link]:
    """Yield the links of the grid."""
    for mbps, rtt, jitter, loss in product(RATES_MBPS, RTTS_MS, JITTERS_MS, LOSSES):
        yield Link(mbps * 1e6, rtt * 1e-3, jitter * 1e-3, loss)


def score_grid(
    repeats: int,
    *,
    by_message: bool = False,
    window: bool = False,
    answers: int = 0,
    window_bytes: int = 12_000,
) -> dict[object, Score]:
    """Score readings: of all links, of easy and hard ones, and by rate and jitter.

    answers: number of answers before the readings; 0: score the first readings.
    """
    scores: dict[object, Score] = {}
    for link, seed in product(links(), range(repeats)):
        device = SimulatedDevice(link, seed, by_message=by_message, window=window)
        reading = device.read_by_trains()
        for _ in range(answers):
            device.answer(window_bytes)
        reading = reading._replace(rates_bps=device.rates_bps())
        kind = "easy" if link.is_easy else "hard"
        for key in ("all", kind, (link.rate_bps * 1e-6, link.jitter_s * 1e3)):
            scores.setdefault(key, Score()).add(link, reading)
    return scores


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jitter", choices=("segment", "message"), default="segment")
    parser.add_argument("--window", action="store_true")
    parser.add_argument("--answers", type=int, default=0)
    parser.add_argument("--bytes", type=int, default=12_000)
    args = parser.parse_args()
    for answers in sorted({0, args.answers}):
        scores = score_grid(
            args.repeats,
            by_message=args.jitter == "message",
            window=args.window,
            answers=answers,
            window_bytes=args.bytes,
        )
        _print_scores(f"after {answers} answers" if answers else "first readings", scores)


def _print_scores(title: str, scores: dict[object, Score]) -> None:
    score = scores["all"]
    print(f"\n{title}: {score.all} readings")
    print(f"  given ones within a factor of {FACTOR}: {score.true_share:.1%}")
    print(f"  given ones within a factor of {CLOSE}: {score.close_share:.1%}")
    for kind in ("easy", "hard"):
        print(f"  unknown on {kind} links: {scores[kind].unknown_share:.1%}")
    print(f"  over budget: {score.costly / score.all:.1%}")
    print("  share within the factor / share unknown, %, by jitter (ms)")
    print("  Mbit/s" + "".join(f"{jitter:>10}" for jitter in JITTERS_MS))
    for mbps in RATES_MBPS:
        cells = [scores[float(mbps), float(jitter)] for jitter in JITTERS_MS]
        row = (f"{100 * c.true_share:.0f} / {100 * c.unknown_share:.0f}" for c in cells)
        print(f"  {mbps:>6}" + "".join(f"{cell:>10}" for cell in row))


if __name__ == "__main__":
    main()
