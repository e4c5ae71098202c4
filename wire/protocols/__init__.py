"""The protocols of a round. One file each, both halves in it; one line here to add one."""

from wire.errors import UnsupportedError
from wire.protocols.baselines import LOCAL, STREAM, choose
from wire.protocols.dsd import Dsd
from wire.protocols.exchange import Draft, Exchange, Law, Ruling
from wire.protocols.greedy import Greedy

EXCHANGES: dict[str, Exchange] = {exchange.name: exchange for exchange in (Greedy(), Dsd())}
NAMES = (*EXCHANGES, STREAM, LOCAL)

__all__ = [
    "EXCHANGES",
    "LOCAL",
    "NAMES",
    "STREAM",
    "Draft",
    "Exchange",
    "Law",
    "Ruling",
    "choose",
    "exchange_named",
]


def exchange_named(name: str) -> Exchange:
    """The drafting protocol of that name, or `UnsupportedError`."""
    try:
        return EXCHANGES[name]
    except KeyError:
        raise UnsupportedError(
            f"There is no drafting protocol {name!r}; this end offers {', '.join(EXCHANGES)}."
        ) from None
