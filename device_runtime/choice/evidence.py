"""Estimate acceptance, computing times and bytes of a plan from past rounds.

In:  the rounds of each answer, and the pass times that both ends measured at start. Out: estimates
     for any plan, tried or not.

The acceptance at depth k is the protocol's own so far; with little evidence, that of the others
there, scaled by the protocols' typical ``agreement``; with none, a high one: an optimistic estimate
gets tried and corrected, a pessimistic one never would. Evidence fades from answer to answer, so
that drafting is tried again after a long time without it.

A lossy protocol's rounds are evidence for its whole family and, without the tokens that its
counters report as gained, for the lossless protocols.

Computing times are those measured at start, times the factor by which the last rounds of any
protocol took longer, times a factor of the protocol's own: so other work of the machines while one
protocol ran does not count against it.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Round
from pilotfish.speculation.tree import nodes_at_most
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols import EXCHANGES, LOCAL, STREAM, Exchange, counters
from pilotfish.wire.protocols.exchange import Freight, Sizes

_HOPE = 0.8  # α of a pair without evidence
_HOPE_WEIGHT = 4.0  # positions, or rounds, that this counts for
_POOL_WEIGHT = 16.0  # and the evidence on other depths or protocols
_FADE = 0.97  # an answer
_RECENT = 24  # rounds
_SLOWER = 4.0
_OWN_MOST = 2.0  # a protocol's own factor, or its inverse; the rest is the machine's
_OWN_ANSWERS, _OWN_IDLE = 8, 16  # answers that it averages; answers without, to forget it
_MOST = 0.98  # α, however the protocols scale


def _kind(plan: Plan) -> tuple[str, bool]:
    """Return the key of plans that accept alike: family, and whether the target is greedy."""
    family = plan.exchange.family if plan.exchange is not None else ""
    return family or plan.protocol, plan.law.sampling.greedy


def _strict_agreement(exchange: Exchange[Any], *, greedy: bool) -> float:
    """Return the protocol's lossless α as a multiple of that of `dsd`."""
    if greedy:
        return 1.0
    return exchange.agreement if exchange.lossless else exchange.strict_agreement


class _Recent(deque[float]):
    """The last values of one quantity."""

    def __init__(self) -> None:
        super().__init__(maxlen=_RECENT)

    def median(self, otherwise: float) -> float:
        """Return their median; ``otherwise`` if there are none."""
        return median(self) if self else otherwise

    def mean(self, otherwise: float, weight: float = 0.0) -> float:
        """Return their mean, with ``weight`` further values of ``otherwise``."""
        count = weight + len(self)
        return (weight * otherwise + sum(self)) / count if count else otherwise


class _PassPace:
    """Slowdown of passes against the start: a machine's factor times a protocol's own.

    The machine's follows the last rounds, since it changes soon; a protocol's own only whole
    answers. Both fade without new values.
    """

    def __init__(self) -> None:
        self._machine = _Recent()
        self._own: dict[str, deque[float]] = defaultdict(lambda: deque([1.0], maxlen=_OWN_ANSWERS))
        self._idle: Counter[str] = Counter()

    def add(self, name: str, factors: Sequence[float]) -> None:
        """Add the factors of an answer's passes under this protocol."""
        factors = [factor for factor in factors if factor > 0.0]  # nothing takes no time
        if not factors:
            self.fade()
            return
        if self._machine:
            self._own[name].append(median(factors) / self._machine.median(1.0))
        own = self._of(name)
        self._machine.extend(factor / own for factor in factors)
        self._idle = Counter({other: 1 + idle for other, idle in self._idle.items()})
        self._idle[name] = 0
        for other in [other for other, idle in self._idle.items() if idle > _OWN_IDLE]:
            self._own.pop(other, None)
            del self._idle[other]

    def fade(self) -> None:
        """Note an answer without such passes: the machine's factor gets older."""
        if self._machine:
            self._machine.popleft()

    def factor(self, name: str) -> float:
        """Return the factor to expect now."""
        return self._machine.median(1.0) * self._of(name)

    def _of(self, name: str) -> float:
        return min(_OWN_MOST, max(1 / _OWN_MOST, median(self._own[name])))


class _Acceptance:
    """Counts how often each depth of a window was reached and accepted; f64 [`MAX_WINDOW`] each.

    agreed: accepted without those that the protocol's counters report as gained. Which tokens were
    gained is not known, so each accepted one counts as a share.
    """

    def __init__(self) -> None:
        self.reached = np.zeros(MAX_WINDOW)
        self.accepted = np.zeros(MAX_WINDOW)
        self.agreed = np.zeros(MAX_WINDOW)

    def add(self, window: int, accepted: int, gained: float) -> None:
        self.reached[: min(window, accepted + 1)] += 1
        self.accepted[:accepted] += 1
        if accepted:
            self.agreed[:accepted] += max(0.0, 1 - gained / accepted)

    def fade(self) -> None:
        self.reached *= _FADE
        self.accepted *= _FADE
        self.agreed *= _FADE


class Evidence:
    """Evidence on one device and one edge.

    drafter_pace, target_pace: seconds of a pass by the number of its tokens, measured at start; the
    target's may be missing.
    """

    def __init__(
        self,
        drafter_pace: Mapping[int, float],
        target_pace: Mapping[int, float],
        sizes: Sizes,
    ) -> None:
        self._drafter_pace = drafter_pace
        # without times of the edge: slower than the drafter, and as fast for many tokens as for one
        slow_s = _SLOWER * drafter_pace[1]
        self._target_pace = dict(sorted(target_pace.items())) or {1: slow_s, MAX_WINDOW: slow_s}
        self._sizes = sizes
        # by family, and whether the target is greedy
        self._acceptance: dict[tuple[str, bool], _Acceptance] = defaultdict(_Acceptance)
        self._hazards: dict[tuple[str, bool], NDArray[np.float64]] = {}  # computed from these
        self._drafting, self._verifying = _PassPace(), _PassPace()
        self._around_s: dict[str, _Recent] = defaultdict(_Recent)  # encode, settle
        self._queue_s, self._between_s = _Recent(), _Recent()
        self._up: dict[str, _Recent] = defaultdict(_Recent)  # bytes, over expectation
        self._down: dict[str, _Recent] = defaultdict(_Recent)
        self._again: dict[str, _Recent] = defaultdict(_Recent)  # further exchanges, likewise

    # Observations

    def add(self, plan: Plan, rounds: Sequence[Round]) -> None:
        """Add the rounds of an answer, complete or not."""
        self._hazards.clear()
        for seen in self._acceptance.values():
            seen.fade()
        if plan.exchange is not None:
            seen = self._acceptance[_kind(plan)]
            gains = [name for name, counter in counters().items() if counter.gained]
            for round_ in rounds:
                gained = sum(round_.notes.get(name, 0) for name in gains)
                seen.add(round_.window, round_.accepted, gained)
        self._add_times(plan, rounds[1:])  # the first one waits for the prompt to be read

    def _add_times(self, plan: Plan, rounds: Sequence[Round]) -> None:
        name = plan.protocol
        drafting, verifying = [], []
        for round_ in rounds:
            levels = plan.expansion[: round_.window] or (1,) * (name == LOCAL)
            if levels:
                drafting.append(round_.timings.draft / self._drafting_s(plan, levels))
            # of a tree by the nodes that it might have had, as in `computing_s`
            verifying.append(round_.pass_s / self._verifying_s(levels))
        self._drafting.add(name, drafting)
        if name == LOCAL:
            self._verifying.fade()
            return
        self._verifying.add(name, verifying)
        if plan.exchange is None:
            # tokens may come in bursts, so only the mean distance counts
            if rounds:
                waited_s = fmean(round_.timings.total for round_ in rounds)
                self._between_s.append(max(0.0, waited_s - fmean(r.pass_s for r in rounds)))
            return
        for round_ in rounds:
            self._around_s[name].append(round_.timings.encode + round_.timings.settle)
            self._queue_s.append(round_.timings.queue)
            expected = self._expected_freight(plan, round_.window)
            self._up[name].append(round_.uplink_bytes / expected.up)
            self._down[name].append(round_.downlink_bytes / expected.down)
            if (again := self._expected_again(plan, round_.window)) > 0.0:
                self._again[name].append((round_.exchanges - 1) / again)

    # Estimates

    def hazards(self, plan: Plan) -> NDArray[np.float64]:
        """Estimate α at each depth of the plan's window, given that it is reached; f64 [γ]."""
        kind = _kind(plan)
        if kind not in self._hazards:
            self._hazards[kind] = self._expected_acceptance(*kind)
        return self._hazards[kind][: len(plan.expansion)]

    def _expected_acceptance(self, kind: str, greedy: bool) -> NDArray[np.float64]:
        """Estimate α at each depth, f64 [`MAX_WINDOW`]: own evidence, then all protocols', then
        `_HOPE`.
        """
        members = {one.family or name: one for name, one in EXCHANGES.items()}
        # only the lossless part is pooled
        scale = {name: _strict_agreement(one, greedy=greedy) for name, one in members.items()}
        reached, agreed = np.zeros(MAX_WINDOW), np.zeros(MAX_WINDOW)
        for (name, was_greedy), seen in self._acceptance.items():
            if was_greedy == greedy:
                reached += seen.reached
                agreed += seen.agreed / scale[name]
        hope = (_HOPE * _HOPE_WEIGHT + agreed.sum()) / (_HOPE_WEIGHT + reached.sum())
        pool = (_POOL_WEIGHT * hope + agreed) / (_POOL_WEIGHT + reached)
        own = self._acceptance[kind, greedy]
        expected = np.minimum(
            _MOST, pool * (scale[kind] if members[kind].lossless else members[kind].agreement)
        )
        found: NDArray[np.float64] = _POOL_WEIGHT * expected + own.accepted
        return found / (_POOL_WEIGHT + own.reached)

    def tokens(self, plan: Plan) -> float:
        """Estimate N, the tokens of a round: 1 + Σ_k Π_{i≤k} αᵢ (tslt (8), with an α a depth)."""
        return 1.0 + float(np.cumprod(self.hazards(plan)).sum())

    def computing_s(self, plan: Plan) -> float:
        """Estimate the seconds of a round off the link: draft, encode, queue, verify, settle."""
        name, expansion = plan.protocol, plan.expansion
        draft_s = self._drafting_s(plan, expansion) * self._drafting.factor(name)
        verify_s = self._verifying_s(expansion) * self._verifying.factor(name)
        around_s = self._around_s[name].median(0.0) + self._queue_s.median(0.0)
        return draft_s + verify_s + around_s

    def freight(self, plan: Plan) -> Freight:
        """Estimate the bytes of a round: the protocol's own estimate, corrected by past rounds."""
        up, down = self._expected_freight(plan, len(plan.expansion))
        name = plan.protocol
        return Freight(up * self._up[name].mean(1.0), down * self._down[name].mean(1.0))

    def exchanges(self, plan: Plan) -> float:
        """Estimate the round trips of a round, 1 to 2: the protocol's estimate, corrected."""
        again = self._expected_again(plan, len(plan.expansion))
        return 1.0 + min(1.0, again * self._again[plan.protocol].mean(1.0, _HOPE_WEIGHT))

    def streamed_pass_s(self) -> float:
        """Estimate the seconds from one token of `stream` to the next."""
        pass_s = self._verifying_s(()) * self._verifying.factor(STREAM)
        return pass_s + self._between_s.median(0.0)

    def local_token_s(self) -> float:
        """Estimate the seconds of a token of `local`."""
        return self._paced(self._drafter_pace, 1) * self._drafting.factor(LOCAL)

    def _alpha(self, plan: Plan, window: int) -> float:
        """Return the mean α of a window of so many levels."""
        hazards = self.hazards(plan)[:window]
        return float(hazards.mean()) if len(hazards) else 0.0

    def _expected_freight(self, plan: Plan, window: int) -> Freight:
        assert plan.exchange is not None
        return plan.exchange.freight(
            plan.expansion[:window],
            plan.drafting.sampling,
            self._alpha(plan, window),
            self._sizes,
        )

    def _expected_again(self, plan: Plan, window: int) -> float:
        """Estimate the round trips of a round beyond the first."""
        assert plan.exchange is not None
        return plan.exchange.exchanges(plan.expansion[:window], self._alpha(plan, window)) - 1.0

    def _drafting_s(self, plan: Plan, expansion: Sequence[int]) -> float:
        """Sum the drafter's passes: one for each level, which reads the nodes of the level above.

        Includes one for the last level if the protocol reads it before sending the window.
        """
        last = plan.exchange is not None and plan.exchange.reads_last and len(expansion) > 0
        nodes, total = 1, 0.0
        for count in (*expansion, *[1] * last):
            total += self._paced(self._drafter_pace, nodes)
            nodes *= count
        return total

    def _verifying_s(self, expansion: Sequence[int]) -> float:
        """Return the seconds of the target's pass over a window."""
        return self._paced(self._target_pace, 1 + nodes_at_most(tuple(expansion)))

    @staticmethod
    def _paced(pace: Mapping[int, float], width: int) -> float:
        """Interpolate the seconds of a pass over so many tokens."""
        widths = list(pace)
        seconds = list(pace.values())
        if width <= widths[-1]:
            return float(np.interp(width, widths, seconds))
        return seconds[-1] * width / widths[-1]
