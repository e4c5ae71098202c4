"""predictive: choose the plan with the least predicted time per committed token.

`costs` computes the time T of a round over its tokens N, from the last measured state of the link
and the `evidence` on acceptance, computing times and bytes. A rate that was never measured counts
as slow. A plan replaces the last choice only if it is clearly better: noise should not flip the
choice. Before the first choice, the best plan without drafting on the device counts as the last
choice. Later, this plan also wins if the chosen plan is not better. Among equal plans the first
wins.

Where K or the expansion of a tree is free (`Plan.free`), the cheapest plan of each protocol is
compared at other K, and then with other trees of as many levels. They, too, must be clearly better.

A request with a prediction takes a protocol under which the edge drafts from it, if there is one:
no evidence tells how much of a prediction will be right, and a wrong one costs hardly any time.

With ``thrift``, the policy chooses the plan with the least edge time per token, among the plans
that are predicted to be as fast as `stream` or faster.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from pilotfish.device_runtime.alternatives import with_other_branchings, with_other_top_ks
from pilotfish.device_runtime.choice.costs import PlanCosts, plan_costs, stream_costs, with_defaults
from pilotfish.device_runtime.choice.evidence import Evidence
from pilotfish.device_runtime.choice.hints import ALL, hint_source
from pilotfish.device_runtime.choice.policy import Policy, describe_link
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Choice, Forecast
from pilotfish.speculation.latency import Link
from pilotfish.speculation.tree import Expansion
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import STREAM, SamplingParams
from pilotfish.wire.protocols.ahead import EDGE
from pilotfish.wire.request import AutoOptions

_SWITCH_BELOW = 0.95  # another plan must take less than this share of the last choice's time
# another K or another tree must take less than this share of the last one's time
_OTHER_VARIANT_BELOW = 0.98
_MAX_KINDS = 64  # maximum number of plan sets for which the last choice is kept
_PlanName = tuple[str, int, str]  # protocol, window, source of hints


class PredictivePolicy(Policy):
    """Remembers the last choice for each set of plans."""

    name = "predictive"

    def __init__(self) -> None:
        self._last_choices: dict[tuple[bool, tuple[_PlanName, ...]], _PlanName] = {}
        # by protocol: K and the branching of its trees, if one was chosen
        self._last_variants: dict[str, tuple[int, Expansion | None]] = {}

    def choose(
        self, auto: AutoOptions, plans: Sequence[Plan], link: LinkState, evidence: Evidence
    ) -> tuple[Plan, Choice]:
        """Choose the cheapest plan, or the last choice if it costs hardly more."""
        known = with_defaults(link)
        if plans[0].request.prediction:
            plans = [plan for plan in plans if hint_source(plan)] or plans
        plans = self._with_last_variants(plans)
        costs = [plan_costs(plan, known, evidence) for plan in plans]
        self._choose_variants(plans, costs, known, evidence)
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
        return plans[best], _describe_choice(plans, names, costs, best, link, thrift=auto.thrift)

    def _with_last_variants(self, plans: Sequence[Plan]) -> list[Plan]:
        """Return the plans with their protocols' last K and branching, where these are free."""
        varied: list[Plan] = []
        drafting: dict[str, SamplingParams] = {}  # by protocol, with the last K
        for plan in plans:
            top_k, branching = self._last_variants.get(plan.protocol, (0, None))
            other = plan
            if top_k in plan.free.top_ks and top_k != plan.top_k:
                if plan.protocol not in drafting:
                    drafting[plan.protocol] = plan.with_top_k(top_k).drafting
                other = replace(other, drafting=drafting[plan.protocol])
            if branching in plan.free.branchings:
                other = other.with_branching(branching)
            varied.append(other if other.fits else plan)
        return varied

    def _choose_variants(
        self, plans: list[Plan], costs: list[PlanCosts], link: Link, evidence: Evidence
    ) -> None:
        """Replace plans, and their costs, where another K or another tree is clearly better.

        Each protocol keeps one K and one branching: the best for its cheapest plan.
        """
        free = [at for at, plan in enumerate(plans) if plan.free.top_ks or plan.free.branchings]
        for protocol, same_protocol in groupby(free, lambda at: plans[at].protocol):
            group = list(same_protocol)
            cheapest = min(group, key=costs.__getitem__)
            plan, top_k, branching = plans[cheapest], 0, None
            least_s = costs[cheapest].token_s * _OTHER_VARIANT_BELOW
            for other in with_other_top_ks(plan):
                token_s = plan_costs(other, link, evidence).token_s
                if token_s < least_s:
                    plan, top_k, least_s = other, other.top_k, token_s
            for other_branching, other in with_other_branchings(plan):
                token_s = plan_costs(other, link, evidence).token_s
                if token_s < least_s:
                    plan, branching, least_s = other, other_branching, token_s
            if top_k or branching is not None:
                last = self._last_variants.get(protocol, (0, None))
                self._last_variants[protocol] = (
                    top_k or last[0],
                    last[1] if branching is None else branching,
                )
                varied = self._with_last_variants([plans[at] for at in group])
                for at, plans[at] in zip(group, varied, strict=True):
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
    plans: Sequence[Plan],
    names: Sequence[_PlanName],
    costs: Sequence[PlanCosts],
    at: int,
    link: LinkState,
    *,
    thrift: bool,
) -> Choice:
    """Return the choice with all forecasts, the cheapest first."""
    forecasts = [
        Forecast(protocol, window, *cost, hints, plan.top_k, _tree(plan))
        for (protocol, window, hints), plan, cost in zip(names, plans, costs, strict=True)
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
        expansion=chosen.expansion,
    )


def _tree(plan: Plan) -> Expansion:
    """Return the expansion under a protocol with trees; else empty."""
    return plan.expansion if plan.exchange is not None and plan.exchange.allows_trees else ()


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
    """Format "protocol, window N, expansion …, K N, hints X"; omits what is absent."""
    expansion = ",".join(map(str, forecast.expansion))
    parts = (
        f", window {forecast.window}" if forecast.window else "",
        f", expansion {expansion}" if expansion else "",
        f", K {forecast.top_k}" if forecast.top_k else "",
        f", hints {forecast.hints}" if forecast.hints not in ("", ALL) else "",
    )
    return forecast.protocol + "".join(parts)
