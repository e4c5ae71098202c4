"""List the plans that protocol "auto" may choose from: one for each protocol and window.

`device_runtime.choice` chooses among them. A plan also tells what else is free (`Plan.free`): K,
unless the request names a truncation, and the expansion of a tree. Each protocol names its values
(`SpeculationProtocol.top_ks`, `branchings`).
"""

import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from msgspec import structs

from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.plan import NOTHING_FREE, Free, Plan, check_window, plan
from pilotfish.speculation.tree import Expansion, nodes_at_most
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols import LOCAL, PROTOCOL_REGISTRY, STREAM, Greedy
from pilotfish.wire.protocols.ahead import AheadOptions
from pilotfish.wire.request import AutoOptions, Request

WINDOWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # draft tokens


def alternatives(
    request: Request,
    *,
    offered: Collection[str],
    most: int = MAX_WINDOW,
    reachable: bool = True,
    vocab_size: int = 0,
) -> list[Plan]:
    """List the plans for this request.

    At temperature 0 the lossless protocols are `greedy`, `ahead` and `stream`: all drafting
    protocols have the same acceptance there, and `greedy` sends the fewest bytes. At a higher
    temperature with a seed they are `coupled`, `ahead` and `stream`: these generate the same text,
    so the seed reproduces it. If the request has a window, no other window is tried. `ahead` has
    two plans unless the request names a source of hints: one with hints of all sources, and one
    with the edge's hints alone, where the device drafts nothing. offered: the available protocols.
    most: the edge's limit for a window, in tokens of a chain or nodes of a tree. reachable: whether
    an edge can be reached; if so, ``lossy`` does not include `local`. vocab_size: number of tokens
    of the target's vocabulary; 0 if unknown, and then no plan sends whole distributions.
    """
    window = request.window
    if isinstance(window, str) or request.expansion is not None:
        raise UnsupportedError(
            'Protocol "auto" chooses the window itself: give a number of draft '
            "tokens as window, or no window."
        )
    if window is not None:
        check_window(window)
    seeded = request.seed is not None
    if not seeded:
        request = structs.replace(request, seed=secrets.randbits(63))
    windows = ([w for w in WINDOWS if w <= most] or [0]) if window is None else [min(window, most)]
    plans: list[Plan] = []
    refused: UnsupportedError | None = None
    eligible = _eligible(
        request.auto, greedy=not request.temperature, seeded=seeded, reachable=reachable
    )
    for name in eligible:
        if name not in offered:
            continue
        try:
            plans += _plans_of(structs.replace(request, protocol=name), windows, most, vocab_size)
        except UnsupportedError as error:  # `greedy` and decision heads require temperature 0
            refused = refused or error
    if refused is not None and not any(candidate.exchange for candidate in plans):
        raise refused
    if not plans:
        raise _none_available(eligible, offered)
    fitting = [candidate for candidate in plans if nodes_at_most(candidate.expansion) <= most]
    return fitting or plans


def with_other_top_ks(chosen: Plan) -> Iterator[Plan]:
    """Return the plan with each other K that is free and fits into a message."""
    others = (chosen.with_top_k(top_k) for top_k in chosen.free.top_ks if top_k != chosen.top_k)
    return (other for other in others if other.fits)


def with_other_branchings(chosen: Plan) -> Iterator[tuple[Expansion, Plan]]:
    """Return the plan with each other tree of as many levels that is free and fits."""
    others = ((each, chosen.with_branching(each)) for each in chosen.free.branchings)
    return (
        (each, other)
        for each, other in others
        if other.expansion != chosen.expansion and other.fits
    )


def _free(checked: Plan, most: int, vocab_size: int) -> Free:
    """Return what "auto" may change in a plan whose request names a protocol with windows."""
    exchange = checked.exchange
    if exchange is None or checked.drafting.sampling.greedy:
        return NOTHING_FREE  # equal candidates make no tree, and one token is no truncation
    named = checked.names_truncation or not exchange.top_ks
    whole = (vocab_size,) if vocab_size > max(exchange.top_ks, default=0) else ()
    top_ks = () if named else (*exchange.top_ks, *whole)
    return Free(top_ks, exchange.branchings, most, vocab_size)


def _plans_of(request: Request, windows: Sequence[int], most: int, vocab_size: int) -> list[Plan]:
    """Return the plans of the request's protocol, one for each window if it has windows."""
    exchange = PROTOCOL_REGISTRY.get(request.protocol or "")
    if exchange is None:
        return [
            plan(
                structs.replace(request, draft_temperature=None, draft_top_k=None, draft_top_p=None)
            )
        ]
    if not exchange.streams:
        checked = plan(structs.replace(request, window=windows[0]))
        checked = replace(checked, free=_free(checked, most, vocab_size))
        return [checked, *(checked.with_window(window) for window in windows[1:])]
    hinted = plan(structs.replace(request, window=None))
    if hinted.exchange is None or hinted.exchange.options != AheadOptions():
        return [hinted]
    return [hinted, hinted.with_options(AheadOptions(hints="edge"))]


def _eligible(auto: AutoOptions, *, greedy: bool, seeded: bool, reachable: bool) -> Sequence[str]:
    if auto.among is not None:
        return auto.among
    eligible = [STREAM]
    for name, exchange in PROTOCOL_REGISTRY.items():
        if not exchange.lossless:
            eligible += [name] if auto.lossy else []
        elif greedy:
            eligible += [name] if exchange.streams or name == Greedy.name else []
        elif exchange.deterministic or not seeded:
            eligible.append(name)
    return [*eligible, LOCAL] if auto.lossy and not reachable else eligible


def _none_available(eligible: Sequence[str], offered: Collection[str]) -> UnsupportedError:
    """Say why none of the eligible protocols can be used, and what to change."""
    lacking = {
        name: PROTOCOL_REGISTRY[name].requires for name in eligible if name in PROTOCOL_REGISTRY
    }
    needs = "".join(
        f" For {' and '.join(name for name, part in lacking.items() if part == need)} the edge "
        f"needs a {need} for this drafter."
        for need in dict.fromkeys(filter(None, lacking.values()))
    )
    if not needs and tuple(offered) == ("local",):
        return UnsupportedError(
            "Without an edge only protocol local is available: name an edge, tcp://HOST:PORT, "
            "or use protocol local."
        )
    if not offered:
        return UnsupportedError(
            "No protocol is available: there is no edge now, and the drafter cannot answer alone. "
            "Name an edge, tcp://HOST:PORT, or try again when it is back."
        )
    return UnsupportedError(
        "None of the protocols to choose from is available; available are "
        f"{', '.join(offered)}: name an edge, name other protocols, or allow lossy "
        f"protocols.{needs}"
    )
