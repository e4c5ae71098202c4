"""What a committed token costs under a plan: the device's wait for it, and the edge's time.

In:  a plan, the link as last measured, and the evidence. Out: seconds a token, by
     `speculation.latency` for what goes round by round and `speculation.ahead` for what does not.

Under `ahead` the target never waits, so all of its time is the edge's; in rounds it is idle while
the device drafts and messages travel.
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

_UNKNOWN_BPS = 1e6  # assumed rate before the first measurement
_UNKNOWN_RTT_S = 0.05
_STREAM_BYTES = 60.0  # down, of a token under `stream`
_HINT_BYTES = 46.0  # up, of a hint of one token
_TAIL = 512  # depths beyond the evidence, which go on as its last one


class PlanCosts(NamedTuple):
    """Of a committed token, in seconds. edge_s: that the target computes for it."""

    token_s: float
    edge_s: float


def plan_costs(plan: Plan, link: Link, evidence: Evidence) -> PlanCosts:
    """Predict what a committed token costs under this plan."""
    if hint_source(plan):
        return _corrected(plan, link, evidence)
    if plan.protocol == STREAM:
        return stream_costs(plan.max_tokens, link, evidence)
    if plan.exchange is None:
        return PlanCosts(evidence.local_token_s(), 0.0)
    tokens = evidence.tokens(plan)
    round_s = predicted_round_s(plan, link, evidence)
    return PlanCosts(round_s / tokens, evidence.verifying_s(plan) / tokens)


def predicted_round_s(plan: Plan, link: Link, evidence: Evidence) -> float:
    """Predict the seconds of a round under this plan, which drafts windows."""
    up, down = evidence.round_bytes(plan)
    exchanges = evidence.round_trips(plan)
    # an RTT is measured with small messages, so their own bytes are in it
    beyond = (
        max(0.0, up - exchanges * WINDOW_BYTES),
        max(0.0, down - exchanges * VERDICT_BYTES),
    )
    return evidence.computing_s(plan) + communication_s(*beyond, link, exchanges)


def with_defaults(state: LinkState) -> Link:
    """Fill the unmeasured values of the link with bad ones."""
    return Link(
        rtt_s=state.rtt.value if state.rtt else _UNKNOWN_RTT_S,
        up_bps=state.up.value if state.up else _UNKNOWN_BPS,
        down_bps=state.down.value if state.down else _UNKNOWN_BPS,
    )


def stream_costs(max_tokens: int, link: Link, evidence: Evidence) -> PlanCosts:
    """Predict for the target alone, and an answer of so many tokens."""
    return _alone(STREAM, max_tokens, link, evidence)


def _alone(protocol: str, max_tokens: int, link: Link, evidence: Evidence) -> PlanCosts:
    """Predict for the target alone, under `stream` or while there are no hints."""
    pass_s = evidence.streaming_s(protocol)
    token_s = streamed_token_s(pass_s + evidence.pass_interval_s(), _STREAM_BYTES, link, max_tokens)
    return PlanCosts(token_s, pass_s)


def add_forecast_error(plan: Plan, rounds: Sequence[Round], link: Link, evidence: Evidence) -> None:
    """Tell the evidence, which has these rounds of an answer, how far the model is off for them."""
    steady = rounds[1:]  # the first one waits for the prompt to be read
    if not hint_source(plan) or not steady:
        return
    token_s = median_of_parts(steady, _mean_token_s)
    expected_s = _hinted(plan, link, evidence).token_s - link.rtt_s / plan.max_tokens
    evidence.outcomes.add(plan, len(steady), token_s, expected_s)


def _mean_token_s(rounds: Sequence[Round]) -> float:
    return sum(one.timings.total for one in rounds) / sum(1 + one.accepted for one in rounds)


def _corrected(plan: Plan, link: Link, evidence: Evidence) -> PlanCosts:
    """Predict for a target that takes hints, by the model and by how it came true."""
    factor = evidence.outcomes.factor(plan)
    found = PlanCosts(*(factor * each for each in _hinted(plan, link, evidence)))
    # where the device is at rest, the target is as fast as alone at worst
    return min(found, _without(plan, link, evidence)) if hint_source(plan) == EDGE else found


def _without(plan: Plan, link: Link, evidence: Evidence) -> PlanCosts:
    """Predict for a target that takes hints, while there are none."""
    return _alone(evidence.pace_protocol(plan), plan.max_tokens, link, evidence)


def _hinted(plan: Plan, link: Link, evidence: Evidence) -> PlanCosts:
    """Predict for a target that takes hints: from the source that is best, where there are several.

    Repeats go with another source: what the text does not repeat is left to that.
    """
    sources = hint_source(plan)
    found = [_without(plan, link, evidence)]
    if sources in (ALL, DEVICE):
        drafted_s = max(evidence.hint_s(plan.protocol), transfer_s(_HINT_BYTES, link.up_bps))
        found.append(
            _drafted(
                plan, link, evidence, link.rtt_s, drafted_s, evidence.acceptance_by_depth(plan)
            )
        )
    beside_s = evidence.edge_drafter_token_s()
    if sources in (ALL, EDGE) and beside_s is not None:
        hazards = evidence.edge_hints.acceptance_by_depth(plan)
        found.append(_drafted(plan, link, evidence, 0.0, beside_s, hazards))
    best = min(found)
    return best if sources == DEVICE else min(best, _repeating(plan, link, evidence, best))


def _drafted(
    plan: Plan,
    link: Link,
    evidence: Evidence,
    rtt_s: float,
    draft_s: float,
    hazards: NDArray[np.float64],
) -> PlanCosts:
    """Predict for drafts that take so long, and so long to arrive; hazards: f64 [n]."""
    run = survival(np.append(hazards, np.full(_TAIL, hazards[-1])))
    between_s = evidence.pass_interval_s()
    passes = [
        evidence.streaming_s(evidence.pace_protocol(plan), drafts)
        for drafts in range(MOST_DRAFTS + 1)
    ]
    costs = token_costs(
        run,
        rtt_s=rtt_s,
        draft_s=draft_s,
        pass_s=[one + between_s for one in passes],
        most_ahead=draft_length(run),
        draft_cost=draft_cost(passes),
    )
    edge_s = costs.token_s - between_s * costs.passes
    # the tokens of a pass come in one message
    bytes_down = _STREAM_BYTES * costs.passes
    return PlanCosts(streamed_token_s(costs.token_s, bytes_down, link, plan.max_tokens), edge_s)


def _repeating(plan: Plan, link: Link, evidence: Evidence, otherwise: PlanCosts) -> PlanCosts:
    """Predict where repeats of the text are hints: their passes', and the others as otherwise."""
    share, tokens, positions = evidence.edge_hints.repeats(plan)
    pass_s = evidence.streaming_s(evidence.pace_protocol(plan), round(positions) - 1)
    bytes_down = _STREAM_BYTES / tokens
    token_s = streamed_token_s(
        (pass_s + evidence.pass_interval_s()) / tokens, bytes_down, link, plan.max_tokens
    )
    repeated = PlanCosts(token_s, pass_s / tokens)
    mixed = (share * a + (1 - share) * b for a, b in zip(repeated, otherwise, strict=True))
    return PlanCosts(*mixed)
