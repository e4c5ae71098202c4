"""List the plans that protocol "auto" may choose from: one for each protocol and window.

`device_runtime.choice` chooses among them.
"""

import secrets
from collections.abc import Collection, Sequence

from msgspec import structs

from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.plan import Plan, check_window, plan
from pilotfish.speculation.tree import nodes_at_most
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
) -> list[Plan]:
    """List the plans for this request.

    At temperature 0 the lossless protocols are `greedy`, `ahead` and `stream`: all drafting
    protocols have the same acceptance there, and `greedy` sends the fewest bytes. At a higher
    temperature with a seed they are `coupled`, `ahead` and `stream`: these generate the same text,
    so the seed reproduces it. If the request has a window, no other window is tried. `ahead` has
    two plans unless the request names a source of hints: one with hints of all sources, and one
    with the edge's hints alone, where the device drafts nothing. offered: the available protocols.
    most: the edge's limit for a window, in tokens of a chain or nodes of a tree. reachable: whether
    an edge can be reached; if so, ``lossy`` does not include `local`.
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
            plans += _plans_of(structs.replace(request, protocol=name), windows)
        except UnsupportedError as error:  # `greedy` and decision heads require temperature 0
            refused = refused or error
    if refused is not None and not any(candidate.exchange for candidate in plans):
        raise refused
    if not plans:
        raise _none_available(eligible, offered)
    fitting = [candidate for candidate in plans if nodes_at_most(candidate.expansion) <= most]
    return fitting or plans


def _plans_of(request: Request, windows: Sequence[int]) -> list[Plan]:
    """Return the plans of the request's protocol, one for each window if it has windows."""
    exchange = PROTOCOL_REGISTRY.get(request.protocol or "")
    if exchange is None:
        return [
            plan(
                structs.replace(request, draft_temperature=None, draft_top_k=None, draft_top_p=None)
            )
        ]
    if not exchange.streams:
        return [plan(structs.replace(request, window=window)) for window in windows]
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
    return UnsupportedError(
        "None of the protocols to choose from is available; available are "
        f"{', '.join(offered)}: name an edge, name other protocols, or allow lossy "
        f"protocols.{needs}"
    )
