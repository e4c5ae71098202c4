"""predictive: choose the plan with the least predicted time per committed token.

`costs` computes the time T of a round over its tokens N, from the last measured state of the link
and the `evidence` on acceptance, computing times and bytes. A rate that was never measured counts
as slow. A plan replaces the last choice only if it is clearly better: noise should not flip the
choice. Before the first choice, the best plan without drafting on the device counts as the last
choice. Later, this plan also wins if the chosen plan is not better. Among equal plans the first
wins.

With ``thrift``, the policy chooses the plan with the least edge time per token, among the plans
that are predicted to be as fast as `stream` or faster.
"""

import math
from collections.abc import Sequence

from pilotfish.device_runtime.choice.costs import PlanCosts, plan_costs, stream_costs, with_defaults
from pilotfish.device_runtime.choice.evidence import Evidence
from pilotfish.device_runtime.choice.hints import ALL, hint_source
from pilotfish.device_runtime.choice.policy import Policy, describe_link
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Choice, Forecast
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import STREAM
from pilotfish.wire.protocols.ahead import EDGE
from pilotfish.wire.request import AutoOptions

_SWITCH_BELOW = 0.95  # another plan must take less than this share of the last choice's time
_MAX_KINDS = 64  # maximum number of plan sets for which the last choice is kept
_PlanName = tuple[str, int, str]  # protocol, window, source of hints


class PredictivePolicy(Policy):
    """Remembers the last choice for each set of plans."""

    name = "predictive"

    def __init__(self) -> None:
        self._last_choices: dict[tuple[bool, tuple[_PlanName, ...]], _PlanName] = {}

    def choose(
        self, auto: AutoOptions, plans: Sequence[Plan], link: LinkState, evidence: Evidence
    ) -> tuple[Plan, Choice]:
        """Choose the cheapest plan, or the last choice if it costs hardly more."""
        known = with_defaults(link)
        costs = [plan_costs(plan, known, evidence) for plan in plans]
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
        return plans[best], _describe_choice(names, costs, best, link, thrift=auto.thrift)


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
    costs: Sequence[PlanCosts],
    at: int,
    link: LinkState,
    *,
    thrift: bool,
) -> Choice:
    """Return the choice with all forecasts, the cheapest first."""
    forecasts = [
        Forecast(protocol, window, *cost, hints)
        for (protocol, window, hints), cost in zip(names, costs, strict=True)
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
    )


def _reason(
    forecasts: Sequence[Forecast], chosen: Forecast, link: LinkState, *, thrift: bool
) -> str:
    """Explain the choice in one line, with the best plan of each other protocol."""
    best: dict[tuple[str, str], Forecast] = {}
    for forecast in forecasts:
        best.setdefault((forecast.protocol, forecast.hints), forecast)
    others = [
        f"{describe_plan(other.protocol, other.window, other.hints)} {_milliseconds(other, thrift)}"
        for name, other in best.items()
        if name != (chosen.protocol, chosen.hints)
    ]
    against = f" (against {', '.join(others)})" if others else ""
    unit = "ms per token predicted"
    if thrift:
        unit += ", and ms of the edge's time"
    return (
        f"{describe_plan(chosen.protocol, chosen.window, chosen.hints)} at "
        f"{_milliseconds(chosen, thrift)} {unit}{against}; {describe_link(link)}"
    )


def _milliseconds(forecast: Forecast, thrift: bool) -> str:
    """Format the milliseconds per token and, with thrift, the edge's milliseconds per token."""
    token = f"{forecast.token_s * 1e3:.1f}"
    if not thrift or forecast.edge_s is None:
        return token
    return f"{token} and {forecast.edge_s * 1e3:.1f}"


def describe_plan(protocol: str, window: int, hints: str = "") -> str:
    """Format "protocol, window N, hints X"; omits an empty window and the default hints."""
    parts = (
        f", window {window}" if window else "",
        f", hints {hints}" if hints not in ("", ALL) else "",
    )
    return protocol + "".join(parts)
