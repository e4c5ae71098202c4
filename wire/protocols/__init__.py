"""The protocols of a round. One file each, both halves in it; one line here to add one."""

from typing import Any

from pilotfish.wire.errors import UnsupportedError
from pilotfish.wire.protocols.adaptive import Adaptive
from pilotfish.wire.protocols.baselines import LOCAL, STREAM, choose
from pilotfish.wire.protocols.coupled import Coupled
from pilotfish.wire.protocols.dsd import Dsd
from pilotfish.wire.protocols.dssd import Dssd
from pilotfish.wire.protocols.exchange import Draft, Exchange, Law, Place, Ruling, Wanted
from pilotfish.wire.protocols.greedy import Greedy
from pilotfish.wire.protocols.judged import Judge, Judged
from pilotfish.wire.protocols.tree import TokenTree
from pilotfish.wire.protocols.tslt import Tslt
from pilotfish.wire.protocols.wisv_full import WisvFull
from pilotfish.wire.protocols.wisv_selective import WisvSelective

EXCHANGES: dict[str, Exchange[Any]] = {
    exchange.name: exchange
    for exchange in (
        *(Greedy(), Dsd(), Tslt(), TokenTree(), Dssd(), Coupled()),
        *(WisvFull(), WisvSelective(), Adaptive()),
    )
}
NAMES = (*EXCHANGES, STREAM, LOCAL)

__all__ = [
    "EXCHANGES",
    "LOCAL",
    "NAMES",
    "STREAM",
    "Adaptive",
    "Draft",
    "Exchange",
    "Greedy",
    "Judge",
    "Judged",
    "Law",
    "Place",
    "Ruling",
    "Wanted",
    "WisvFull",
    "WisvSelective",
    "choose",
    "exchange_named",
]


def exchange_named(name: str) -> Exchange[Any]:
    """The drafting protocol of that name, or `UnsupportedError`."""
    try:
        return EXCHANGES[name]
    except KeyError:
        raise UnsupportedError(
            f"There is no drafting protocol {name!r}; this end offers {', '.join(EXCHANGES)}."
        ) from None
