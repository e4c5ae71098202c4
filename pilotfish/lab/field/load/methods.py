"""The methods by which a load's devices answer: a protocol, with its window or its hints.

In:  ``stream``, ``greedy:4``, ``ahead`` or ``ahead:edge``. Out: a `Method`.
"""

from typing import Any

from msgspec import Struct

from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.plan import plan
from pilotfish.wire.protocols import LOCAL, PROTOCOL_REGISTRY, STREAM, names
from pilotfish.wire.request import AUTO, Request

AHEAD = "ahead"
SERVICE = "service"  # the only method of devices that are reached over HTTP


class Method(Struct, frozen=True, kw_only=True):
    """A method to answer. name: as on the command line. options: of `Device.stream`."""

    name: str
    options: dict[str, Any]

    @property
    def needs_drafts(self) -> bool:
        """Whether the device drafts."""
        protocol = self.options["protocol"]
        return protocol != STREAM and self.options.get("hints") != "edge"


def read_method(text: str) -> Method:
    """Read a method; raises `UnsupportedError` for one that a recorded drafter cannot follow.

    A recorded drafter has chains at temperature 0, without hidden states.
    """
    protocol, _, detail = text.partition(":")
    if protocol == LOCAL or protocol not in (AUTO, STREAM, *names()):
        raise UnsupportedError(f"{text!r} names no protocol that an edge serves.")
    options: dict[str, Any] = {"protocol": protocol, "temperature": 0.0}
    if detail and protocol == AHEAD:
        options["hints"] = detail
    elif detail:
        if protocol in (STREAM, AUTO):
            raise UnsupportedError(f"{protocol} has no window: write it without {detail!r}.")
        if not detail.isascii() or not detail.isdecimal():
            raise UnsupportedError(f"{text!r} has no window; write it as greedy:4, or ahead:edge.")
        options["window"] = int(detail)
    registered = PROTOCOL_REGISTRY.get(protocol)
    if registered is not None and registered.requires:
        raise UnsupportedError(
            f"{protocol} needs the drafter's hidden states, and a load replays drafts only."
        )
    if registered is not None and registered.allows_trees:
        raise UnsupportedError(f"{protocol} drafts trees, and a load replays chains only.")
    if protocol != AUTO:
        plan(Request.from_options(options))  # fail now if an option does not fit
    return Method(name=text, options=options)
