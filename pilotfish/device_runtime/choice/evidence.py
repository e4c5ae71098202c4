"""Estimate acceptance, computing times and bytes of a plan from past rounds.

In:  the rounds of each answer, and the pass times that both ends measured at the start. Out:
     estimates for any plan, even before it is tried.

`window_acceptance` estimates α, `hints` the gain from the edge's hints, and `pass_pace` the pass
times.
Under protocols that stream, the drafter's passes are timed *while the target runs*: two ends on one
machine share its memory and slow each other down.

A drafter with a mask token makes fewer drafts per pass where the target leaves time for better ones
(`speculation.pass_drafts`). So its time for a draft says little about the machine, and is kept for
each protocol by itself.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.choice.hints import EdgeHints, hint_source
from pilotfish.device_runtime.choice.pass_pace import (
    PassPace,
    PassTimes,
    RecentValues,
    median_of_parts,
)
from pilotfish.device_runtime.choice.top_k import RatiosByTopK
from pilotfish.device_runtime.choice.window_acceptance import WindowAcceptance
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Round
from pilotfish.speculation.acceptance import PRIOR_ACCEPTANCE
from pilotfish.speculation.tree import nodes_at_most
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols import LOCAL, STREAM
from pilotfish.wire.protocols.ahead import DEVICE, EDGE
from pilotfish.wire.protocols.protocol import PairSizes, RoundBytes

_PRIOR_ROUNDS = 4.0  # weight, in rounds, of a protocol's own estimate of its round trips
_ASSUMED_SLOWDOWN = 4.0  # assumed ratio of a target pass's seconds to a drafter pass's, if unknown
_MIN_RATIO, _MAX_RATIO = 0.5, 2.5  # bounds of the ratio measured/forecast of one answer
_ON_TIME_ANSWERS = 2.0  # weight, in answers, of the prior ratio 1
_FULL_ANSWER = 16  # minimum number of rounds with which an answer has full weight
_FORECAST_FADE = 0.95  # factor by which the weight of the ratios shrinks with each answer


class ForecastErrors:
    """Ratio of measured to forecast seconds per token under `ahead`, over the last answers.

    The cost model ignores that an edge may drop hints under load, that delays vary, that hints are
    collected before they are sent, and that an edge's drafter may contribute nothing. Plans with
    the device's drafts have one ratio, and plans without the device's drafts another. With every
    answer, of any protocol, both ratios fade towards 1, so that a plan that failed is tried again
    after a long time.
    """

    def __init__(self) -> None:
        # whether the device drafts → f64 [2]: weighted number of answers, and sum of their ratios
        self._ratios: dict[bool, NDArray[np.float64]] = defaultdict(lambda: np.zeros(2))

    def fade(self) -> None:
        """Reduce the weight of the ratios, once per answer."""
        for ratios in self._ratios.values():
            ratios *= _FORECAST_FADE

    def add(self, plan: Plan, rounds: int, token_s: float, expected_s: float) -> None:
        """Add an answer's measured seconds per token over ``rounds``, and the model's forecast."""
        if token_s > 0.0 and expected_s > 0.0:
            ratio = min(_MAX_RATIO, max(_MIN_RATIO, token_s / expected_s))
            self._ratios[hint_source(plan) != EDGE] += min(1.0, rounds / _FULL_ANSWER) * np.array(
                [1.0, ratio]
            )

    def factor(self, plan: Plan) -> float:
        """Return the factor that corrects a forecast of this plan."""
        answers, ratios = self._ratios[hint_source(plan) != EDGE].tolist()
        return float((_ON_TIME_ANSWERS + ratios) / (_ON_TIME_ANSWERS + answers))


class Evidence:
    """Evidence on one device and one edge.

    drafter_pass_times, target_pass_times, edge_drafter_pass_times: seconds of a pass by number of
    tokens, measured at the start; the edge's may be empty. prior: α before any evidence.
    drafts_per_pass: maximum number of tokens of a chain that a pass of the drafter predicts.
    """

    def __init__(
        self,
        drafter_pass_times: Mapping[int, float],
        target_pass_times: Mapping[int, float],
        sizes: PairSizes,
        edge_drafter_pass_times: Mapping[int, float] | None = None,
        prior: float = PRIOR_ACCEPTANCE,
        drafts_per_pass: int = 1,
    ) -> None:
        self._drafter_pass_s, self._drafts_per_pass = PassTimes(drafter_pass_times), drafts_per_pass
        # without times of the edge, assume a slow target whose passes all take the same time
        slow_s = _ASSUMED_SLOWDOWN * drafter_pass_times[1]
        self._target_pass_s = PassTimes(
            dict(sorted(target_pass_times.items())) or {1: slow_s, MAX_WINDOW: slow_s}
        )
        self._edge_drafter_pass_s = PassTimes(dict(sorted((edge_drafter_pass_times or {}).items())))
        self._sizes = sizes
        self._acceptance = WindowAcceptance(prior, sizes.vocabulary)
        self.edge_hints = EdgeHints()
        self.forecast_errors = ForecastErrors()
        self._drafting, self._verifying = PassPace(), PassPace()
        # protocol → ratio of measured to estimated drafting time of a drafter with a mask token
        self._masked_ratios: dict[str, RecentValues] = defaultdict(RecentValues)
        self._overhead_s: dict[str, RecentValues] = defaultdict(RecentValues)  # encode + settle
        self._queue_s, self._interval_s = RecentValues(), RecentValues()
        self._overheads_s: dict[str, float] = {}  # cached seconds of a round besides both passes
        # cached ratios of measured to estimated bytes, by protocol and K
        self._byte_ratios: dict[tuple[str, int], RoundBytes] = {}
        # ratios of measured to estimated bytes up, by protocol and K; by protocol: ratios of
        # measured to estimated bytes down, and of measured to estimated round trips after the first
        self._up_ratios = RatiosByTopK()
        self._down_ratios: dict[str, RecentValues] = defaultdict(RecentValues)
        self._extra_trip_ratios: dict[str, RecentValues] = defaultdict(RecentValues)

    # Observations

    def add(self, plan: Plan, rounds: Sequence[Round]) -> None:
        """Add the rounds of an answer, complete or not."""
        self._overheads_s.clear()
        self._byte_ratios.clear()
        self._acceptance.add(plan, rounds)
        self.edge_hints.add(plan, rounds)
        self.forecast_errors.fade()
        steady = rounds[1:]  # the first round includes the reading of the prompt
        if plan.streams:
            self._add_stream(plan, steady)
        else:
            self._add_rounds(plan, steady)
        self._fade(plan)

    def _fade(self, plan: Plan) -> None:
        """Reduce the weight of the times that an answer under this plan does not measure."""
        in_rounds = plan.exchange is not None and not plan.streams
        for name, overhead_s in self._overhead_s.items():
            if not in_rounds or name != plan.protocol:
                overhead_s.fade()
        for name, ratios in self._masked_ratios.items():
            if name != plan.protocol:
                ratios.fade()
        if not in_rounds:
            self._queue_s.fade()
        if not plan.streams:
            self._interval_s.fade()

    def _add_stream(self, plan: Plan, rounds: Sequence[Round]) -> None:
        """Add the times of a stream's passes, and of the drafting during them."""
        name = self.pace_protocol(plan)
        drafted_s = self._draft_s
        drafting = [
            round_.timings.draft / (round_.nodes * drafted_s) for round_ in rounds if round_.nodes
        ]
        self._add_drafting(plan, name, drafting)
        self._verifying.add(
            name,
            [round_.pass_s / self._target_pass_s[1 + round_.window] for round_ in rounds],
            with_edge_drafter=self._edge_may_draft(plan),
        )
        if rounds:  # tokens may come in bursts, so only mean intervals count
            self._interval_s.append(max(0.0, median_of_parts(rounds, _mean_interval_s)))

    def _add_rounds(self, plan: Plan, rounds: Sequence[Round]) -> None:
        """Add the times and bytes of rounds in which one end waits for the other."""
        name = plan.protocol
        drafting, verifying = [], []
        for round_ in rounds:
            levels = plan.expansion[: round_.window] or (1,) * (name == LOCAL)
            if levels:
                drafting.append(round_.timings.draft / self._drafting_s(plan, levels))
            # assume the largest tree of the expansion, as in `computing_s`
            verifying.append(round_.pass_s / self._verifying_s(levels))
        self._add_drafting(plan, name, drafting)
        if plan.exchange is None:
            self._verifying.fade()
            return
        self._verifying.add(name, verifying)
        for round_ in rounds:
            self._overhead_s[name].append(round_.timings.encode + round_.timings.settle)
            self._queue_s.append(round_.timings.queue)
            expected = self._expected_bytes(plan, round_.window)
            self._up_ratios.of(name, plan.top_k).append(round_.uplink_bytes / expected.up)
            self._down_ratios[name].append(round_.downlink_bytes / expected.down)
            if (extra_trips := self._expected_extra_trips(plan, round_.window)) > 0.0:
                self._extra_trip_ratios[name].append((round_.exchanges - 1) / extra_trips)

    def _add_drafting(self, plan: Plan, name: str, ratios: Sequence[float]) -> None:
        """Add the ratios of measured to estimated drafting time of an answer's rounds."""
        if self._drafts_per_pass > 1 and plan.exchange is not None:
            self._masked_ratios[plan.protocol].extend(each for each in ratios if each > 0.0)
            self._drafting.fade()
        else:
            self._drafting.add(name, ratios)

    def _drafting_factor(self, protocol: str) -> float:
        """Return the factor that corrects an estimated drafting time."""
        if self._drafts_per_pass > 1:
            return self._masked_ratios[protocol].median(1.0)
        return self._drafting.factor(protocol)

    # Estimates

    def acceptance_by_depth(self, plan: Plan) -> NDArray[np.float64]:
        """Estimate α at each depth, for drafts that reach this depth.

        f64 [γ] for a plan with windows of γ levels; f64 [`MAX_WINDOW`] for a stream.
        """
        return np.array(self._acceptance.by_depth(plan))

    def tokens(self, plan: Plan) -> float:
        """Estimate N, a round's tokens: 1 + Σ_k Π_{i≤k} αᵢ (tslt, equation 8; an α per depth)."""
        tokens = path = 1.0
        for alpha in self._acceptance.by_depth(plan):
            path *= alpha
            tokens += path
        return tokens

    def computing_s(self, plan: Plan) -> float:
        """Estimate a round's seconds without the link: draft, encode, queue, verify, settle."""
        name, expansion = plan.protocol, plan.expansion
        draft_s = self._drafting_s(plan, expansion) * self._drafting_factor(name)
        if name not in self._overheads_s:
            overhead_s = self._overhead_s[name].median(0.0) + self._queue_s.median(0.0)
            self._overheads_s[name] = overhead_s
        return draft_s + self.verifying_s(plan) + self._overheads_s[name]

    def round_bytes(self, plan: Plan) -> RoundBytes:
        """Estimate the bytes of a round: the protocol's own estimate, corrected by past rounds."""
        up, down = self._expected_bytes(plan, len(plan.expansion))
        name = plan.protocol
        key = name, plan.top_k
        if key not in self._byte_ratios:
            down_ratio = self._down_ratios[name].mean(1.0)
            self._byte_ratios[key] = RoundBytes(self._up_ratios.mean(*key), down_ratio)
        ratios = self._byte_ratios[key]
        return RoundBytes(up * ratios.up, down * ratios.down)

    def round_trips(self, plan: Plan) -> float:
        """Estimate a round's round trips, 1 to 2: the protocol's own estimate, corrected."""
        if plan.exchange is None or not plan.exchange.requests_states:
            return 1.0
        extra_trips = self._expected_extra_trips(plan, len(plan.expansion))
        return 1.0 + min(
            1.0, extra_trips * self._extra_trip_ratios[plan.protocol].mean(1.0, _PRIOR_ROUNDS)
        )

    def verifying_s(self, plan: Plan) -> float:
        """Estimate the seconds of the target's pass over a window of this plan."""
        return self._verifying_s(plan.expansion) * self._verifying.factor(plan.protocol)

    def pace_protocol(self, plan: Plan) -> str:
        """Return the name under which the pass times of a streaming plan are kept.

        Ends that compute at the same time on one machine slow each other down, so each combination
        of ends has its own pace. If only the edge gives hints, the device is idle. Then passes are
        as fast as under `stream`, unless the edge has a drafter.
        """
        if hint_source(plan) != EDGE:
            return plan.protocol
        return f"{plan.protocol}, {EDGE}" if self._edge_may_draft(plan) else STREAM

    def _edge_may_draft(self, plan: Plan) -> bool:
        """Whether the edge may draft while its target runs."""
        return bool(self._edge_drafter_pass_s) and hint_source(plan) not in ("", DEVICE)

    def streaming_s(self, protocol: str, drafts: int = 0) -> float:
        """Estimate the seconds of a streaming target's pass with this number of drafts."""
        return self._target_pass_s[1 + drafts] * self._verifying.factor(protocol)

    def pass_interval_s(self) -> float:
        """Estimate the seconds between two passes of a streaming target."""
        return self._interval_s.median(0.0)

    def hint_s(self, protocol: str) -> float:
        """Estimate the device's seconds per drafted token while the target runs."""
        return self._draft_s * self._drafting_factor(protocol)

    @property
    def _draft_s(self) -> float:
        """Seconds per draft of a chain, if each pass makes as many drafts as it can."""
        most = self._drafts_per_pass
        return self._drafter_pass_s[most] / most

    def edge_drafter_token_s(self) -> float | None:
        """Return the edge drafter's seconds per token; None if the edge has no drafter."""
        return self._edge_drafter_pass_s[1] if self._edge_drafter_pass_s else None

    def local_token_s(self) -> float:
        """Estimate the seconds per token under `local`."""
        return self._drafter_pass_s[1] * self._drafting.factor(LOCAL)

    def _alpha(self, plan: Plan, window: int) -> float:
        """Return the mean α of a window of ``window`` levels."""
        by_depth = self._acceptance.by_depth(plan)[:window]
        return sum(by_depth) / len(by_depth) if by_depth else 0.0

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
        """Return the seconds of the drafter's passes over a window.

        Each pass reads the nodes of one level and predicts the next level. Some protocols also read
        the last level before the window is sent. Windows take fewer passes if the drafter has a
        mask token: a pass then reads the drafts of the last one, and masks; protocols that judge by
        hidden states read the whole window in one more pass.
        """
        most = self._drafts_per_pass
        last = plan.exchange is not None and plan.exchange.reads_last_token and len(expansion) > 0
        if most > 1 and plan.exchange and ({*expansion} == {1} or 0 < len(expansion) <= most):
            total, unread = 0.0, 1
            for done in range(0, len(expansion), most):
                drafts = min(most, len(expansion) - done)
                total += self._drafter_pass_s[unread + drafts - 1]
                unread = drafts
            return total + last * self._drafter_pass_s[len(expansion)]
        nodes, total = 1, 0.0
        for count in (*expansion, *[1] * last):
            total += self._drafter_pass_s[nodes]
            nodes *= count
        return total

    def _verifying_s(self, expansion: Sequence[int]) -> float:
        """Return the seconds of the target's pass over a window."""
        return self._target_pass_s[1 + nodes_at_most(tuple(expansion))]


def _mean_interval_s(rounds: Sequence[Round]) -> float:
    return fmean(round_.timings.total for round_ in rounds) - fmean(
        round_.pass_s for round_ in rounds
    )
