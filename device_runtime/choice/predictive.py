"""predictive: the plan with the least predicted time per committed token.

T/N by `speculation.latency`, with the link as last measured and the `evidence` on acceptance,
computing times and bytes. A rate that was never measured counts as slow. The last choice is kept
until another plan is clearly better, so that noise does not flip it back and forth; between equal
plans the protocol registered first is taken.
"""

from collections.abc import Sequence

from pilotfish.device_runtime.choice.evidence import Evidence
from pilotfish.device_runtime.choice.policy import Policy, link_in_words
from pilotfish.device_runtime.plan import Auto, Plan
from pilotfish.device_runtime.record import Choice, Forecast
from pilotfish.speculation.latency import Link, communication_s, streamed_token_s
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import STREAM
from pilotfish.wire.protocols.exchange import VERDICT_BYTES, WINDOW_BYTES

_CLEARLY = 0.95  # of the held plan's time: below that another one is chosen
_UNKNOWN_BPS = 1e6  # assumed rate before the first measurement
_UNKNOWN_RTT_S = 0.05
_KINDS = 64  # kinds of requests, each with its last choice
_STREAM_BYTES = 60.0  # down, of a token under `stream`


class Predictive(Policy):
    """Keeps a choice for each kind of request, that is, for each set of plans."""

    name = "predictive"

    def __init__(self) -> None:
        self._held: dict[tuple[tuple[str, int], ...], tuple[str, int]] = {}

    def choose(
        self, auto: Auto, plans: Sequence[Plan], link: LinkState, evidence: Evidence
    ) -> tuple[Plan, Choice]:
        """Choose the cheapest plan, or the last choice if that is hardly dearer."""
        known = link_known(link)
        costs = [predicted_token_s(plan, known, evidence) for plan in plans]
        order = sorted(range(len(plans)), key=costs.__getitem__)
        kind = tuple(_named(plan) for plan in plans)
        best = order[0]
        held = self._held.pop(kind, None)
        if held is not None and costs[best] > _CLEARLY * costs[kind.index(held)]:
            best = kind.index(held)
        self._held[kind] = kind[best]  # the newest is last
        if len(self._held) > _KINDS:
            del self._held[next(iter(self._held))]
        forecasts = [Forecast(*kind[at], costs[at]) for at in order]
        reason = _reason(forecasts, kind[best], costs[best], link)
        protocol, window = kind[best]
        return plans[best], Choice(
            policy=self.name,
            protocol=protocol,
            window=window,
            token_s=costs[best],
            reason=reason,
            forecasts=forecasts,
        )


def predicted_token_s(plan: Plan, link: Link, evidence: Evidence) -> float:
    """Predict the seconds a committed token under this plan."""
    if plan.protocol == STREAM:
        return streamed_token_s(evidence.streamed_pass_s(), _STREAM_BYTES, link, plan.max_tokens)
    if plan.exchange is None:
        return evidence.local_token_s()
    return predicted_round_s(plan, link, evidence) / evidence.tokens(plan)


def predicted_round_s(plan: Plan, link: Link, evidence: Evidence) -> float:
    """Predict the seconds of a round under this plan, which drafts."""
    up, down = evidence.freight(plan)
    exchanges = evidence.exchanges(plan)
    # an RTT is measured with small messages, so their own bytes are in it
    beyond = (
        max(0.0, up - exchanges * WINDOW_BYTES),
        max(0.0, down - exchanges * VERDICT_BYTES),
    )
    return evidence.computing_s(plan) + communication_s(*beyond, link, exchanges)


def link_known(state: LinkState) -> Link:
    """Fill the unmeasured values of the link with bad ones."""
    return Link(
        rtt_s=state.rtt.value if state.rtt else _UNKNOWN_RTT_S,
        up_bps=state.up.value if state.up else _UNKNOWN_BPS,
        down_bps=state.down.value if state.down else _UNKNOWN_BPS,
    )


def _named(plan: Plan) -> tuple[str, int]:
    return plan.protocol, len(plan.expansion)


def _reason(
    forecasts: Sequence[Forecast], chosen: tuple[str, int], token_s: float, link: LinkState
) -> str:
    """Describe the choice in one line, with the best plan of each other protocol."""
    best: dict[str, Forecast] = {}
    for forecast in forecasts:
        best.setdefault(forecast.protocol, forecast)
    others = [
        f"{in_words(other.protocol, other.window)} {other.token_s * 1e3:.1f}"
        for name, other in best.items()
        if name != chosen[0]
    ]
    against = f" (against {', '.join(others)})" if others else ""
    return (
        f"{in_words(*chosen)} at {token_s * 1e3:.1f} ms a token predicted{against}; "
        f"{link_in_words(link)}"
    )


def in_words(protocol: str, window: int) -> str:
    """Name a protocol and its window, if it has one."""
    return f"{protocol}, window {window}" if window else protocol
