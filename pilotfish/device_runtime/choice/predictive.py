"""predictive: choose the plan with the least predicted time per committed token.

`costs` computes the time T of a round over its tokens N, from the last measured state of the link
and the `evidence` on acceptance, computing times and bytes. A rate that was never measured counts
as slow. A plan replaces the last choice only if it is clearly better: noise should not flip the
choice. Before the first choice, the best plan without drafting on the device counts as the last
choice. Later, this plan also wins if the chosen plan is not better. Among equal plans the first
wins.

Where the request leaves K free, the cheapest plan of each protocol is compared at other K
(`top_k`). Another K, too, must be clearly better.

With ``thrift``, the policy chooses the plan with the least edge time per token, among the plans
that are predicted to be as fast as `stream` or faster.
"""

import math
from collections.abc import Sequence

from pilotfish.device_runtime.choice.costs import PlanCosts, plan_costs, stream_costs, with_defaults
from pilotfish.device_runtime.choice.evidence import Evidence
from pilotfish.device_runtime.choice.hints import ALL, hint_source
from pilotfish.device_runtime.choice.policy import Policy, describe_link
from pilotfish.device_runtime.choice.top_k import TOP_KS
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Choice, Forecast
from pilotfish.speculation.latency import Link
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import STREAM
from pilotfish.wire.protocols.ahead import EDGE
from pilotfish.wire.request import AutoOptions

_SWITCH_BELOW = 0.95  # another plan must take less than this share of the last choice's time
_OTHER_K_BELOW = 0.98  # another K must take less than this share of the last K's time
_MAX_KINDS = 64  # maximum number of plan sets for which the last choice is kept
_PlanName = tuple[str, int, str]  # protocol, window, source of hints


class PredictivePolicy(Policy):
    """Remembers the last choice for each set of plans."""

    name = "predictive"

    def __init__(self) -> None:
        self._last_choices: dict[tuple[bool, tuple[_PlanName, ...]], _PlanName] = {}
        self._last_top_ks: dict[str, int] = {}  # by protocol

    def choose(
        self, auto: AutoOptions, plans: Sequence[Plan], link: LinkState, evidence: Evidence
    ) -> tuple[Plan, Choice]:
        """Choose the cheapest plan, or the last choice if it costs hardly more."""
        known = with_defaults(link)
        plans = [self._with_last_top_k(plan) for plan in plans]
        costs = [plan_costs(plan, known, evidence) for plan in plans]
        self._choose_top_ks(plans, costs, known, evidence)
        names = tuple(_plan_name(plan) for plan in plans)
        kind = auto.thrift, names
        last_choice = self._last_choices.pop(kind, None)
        cheapest_idle = _cheapest_without_drafting(plans, costs)
        default = cheapest_idle if last_choice is None else names.index(last_choice)
        limit_s = stream_costs(plans[0].max_tokens, known, evidence).token_s
        prices = _prices(costs, default, limit_s if auto.thrift else None)
        best = min(range(len(plans)), key=prices.__getitem__)
        if default is not None and prices[best] > _SWITCH_BELOW * prices[default]:
            best = default
        if cheapest_idle is not None and prices[cheapest_idle] <= prices[best]:
            best = cheapest_idle  # drafting would gain nothing
        self._last_choices[kind] = names[best]  # the newest comes last
        if len(self._last_choices) > _MAX_KINDS:
            del self._last_choices[next(iter(self._last_choices))]
        top_ks = [plan.top_k for plan in plans]
        return plans[best], _describe_choice(names, top_ks, costs, best, link, thrift=auto.thrift)

    def _with_last_top_k(self, plan: Plan) -> Plan:
        """Return the plan with the last K of its protocol, if K is free."""
        top_k = self._last_top_ks.get(plan.protocol)
        return plan.with_top_k(top_k) if top_k and plan.has_free_top_k else plan

    def _choose_top_ks(
        self, plans: list[Plan], costs: list[PlanCosts], link: Link, evidence: Evidence
    ) -> None:
        """Replace plans with a free K, and their costs, where another K is clearly better.

        Each protocol keeps one K: that of its cheapest plan.
        """
        free = [at for at, plan in enumerate(plans) if plan.has_free_top_k and plan.expansion]
        for protocol in dict.fromkeys(plans[at].protocol for at in free):
            same_protocol = [at for at in free if plans[at].protocol == protocol]
            cheapest = min(same_protocol, key=costs.__getitem__)
            last = top_k = plans[cheapest].top_k
            least_s = costs[cheapest].token_s * _OTHER_K_BELOW
            for other in TOP_KS:
                if other != last:
                    variant = plans[cheapest].with_top_k(other)
                    token_s = plan_costs(variant, link, evidence).token_s
                    if token_s < least_s:
                        top_k, least_s = other, token_s
            if top_k != last:
                self._last_top_ks[protocol] = top_k
                for at in same_protocol:
                    plans[at] = plans[at].with_top_k(top_k)
                    costs[at] = plan_costs(plans[at], link, evidence)


def _cheapest_without_drafting(plans: Sequence[Plan], costs: Sequence[PlanCosts]) -> int | None:
    """Return the index of the cheapest plan without drafting on the device, or None."""
    candidates = [
        at for at, plan in enumerate(plans) if plan.protocol == STREAM or hint_source(plan) == EDGE
    ]
    return min(candidates, key=costs.__getitem__, default=None)


def _prices(
    costs: Sequence[PlanCosts], default: int | None, limit_s: float | None
) -> Sequence[float]:
    """Return the seconds to minimise: per token or, under a limit, of the edge per token.

    limit_s: upper limit of the seconds per token; the last choice may exceed it by a small margin.
    If all plans exceed the limit, the limit is ignored.
    """
    token_s = [cost.token_s for cost in costs]
    if limit_s is None or min(token_s) > limit_s:
        return token_s
    return [
        cost.edge_s
        if cost.token_s * (_SWITCH_BELOW if at == default else 1.0) <= limit_s
        else math.inf
        for at, cost in enumerate(costs)
    ]


def _plan_name(plan: Plan) -> _PlanName:
    return plan.protocol, len(plan.expansion), hint_source(plan)


def _describe_choice(
    names: Sequence[_PlanName],
    top_ks: Sequence[int],
    costs: Sequence[PlanCosts],
    at: int,
    link: LinkState,
    *,
    thrift: bool,
) -> Choice:
    """Return the choice with all forecasts, the cheapest first."""
    forecasts = [
        Forecast(protocol, window, *cost, hints, top_k)
        for (protocol, window, hints), top_k, cost in zip(names, top_ks, costs, strict=True)
    ]
    chosen = forecasts[at]
    forecasts.sort(key=lambda forecast: forecast.token_s)
    return Choice(
        policy=PredictivePolicy.name,
        protocol=chosen.protocol,
        window=chosen.window,
        token_s=chosen.token_s,
        reason=_reason(forecasts, chosen, link, thrift=thrift),
        forecasts=forecasts,
        hints=chosen.hints,
        top_k=chosen.top_k,
    )


def _reason(
    forecasts: Sequence[Forecast], chosen: Forecast, link: LinkState, *, thrift: bool
) -> str:
    """Explain the choice in one line, with the best plan of each other protocol."""
    best: dict[tuple[str, str], Forecast] = {}
    for forecast in forecasts:
        best.setdefault((forecast.protocol, forecast.hints), forecast)
    others = [
        f"{_describe(other)} {_milliseconds(other, thrift)}"
        for name, other in best.items()
        if name != (chosen.protocol, chosen.hints)
    ]
    against = f" (against {', '.join(others)})" if others else ""
    unit = "ms per token predicted"
    if thrift:
        unit += ", and ms of the edge's time"
    return (
        f"{_describe(chosen)} at "
        f"{_milliseconds(chosen, thrift)} {unit}{against}; {describe_link(link)}"
    )


def _milliseconds(forecast: Forecast, thrift: bool) -> str:
    """Format the milliseconds per token and, with thrift, the edge's milliseconds per token."""
    token = f"{forecast.token_s * 1e3:.1f}"
    if not thrift or forecast.edge_s is None:
        return token
    return f"{token} and {forecast.edge_s * 1e3:.1f}"


def _describe(forecast: Forecast) -> str:
    return describe_plan(forecast.protocol, forecast.window, forecast.hints, forecast.top_k)


def describe_plan(protocol: str, window: int, hints: str = "", top_k: int = 0) -> str:
    """Format "protocol, window N, K N, hints X"; omits what a plan does not have or the default."""
    parts = (
        f", window {window}" if window else "",
        f", K {top_k}" if top_k else "",
        f", hints {hints}" if hints not in ("", ALL) else "",
    )
    return protocol + "".join(parts)
