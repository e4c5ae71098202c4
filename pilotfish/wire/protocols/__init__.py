"""The speculation protocols: each has its own file, and is registered at the end of this file.

Another package can add a protocol: its module calls `register`, and the environment variable
``PILOTFISH_PROTOCOLS`` on device and edge names the module (commas separate several modules). These
modules are imported together with this one.
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
from pilotfish.wire.protocols.options import OMITTED_MASS, ProtocolOptions, RoundCounter
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
from pilotfish.wire.request import OPTION_NAMES

PROTOCOL_REGISTRY: Final[dict[str, SpeculationProtocol[Any]]] = {}

__all__ = [
    "LOCAL",
    "OMITTED_MASS",
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
    """Register a protocol; raises `ValueError` if its name, an option or a counter is taken."""
    shared = OPTION_NAMES & {*protocol.Options.__struct_fields__}
    if shared:
        raise ValueError(f"Every request already has an option {min(shared)}.")
    if protocol.name in (*PROTOCOL_REGISTRY, STREAM, LOCAL):
        raise ValueError(f"There is already a protocol {protocol.name}.")
    for kind in option_types():
        shared_names = {*kind.__struct_fields__} & {*protocol.Options.__struct_fields__}
        if shared_names and kind is not protocol.Options:
            raise ValueError(f"Another protocol already has an option {min(shared_names)}.")
    for counter in protocol.counters:
        if counters().get(counter.name, counter) != counter:
            raise ValueError(f"Another protocol already has a counter {counter.name}.")
    PROTOCOL_REGISTRY[protocol.name] = protocol


def names() -> tuple[str, ...]:
    """Return the names of all protocols, the baselines last."""
    return (*PROTOCOL_REGISTRY, STREAM, LOCAL)


def option_types() -> tuple[type[ProtocolOptions], ...]:
    """Return the option types of all protocols, each once, without types that have no option."""
    kinds = (protocol.Options for protocol in PROTOCOL_REGISTRY.values())
    return tuple(dict.fromkeys(kind for kind in kinds if kind.__struct_fields__))


def counters() -> dict[str, RoundCounter]:
    """Return the counters that rounds can have, by name: the protocols', then an ensemble's."""
    every = (counter for protocol in PROTOCOL_REGISTRY.values() for counter in protocol.counters)
    return {counter.name: counter for counter in (*every, OMITTED_MASS)}


def counters_of(protocol: str) -> tuple[RoundCounter, ...]:
    """Return the counters of a protocol; () for baselines and unknown names."""
    return PROTOCOL_REGISTRY[protocol].counters if protocol in PROTOCOL_REGISTRY else ()


def streams(protocol: str) -> bool:
    """Return whether under this protocol the target generates by itself, without rounds."""
    return protocol == STREAM or (
        protocol in PROTOCOL_REGISTRY and PROTOCOL_REGISTRY[protocol].streams
    )


def lossless(protocol: str) -> bool:
    """Return whether the protocol's text follows the target's law; False for unknown names.

    Under a lossy protocol the drafter's text enters the answer, so the caller must have chosen it.
    """
    return protocol == STREAM or (
        protocol in PROTOCOL_REGISTRY and PROTOCOL_REGISTRY[protocol].lossless
    )


def get_protocol(name: str) -> SpeculationProtocol[Any]:
    """Return the speculation protocol with this name; raises `UnsupportedError`."""
    try:
        return PROTOCOL_REGISTRY[name]
    except KeyError:
        raise UnsupportedError(
            f"There is no drafting protocol {name!r}; "
            f"this end offers {', '.join(PROTOCOL_REGISTRY)}."
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
        raise ConfigError(
            f"PILOTFISH_PROTOCOLS names the module {_module.strip()}, which fails: {_error}"
        ) from _error
