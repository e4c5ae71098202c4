"""Predict the cost of a committed token under a plan: total seconds, and the target's seconds.

In:  a plan, the last measured state of the link, and the evidence. Out: seconds per token. The
     model is `speculation.latency` for rounds, and `speculation.ahead` for streams.

Under `ahead` the target computes all the time. In rounds it is idle while the device drafts and
while messages travel.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.choice.evidence import Evidence
from pilotfish.device_runtime.choice.hints import ALL, hint_source
from pilotfish.device_runtime.choice.pass_pace import median_of_parts
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Round
from pilotfish.speculation.ahead import draft_cost, draft_length, survival, token_costs
from pilotfish.speculation.latency import Link, communication_s, streamed_token_s, transfer_s
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import STREAM
from pilotfish.wire.protocols.ahead import DEVICE, EDGE, MOST_DRAFTS
from pilotfish.wire.protocols.protocol import VERDICT_BYTES, WINDOW_BYTES

_UNKNOWN_BPS = 1e6  # rate (bit/s) assumed before the first measurement
_UNKNOWN_RTT_S = 0.05
_STREAM_BYTES = 60.0  # downlink bytes of a token under `stream`
_HINT_BYTES = 46.0  # uplink bytes of a hint of one token
_TAIL_DEPTHS = 512  # number of depths added beyond the evidence, with the α of its last depth


class PlanCosts(NamedTuple):
    """Seconds per committed token. edge_s: the target's computing time."""

    token_s: float
    edge_s: float


def plan_costs(plan: Plan, link: Link, evidence: Evidence) -> PlanCosts:
    """Predict the cost of a committed token under this plan."""
    if hint_source(plan):
        return _ahead_costs(plan, link, evidence)
    if plan.protocol == STREAM:
        return stream_costs(plan.max_tokens, link, evidence)
    if plan.exchange is None:
        return PlanCosts(evidence.local_token_s(), 0.0)
    tokens = evidence.tokens(plan)
    round_s = predicted_round_s(plan, link, evidence)
    return PlanCosts(round_s / tokens, evidence.verifying_s(plan) / tokens)


def predicted_round_s(plan: Plan, link: Link, evidence: Evidence) -> float:
    """Predict the seconds of a round under a plan that drafts windows."""
    up, down = evidence.round_bytes(plan)
    exchanges = evidence.round_trips(plan)
    # an RTT is measured with small messages, so it includes the time of their bytes
    extra_bytes = (
        max(0.0, up - exchanges * WINDOW_BYTES),
        max(0.0, down - exchanges * VERDICT_BYTES),
    )
    return evidence.computing_s(plan) + communication_s(*extra_bytes, link, exchanges)


def with_defaults(state: LinkState) -> Link:
    """Replace unmeasured values of the link by pessimistic ones."""
    return Link(
        rtt_s=state.rtt.value if state.rtt else _UNKNOWN_RTT_S,
        up_bps=state.up.value if state.up else _UNKNOWN_BPS,
        down_bps=state.down.value if state.down else _UNKNOWN_BPS,
    )


def stream_costs(max_tokens: int, link: Link, evidence: Evidence) -> PlanCosts:
    """Predict the cost of `stream` for an answer of ``max_tokens``."""
    return _target_alone_costs(STREAM, max_tokens, link, evidence)


def _target_alone_costs(
    protocol: str, max_tokens: int, link: Link, evidence: Evidence
) -> PlanCosts:
    """Predict the cost of tokens without drafts, as under `stream` or before a hint arrives."""
    pass_s = evidence.streaming_s(protocol)
    token_s = streamed_token_s(pass_s + evidence.pass_interval_s(), _STREAM_BYTES, link, max_tokens)
    return PlanCosts(token_s, pass_s)


def add_forecast_error(plan: Plan, rounds: Sequence[Round], link: Link, evidence: Evidence) -> None:
    """Compare an answer's seconds per token with the model's forecast, and record the error.

    The evidence must already include these rounds.
    """
    steady = rounds[1:]  # without the first round: the edge reads the prompt in it
    if not hint_source(plan) or not steady:
        return
    token_s = median_of_parts(steady, _mean_token_s)
    expected_s = _modelled_costs(plan, link, evidence).token_s - link.rtt_s / plan.max_tokens
    evidence.forecast_errors.add(plan, len(steady), token_s, expected_s)


def _mean_token_s(rounds: Sequence[Round]) -> float:
    return sum(round_.timings.total for round_ in rounds) / sum(
        1 + round_.accepted for round_ in rounds
    )


def _ahead_costs(plan: Plan, link: Link, evidence: Evidence) -> PlanCosts:
    """Predict the cost under `ahead`: the model's forecast, corrected by past forecast errors."""
    factor = evidence.forecast_errors.factor(plan)
    costs = PlanCosts(*(factor * cost for cost in _modelled_costs(plan, link, evidence)))
    # the cost with the edge's hints alone is at most that of the target alone
    return min(costs, _unhinted_costs(plan, link, evidence)) if hint_source(plan) == EDGE else costs


def _unhinted_costs(plan: Plan, link: Link, evidence: Evidence) -> PlanCosts:
    """Predict the cost under `ahead` while no hint arrives."""
    return _target_alone_costs(evidence.pace_protocol(plan), plan.max_tokens, link, evidence)


def _modelled_costs(plan: Plan, link: Link, evidence: Evidence) -> PlanCosts:
    """Predict the cost under `ahead` by the model, with the best of the plan's hint sources.

    Repeats of the text are combined with the best source: it drafts where the text repeats nothing.
    """
    sources = hint_source(plan)
    candidates = [_unhinted_costs(plan, link, evidence)]
    if sources in (ALL, DEVICE):
        drafted_s = max(evidence.hint_s(plan.protocol), transfer_s(_HINT_BYTES, link.up_bps))
        candidates.append(
            _draft_costs(
                plan, link, evidence, link.rtt_s, drafted_s, evidence.acceptance_by_depth(plan)
            )
        )
    edge_token_s = evidence.edge_drafter_token_s()
    if sources in (ALL, EDGE) and edge_token_s is not None:
        by_depth = evidence.edge_hints.acceptance_by_depth(plan)
        candidates.append(_draft_costs(plan, link, evidence, 0.0, edge_token_s, by_depth))
    best = min(candidates)
    return best if sources == DEVICE else min(best, _repeat_costs(plan, link, evidence, best))


def _draft_costs(
    plan: Plan,
    link: Link,
    evidence: Evidence,
    rtt_s: float,
    draft_s: float,
    by_depth: NDArray[np.float64],
) -> PlanCosts:
    """Predict the cost with drafts that take ``draft_s`` each and arrive after ``rtt_s``.

    by_depth: α at each depth, f64 [n].
    """
    run = survival(np.append(by_depth, np.full(_TAIL_DEPTHS, by_depth[-1])))
    interval_s = evidence.pass_interval_s()
    passes = [
        evidence.streaming_s(evidence.pace_protocol(plan), drafts)
        for drafts in range(MOST_DRAFTS + 1)
    ]
    costs = token_costs(
        run,
        rtt_s=rtt_s,
        draft_s=draft_s,
        pass_s=[pass_s + interval_s for pass_s in passes],
        most_ahead=draft_length(run),
        draft_cost=draft_cost(passes),
    )
    edge_s = costs.token_s - interval_s * costs.passes
    # one message carries all tokens of a pass
    bytes_down = _STREAM_BYTES * costs.passes
    return PlanCosts(streamed_token_s(costs.token_s, bytes_down, link, plan.max_tokens), edge_s)


def _repeat_costs(plan: Plan, link: Link, evidence: Evidence, other_costs: PlanCosts) -> PlanCosts:
    """Predict the cost with repeats of the text as hints; other passes cost ``other_costs``."""
    share, tokens, positions = evidence.edge_hints.repeats(plan)
    pass_s = evidence.streaming_s(evidence.pace_protocol(plan), round(positions) - 1)
    bytes_down = _STREAM_BYTES / tokens
    token_s = streamed_token_s(
        (pass_s + evidence.pass_interval_s()) / tokens, bytes_down, link, plan.max_tokens
    )
    repeated = PlanCosts(token_s, pass_s / tokens)
    mixed = (share * a + (1 - share) * b for a, b in zip(repeated, other_costs, strict=True))
    return PlanCosts(*mixed)
