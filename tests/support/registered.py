"""Lists of the registered protocols by what their classes declare.

Tests of all protocols take their lists from here, so that they run for a new protocol, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pilotfish.base.errors import UnsupportedError
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, SpeculationProtocol


def serves(protocol: SpeculationProtocol[Any], temperature: float) -> bool:
    """Return whether the protocol accepts this temperature of target and drafter."""
    sampling = Sampling(temperature=temperature)
    try:
        protocol.check(sampling, sampling)
    except UnsupportedError:
        return False
    return True


def temperature_of(name: str) -> float:
    """Return 1, or 0 for a protocol that serves no other temperature; 1 for the baselines."""
    protocol = PROTOCOL_REGISTRY.get(name)
    return 1.0 if protocol is None or serves(protocol, 1.0) else 0.0


# Protocols whose text follows the target's law; `ahead`, under which the target streams, is one.
ALL_LOSSLESS = [name for name, protocol in PROTOCOL_REGISTRY.items() if protocol.lossless]
# Those of them that work by rounds: a window up, a verdict down.
LOSSLESS = [name for name in ALL_LOSSLESS if not PROTOCOL_REGISTRY[name].streams]


def sampling_only(names: Iterable[str]) -> list[str]:
    """Return the names of the protocols that serve temperature 1."""
    return [name for name in names if temperature_of(name)]


def completed(
    cases: Iterable[tuple[str, dict[str, Any]]], names: Iterable[str], **options: Any
) -> list[tuple[str, dict[str, Any]]]:
    """Add a case (name, options) for each of the names without one, at its `temperature_of`."""
    listed = list(cases)
    named = {name for name, _ in listed}
    missing = [name for name in names if name not in named]
    return [
        *listed,
        *((name, {"temperature": temperature_of(name), **options}) for name in missing),
    ]
