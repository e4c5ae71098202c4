"""The protocols of a round. One file each, all of it in it; one line here to add one.

A protocol that comes with another package is added by its module: name it in the environment
variable ``PILOTFISH_PROTOCOLS`` (several between commas) of both ends, and have it `register` an
exchange. The modules are imported with this one; nothing is looked for where the variable is empty.
"""

import os
from importlib import import_module
from typing import Any, Final

from pilotfish.base.errors import ConfigError, UnsupportedError
from pilotfish.wire.protocols.adaptive import Adaptive
from pilotfish.wire.protocols.ahead import Ahead
from pilotfish.wire.protocols.baselines import LOCAL, STREAM, choose
from pilotfish.wire.protocols.coupled import Coupled
from pilotfish.wire.protocols.declared import SHARED_OPTIONS, ProtocolOptions, RoundCounter
from pilotfish.wire.protocols.dsd import Dsd
from pilotfish.wire.protocols.dssd import Dssd
from pilotfish.wire.protocols.exchange import Draft, Exchange, Law, Place, Ruling, Wanted
from pilotfish.wire.protocols.greedy import Greedy
from pilotfish.wire.protocols.judged import Judge
from pilotfish.wire.protocols.tree import TokenTree
from pilotfish.wire.protocols.tslt import Tslt
from pilotfish.wire.protocols.wisv_full import WisvFull
from pilotfish.wire.protocols.wisv_selective import WisvSelective

EXCHANGES: Final[dict[str, Exchange[Any]]] = {}

__all__ = [
    "EXCHANGES",
    "LOCAL",
    "STREAM",
    "Ahead",
    "Draft",
    "Exchange",
    "Greedy",
    "Judge",
    "Law",
    "Place",
    "ProtocolOptions",
    "RoundCounter",
    "Ruling",
    "Wanted",
    "WisvFull",
    "WisvSelective",
    "choose",
    "counters",
    "counters_of",
    "exchange_named",
    "lossless",
    "names",
    "option_types",
    "register",
    "streams",
]


def register(exchange: Exchange[Any]) -> None:
    """Add a protocol; ValueError if a name of it, an option or a counter is taken."""
    shared = SHARED_OPTIONS & {*exchange.Options.__struct_fields__}
    if shared:
        raise ValueError(f"Every request has an option {min(shared)} already.")
    if exchange.name in (*EXCHANGES, STREAM, LOCAL):
        raise ValueError(f"There is a protocol {exchange.name} already.")
    for kind in option_types():
        twice = {*kind.__struct_fields__} & {*exchange.Options.__struct_fields__}
        if twice and kind is not exchange.Options:
            raise ValueError(f"Other protocols have an option {min(twice)} already.")
    for counter in exchange.counters:
        if counters().get(counter.name, counter) != counter:
            raise ValueError(f"Another protocol has a counter {counter.name} already.")
    EXCHANGES[exchange.name] = exchange


def names() -> tuple[str, ...]:
    """All protocols, the baselines last."""
    return (*EXCHANGES, STREAM, LOCAL)


def option_types() -> tuple[type[ProtocolOptions], ...]:
    """The types of all protocols' options, each once; those without any are left out."""
    kinds = (one.Options for one in EXCHANGES.values() if one.Options.__struct_fields__)
    return tuple(dict.fromkeys(kinds))


def counters() -> dict[str, RoundCounter]:
    """What rounds may note, of all protocols."""
    return {one.name: one for exchange in EXCHANGES.values() for one in exchange.counters}


def counters_of(protocol: str) -> tuple[RoundCounter, ...]:
    """What rounds of this protocol note; nothing of baselines and unknown ones."""
    return EXCHANGES[protocol].counters if protocol in EXCHANGES else ()


def streams(protocol: str) -> bool:
    """Whether the target generates by itself, with or without hints, rather than by rounds."""
    return protocol == STREAM or (protocol in EXCHANGES and EXCHANGES[protocol].streams)


def lossless(protocol: str) -> bool:
    """Whether its text is the target's own; false for `local`, and for what is no protocol here.

    Under all others the drafter's words may enter an answer, so they must be the asker's own.
    """
    return protocol == STREAM or (protocol in EXCHANGES and EXCHANGES[protocol].lossless)


def exchange_named(name: str) -> Exchange[Any]:
    """The drafting protocol of that name, or `UnsupportedError`."""
    try:
        return EXCHANGES[name]
    except KeyError:
        raise UnsupportedError(
            f"There is no drafting protocol {name!r}; this end offers {', '.join(EXCHANGES)}."
        ) from None


for _each in (
    *(Greedy(), Dsd(), Tslt(), TokenTree(), Dssd(), Coupled(), Ahead()),
    *(WisvFull(), WisvSelective(), Adaptive()),
):
    register(_each)
for _module in filter(None, os.environ.get("PILOTFISH_PROTOCOLS", "").split(",")):
    try:
        import_module(_module.strip())
    except (ImportError, ValueError) as _error:
        raise ConfigError(f"PILOTFISH_PROTOCOLS names {_module.strip()}: {_error}") from _error
