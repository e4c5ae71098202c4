"""predictive: the plan with the least predicted time per committed token.

T/N by `costs`, with the link as last measured and the `evidence` on acceptance, computing times and
bytes. A rate that was never measured counts as slow. The last choice is kept until another plan is
clearly better, so that noise does not flip it back and forth; and so is, before there was one, the
best plan for which the device drafts nothing. That one is taken, too, once what is held is no
better. Between equal plans the first is taken.

A thrifty request takes the plan that costs the edge least time a token, of those that are predicted
to be no slower than `stream`.
"""

import math
from collections.abc import Sequence

from pilotfish.device_runtime.choice.costs import PlanCosts, plan_costs, stream_costs, with_defaults
from pilotfish.device_runtime.choice.evidence import Evidence
from pilotfish.device_runtime.choice.hints import ALL, hint_source
from pilotfish.device_runtime.choice.policy import Policy, describe_link
from pilotfish.device_runtime.plan import Auto, Plan
from pilotfish.device_runtime.record import Choice, Forecast
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import STREAM
from pilotfish.wire.protocols.ahead import EDGE

_SWITCH_BELOW = 0.95  # of the held plan's time: below that another one is chosen
_MAX_KINDS = 64  # kinds of requests, each with its last choice
_PlanName = tuple[str, int, str]  # protocol, window, whose hints


class PredictivePolicy(Policy):
    """Keeps a choice for each kind of request, that is, for each set of plans."""

    name = "predictive"

    def __init__(self) -> None:
        self._last_choices: dict[tuple[bool, tuple[_PlanName, ...]], _PlanName] = {}

    def choose(
        self, auto: Auto, plans: Sequence[Plan], link: LinkState, evidence: Evidence
    ) -> tuple[Plan, Choice]:
        """Choose the cheapest plan, or the last choice if that is hardly dearer."""
        known = with_defaults(link)
        costs = [plan_costs(plan, known, evidence) for plan in plans]
        names = tuple(_plan_name(plan) for plan in plans)
        kind = auto.thrift, names
        held = self._last_choices.pop(kind, None)
        rest = _cheapest_without_drafting(plans, costs)
        kept = rest if held is None else names.index(held)
        limit_s = stream_costs(plans[0].max_tokens, known, evidence).token_s
        prices = _prices(costs, kept, limit_s if auto.thrift else None)
        best = min(range(len(plans)), key=prices.__getitem__)
        if kept is not None and prices[best] > _SWITCH_BELOW * prices[kept]:
            best = kept
        if rest is not None and prices[rest] <= prices[best]:
            best = rest  # the device need not draft in vain
        self._last_choices[kind] = names[best]  # the newest is last
        if len(self._last_choices) > _MAX_KINDS:
            del self._last_choices[next(iter(self._last_choices))]
        return plans[best], _describe_choice(names, costs, best, link, thrift=auto.thrift)


def _cheapest_without_drafting(plans: Sequence[Plan], costs: Sequence[PlanCosts]) -> int | None:
    """Return which plan is the cheapest for which the device drafts nothing; None without any."""
    rests = [
        at for at, plan in enumerate(plans) if plan.protocol == STREAM or hint_source(plan) == EDGE
    ]
    return min(rests, key=costs.__getitem__, default=None)


def _prices(costs: Sequence[PlanCosts], kept: int | None, limit_s: float | None) -> Sequence[float]:
    """Return what the plans are judged by: the token's seconds, or under a limit the edge's.

    limit_s: the seconds a token that none may exceed, but the one that is kept by a little; where
    all do, there is no limit.
    """
    token_s = [each.token_s for each in costs]
    if limit_s is None or min(token_s) > limit_s:
        return token_s
    return [
        each.edge_s
        if each.token_s * (_SWITCH_BELOW if at == kept else 1.0) <= limit_s
        else math.inf
        for at, each in enumerate(costs)
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
    """Describe the choice, with all forecasts, the cheapest first."""
    forecasts = [
        Forecast(protocol, window, *each, hints)
        for (protocol, window, hints), each in zip(names, costs, strict=True)
    ]
    chosen = forecasts[at]
    forecasts.sort(key=lambda one: one.token_s)
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
    """Describe the choice in one line, with the best plan of each other protocol."""
    best: dict[tuple[str, str], Forecast] = {}
    for one in forecasts:
        best.setdefault((one.protocol, one.hints), one)
    others = [
        f"{describe_plan(other.protocol, other.window, other.hints)} {_milliseconds(other, thrift)}"
        for name, other in best.items()
        if name != (chosen.protocol, chosen.hints)
    ]
    against = f" (against {', '.join(others)})" if others else ""
    each = "ms a token predicted, and of the edge's time" if thrift else "ms a token predicted"
    return (
        f"{describe_plan(chosen.protocol, chosen.window, chosen.hints)} at "
        f"{_milliseconds(chosen, thrift)} {each}{against}; {describe_link(link)}"
    )


def _milliseconds(forecast: Forecast, thrift: bool) -> str:
    """Format a token's time and, where it matters, the edge's part of it."""
    token = f"{forecast.token_s * 1e3:.1f}"
    if not thrift or forecast.edge_s is None:
        return token
    return f"{token} and {forecast.edge_s * 1e3:.1f}"


def describe_plan(protocol: str, window: int, hints: str = "") -> str:
    """Name a protocol, its window, if it has one, and whose hints, if not everybody's."""
    parts = (
        f", window {window}" if window else "",
        f", hints {hints}" if hints not in ("", ALL) else "",
    )
    return protocol + "".join(parts)
