"""Estimate acceptance, computing times and bytes of a plan from past rounds.

In:  the rounds of each answer, and the pass times that both ends measured at start. Out: estimates
     for any plan, tried or not.

Acceptance is in `acceptance`, what the edge's own hints bring in `hints`, how long passes take in
`pace`, and how forecasts came true in `outcomes`. Under protocols that stream, a drafter's pass
counts as it is *while the target runs*: two ends that share a machine's memory slow each other
down.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.choice.acceptance import PRIOR_ACCEPTANCE, Acceptance
from pilotfish.device_runtime.choice.hints import EdgeHints, hint_source
from pilotfish.device_runtime.choice.pass_pace import (
    PassPace,
    RecentValues,
    median_of_parts,
    pass_s,
)
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Round
from pilotfish.speculation.tree import nodes_at_most
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols import LOCAL, STREAM
from pilotfish.wire.protocols.ahead import DEVICE, EDGE
from pilotfish.wire.protocols.protocol import PairSizes, RoundBytes

_PRIOR_ROUNDS = 4.0  # rounds, that a protocol's own estimate of its exchanges counts for
_ASSUMED_SLOWDOWN = 4.0
_MIN_RATIO, _MAX_RATIO = 0.5, 2.5  # bounds of one answer's ratio
_ON_TIME_ANSWERS = 2.0  # prior weight of a ratio of 1, in answers
_FULL_ANSWER = 16  # rounds of an answer with full weight; shorter ones weigh less
_FORECAST_FADE = 0.95  # per answer


class ForecastErrors:
    """Ratio of measured to forecast seconds per token under `ahead`, over the last answers.

    The cost model leaves out an edge that drops hints under load, jitter, hints that are gathered,
    and an edge drafter that contributes nothing. Plans with and without the device's drafts have
    a ratio each. Both fade towards 1 with every answer of any protocol, so that a plan that failed
    is tried again after a long time.
    """

    def __init__(self) -> None:
        # f64 [2], by whether the device drafts: answers, and the sum of their ratios
        self._ratios: dict[bool, NDArray[np.float64]] = defaultdict(lambda: np.zeros(2))

    def fade(self) -> None:
        """Note an answer."""
        for seen in self._ratios.values():
            seen *= _FORECAST_FADE

    def add(self, plan: Plan, rounds: int, token_s: float, expected_s: float) -> None:
        """Add seconds a token over so many rounds, and those that the model has for them."""
        if token_s > 0.0 and expected_s > 0.0:
            ratio = min(_MAX_RATIO, max(_MIN_RATIO, token_s / expected_s))
            self._ratios[hint_source(plan) != EDGE] += min(1.0, rounds / _FULL_ANSWER) * np.array(
                [1.0, ratio]
            )

    def factor(self, plan: Plan) -> float:
        """Return by how much a forecast of this plan is to be multiplied."""
        answers, ratios = self._ratios[hint_source(plan) != EDGE].tolist()
        return float((_ON_TIME_ANSWERS + ratios) / (_ON_TIME_ANSWERS + answers))


class Evidence:
    """Evidence on one device and one edge.

    drafter_pace, target_pace, beside_pace: seconds of a pass by the number of its tokens, measured
    at start; the target's may be missing, and so may the drafter's beside it. hope: α until there
    is evidence.
    """

    def __init__(
        self,
        drafter_pace: Mapping[int, float],
        target_pace: Mapping[int, float],
        sizes: PairSizes,
        edge_drafter_pace: Mapping[int, float] | None = None,
        prior: float = PRIOR_ACCEPTANCE,
    ) -> None:
        self._drafter_pace = drafter_pace
        # without times of the edge: slower than the drafter, and as fast for many tokens as for one
        slow_s = _ASSUMED_SLOWDOWN * drafter_pace[1]
        self._target_pace = dict(sorted(target_pace.items())) or {1: slow_s, MAX_WINDOW: slow_s}
        self._edge_drafter_pace = dict(sorted((edge_drafter_pace or {}).items()))
        self._sizes = sizes
        self._acceptance, self.edge_hints = Acceptance(prior), EdgeHints()
        self.forecast_errors = ForecastErrors()  # of forecasts
        self._drafting, self._verifying = PassPace(), PassPace()
        self._overhead_s: dict[str, RecentValues] = defaultdict(RecentValues)  # encode, settle
        self._queue_s, self._interval_s = RecentValues(), RecentValues()
        self._up_ratios: dict[str, RecentValues] = defaultdict(
            RecentValues
        )  # bytes, over expectation
        self._down_ratios: dict[str, RecentValues] = defaultdict(RecentValues)
        self._extra_trip_ratios: dict[str, RecentValues] = defaultdict(
            RecentValues
        )  # further exchanges, likewise

    # Observations

    def add(self, plan: Plan, rounds: Sequence[Round]) -> None:
        """Add the rounds of an answer, complete or not."""
        self._acceptance.add(plan, rounds)
        self.edge_hints.add(plan, rounds)
        self.forecast_errors.fade()
        steady = rounds[1:]  # the first one waits for the prompt to be read
        if plan.streams:
            self._add_stream(plan, steady)
        else:
            self._add_rounds(plan, steady)
        self._fade(plan)

    def _fade(self, plan: Plan) -> None:
        """Let times get older that an answer under this plan tells nothing of."""
        in_rounds = plan.exchange is not None and not plan.streams
        for name, around_s in self._overhead_s.items():
            if not in_rounds or name != plan.protocol:
                around_s.fade()
        if not in_rounds:
            self._queue_s.fade()
        if not plan.streams:
            self._interval_s.fade()

    def _add_stream(self, plan: Plan, rounds: Sequence[Round]) -> None:
        """Add the times of a stream's passes, and of the drafts made meanwhile."""
        name = self.pace_protocol(plan)
        drafted_s = pass_s(self._drafter_pace, 1)
        drafting = [one.timings.draft / (one.nodes * drafted_s) for one in rounds if one.nodes]
        self._drafting.add(name, drafting)
        self._verifying.add(
            name,
            [one.pass_s / pass_s(self._target_pace, 1 + one.window) for one in rounds],
            with_edge_drafter=self._edge_may_draft(plan),
        )
        if rounds:  # tokens may come in bursts, so only the mean distance counts
            self._interval_s.append(max(0.0, median_of_parts(rounds, _mean_interval_s)))

    def _add_rounds(self, plan: Plan, rounds: Sequence[Round]) -> None:
        """Add the times and bytes of rounds in which one end waits for the other."""
        name = plan.protocol
        drafting, verifying = [], []
        for one in rounds:
            levels = plan.expansion[: one.window] or (1,) * (name == LOCAL)
            if levels:
                drafting.append(one.timings.draft / self._drafting_s(plan, levels))
            # of a tree by the nodes that it might have had, as in `computing_s`
            verifying.append(one.pass_s / self._verifying_s(levels))
        self._drafting.add(name, drafting)
        if plan.exchange is None:
            self._verifying.fade()
            return
        self._verifying.add(name, verifying)
        for one in rounds:
            self._overhead_s[name].append(one.timings.encode + one.timings.settle)
            self._queue_s.append(one.timings.queue)
            expected = self._expected_bytes(plan, one.window)
            self._up_ratios[name].append(one.uplink_bytes / expected.up)
            self._down_ratios[name].append(one.downlink_bytes / expected.down)
            if (again := self._expected_extra_trips(plan, one.window)) > 0.0:
                self._extra_trip_ratios[name].append((one.exchanges - 1) / again)

    # Estimates

    def acceptance_by_depth(self, plan: Plan) -> NDArray[np.float64]:
        """Estimate α at each depth of the plan's window, or of a run, given that it is reached.

        f64 [γ], or [`MAX_WINDOW`] where there are no windows.
        """
        found = self._acceptance.acceptance_by_depth(plan)
        return found if plan.streams else found[: len(plan.expansion)]

    def tokens(self, plan: Plan) -> float:
        """Estimate N, the tokens of a round: 1 + Σ_k Π_{i≤k} αᵢ (tslt (8), with an α a depth)."""
        return 1.0 + float(np.cumprod(self.acceptance_by_depth(plan)).sum())

    def computing_s(self, plan: Plan) -> float:
        """Estimate the seconds of a round off the link: draft, encode, queue, verify, settle."""
        name, expansion = plan.protocol, plan.expansion
        draft_s = self._drafting_s(plan, expansion) * self._drafting.factor(name)
        around_s = self._overhead_s[name].median(0.0) + self._queue_s.median(0.0)
        return draft_s + self.verifying_s(plan) + around_s

    def round_bytes(self, plan: Plan) -> RoundBytes:
        """Estimate the bytes of a round: the protocol's own estimate, corrected by past rounds."""
        up, down = self._expected_bytes(plan, len(plan.expansion))
        name = plan.protocol
        return RoundBytes(
            up * self._up_ratios[name].mean(1.0), down * self._down_ratios[name].mean(1.0)
        )

    def round_trips(self, plan: Plan) -> float:
        """Estimate the round trips of a round, 1 to 2: the protocol's estimate, corrected."""
        again = self._expected_extra_trips(plan, len(plan.expansion))
        return 1.0 + min(
            1.0, again * self._extra_trip_ratios[plan.protocol].mean(1.0, _PRIOR_ROUNDS)
        )

    def verifying_s(self, plan: Plan) -> float:
        """Estimate the seconds of the target's pass over a window of this plan."""
        return self._verifying_s(plan.expansion) * self._verifying.factor(plan.protocol)

    def pace_protocol(self, plan: Plan) -> str:
        """Return the protocol whose passes are as fast as those of a plan that streams.

        An end that computes while the other does may be slower for it, if they share a machine;
        with the edge's hints alone the device is at rest, as under `stream`, and so is the edge but
        for its target, unless it has a drafter.
        """
        if hint_source(plan) != EDGE:
            return plan.protocol
        return f"{plan.protocol}, {EDGE}" if self._edge_may_draft(plan) else STREAM

    def _edge_may_draft(self, plan: Plan) -> bool:
        """Whether the edge may draft while its target runs."""
        return bool(self._edge_drafter_pace) and hint_source(plan) not in ("", DEVICE)

    def streaming_s(self, protocol: str, drafts: int = 0) -> float:
        """Estimate the same for a target that streams, of a pass with so many drafts in it."""
        return pass_s(self._target_pace, 1 + drafts) * self._verifying.factor(protocol)

    def pass_interval_s(self) -> float:
        """Estimate the seconds from such a pass to the next."""
        return self._interval_s.median(0.0)

    def hint_s(self, protocol: str) -> float:
        """Estimate the seconds in which the device drafts a token while the target runs."""
        return pass_s(self._drafter_pace, 1) * self._drafting.factor(protocol)

    def edge_drafter_token_s(self) -> float | None:
        """Return the seconds of a token of the edge's own drafter; None where it has none."""
        return pass_s(self._edge_drafter_pace, 1) if self._edge_drafter_pace else None

    def local_token_s(self) -> float:
        """Estimate the seconds of a token of `local`."""
        return pass_s(self._drafter_pace, 1) * self._drafting.factor(LOCAL)

    def _alpha(self, plan: Plan, window: int) -> float:
        """Return the mean α of a window of so many levels."""
        hazards = self.acceptance_by_depth(plan)[:window]
        return float(hazards.mean()) if len(hazards) else 0.0

    def _expected_bytes(self, plan: Plan, window: int) -> RoundBytes:
        assert plan.exchange is not None
        return plan.exchange.estimate_bytes(
            plan.expansion[:window],
            plan.drafting.sampling,
            self._alpha(plan, window),
            self._sizes,
        )

    def _expected_extra_trips(self, plan: Plan, window: int) -> float:
        """Estimate the round trips of a round beyond the first."""
        assert plan.exchange is not None
        return (
            plan.exchange.estimate_round_trips(plan.expansion[:window], self._alpha(plan, window))
            - 1.0
        )

    def _drafting_s(self, plan: Plan, expansion: Sequence[int]) -> float:
        """Sum the drafter's passes: one for each level, which reads the nodes of the level above.

        Includes one for the last level if the protocol reads it before sending the window.
        """
        last = plan.exchange is not None and plan.exchange.reads_last_token and len(expansion) > 0
        nodes, total = 1, 0.0
        for count in (*expansion, *[1] * last):
            total += pass_s(self._drafter_pace, nodes)
            nodes *= count
        return total

    def _verifying_s(self, expansion: Sequence[int]) -> float:
        """Return the seconds of the target's pass over a window."""
        return pass_s(self._target_pace, 1 + nodes_at_most(tuple(expansion)))


def _mean_interval_s(rounds: Sequence[Round]) -> float:
    return fmean(one.timings.total for one in rounds) - fmean(one.pass_s for one in rounds)
