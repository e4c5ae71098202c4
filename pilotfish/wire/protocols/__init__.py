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
from pilotfish.wire.protocols.decision_head import BoundDecisionHead
from pilotfish.wire.protocols.dsd import Dsd
from pilotfish.wire.protocols.dssd import Dssd
from pilotfish.wire.protocols.greedy import Greedy
from pilotfish.wire.protocols.options import SHARED_OPTIONS, ProtocolOptions, RoundCounter
from pilotfish.wire.protocols.protocol import (
    Decision,
    Draft,
    DrawKey,
    SamplingParams,
    SpeculationProtocol,
    StatesNeeded,
)
from pilotfish.wire.protocols.tree import TokenTree
from pilotfish.wire.protocols.tslt import Tslt
from pilotfish.wire.protocols.wisv_full import WisvFull
from pilotfish.wire.protocols.wisv_selective import WisvSelective

PROTOCOL_REGISTRY: Final[dict[str, SpeculationProtocol[Any]]] = {}

__all__ = [
    "LOCAL",
    "PROTOCOL_REGISTRY",
    "STREAM",
    "Ahead",
    "BoundDecisionHead",
    "Decision",
    "Draft",
    "DrawKey",
    "Greedy",
    "ProtocolOptions",
    "RoundCounter",
    "SamplingParams",
    "SpeculationProtocol",
    "StatesNeeded",
    "WisvFull",
    "WisvSelective",
    "choose",
    "counters",
    "counters_of",
    "get_protocol",
    "lossless",
    "names",
    "option_types",
    "register",
    "streams",
]


def register(protocol: SpeculationProtocol[Any]) -> None:
    """Add a protocol; ValueError if a name of it, an option or a counter is taken."""
    shared = SHARED_OPTIONS & {*protocol.Options.__struct_fields__}
    if shared:
        raise ValueError(f"Every request has an option {min(shared)} already.")
    if protocol.name in (*PROTOCOL_REGISTRY, STREAM, LOCAL):
        raise ValueError(f"There is a protocol {protocol.name} already.")
    for kind in option_types():
        shared_names = {*kind.__struct_fields__} & {*protocol.Options.__struct_fields__}
        if shared_names and kind is not protocol.Options:
            raise ValueError(f"Other protocols have an option {min(shared_names)} already.")
    for counter in protocol.counters:
        if counters().get(counter.name, counter) != counter:
            raise ValueError(f"Another protocol has a counter {counter.name} already.")
    PROTOCOL_REGISTRY[protocol.name] = protocol


def names() -> tuple[str, ...]:
    """All protocols, the baselines last."""
    return (*PROTOCOL_REGISTRY, STREAM, LOCAL)


def option_types() -> tuple[type[ProtocolOptions], ...]:
    """The types of all protocols' options, each once; those without any are left out."""
    kinds = (one.Options for one in PROTOCOL_REGISTRY.values() if one.Options.__struct_fields__)
    return tuple(dict.fromkeys(kinds))


def counters() -> dict[str, RoundCounter]:
    """What rounds may note, of all protocols."""
    return {one.name: one for exchange in PROTOCOL_REGISTRY.values() for one in exchange.counters}


def counters_of(protocol: str) -> tuple[RoundCounter, ...]:
    """What rounds of this protocol note; nothing of baselines and unknown ones."""
    return PROTOCOL_REGISTRY[protocol].counters if protocol in PROTOCOL_REGISTRY else ()


def streams(protocol: str) -> bool:
    """Whether the target generates by itself, with or without hints, rather than by rounds."""
    return protocol == STREAM or (
        protocol in PROTOCOL_REGISTRY and PROTOCOL_REGISTRY[protocol].streams
    )


def lossless(protocol: str) -> bool:
    """Whether its text is the target's own; false for `local`, and for what is no protocol here.

    Under all others the drafter's words may enter an answer, so they must be the asker's own.
    """
    return protocol == STREAM or (
        protocol in PROTOCOL_REGISTRY and PROTOCOL_REGISTRY[protocol].lossless
    )


def get_protocol(name: str) -> SpeculationProtocol[Any]:
    """The drafting protocol of that name, or `UnsupportedError`."""
    try:
        return PROTOCOL_REGISTRY[name]
    except KeyError:
        raise UnsupportedError(
            f"There is no drafting protocol {name!r}; this end offers {', '.join(PROTOCOL_REGISTRY)}."
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
