"""ahead: stand-in, until the protocol lands."""

from typing import Annotated, Literal

from pilotfish.wire.protocols.coupled import Coupled
from pilotfish.wire.protocols.declared import ProtocolOptions
from pilotfish.wire.settings import setting


class AheadOptions(ProtocolOptions, frozen=True):
    """Whose hints the target takes."""

    hints: Annotated[
        Literal["all", "device", "edge"],
        setting("ahead: whose hints are used; edge: the device drafts nothing (all)"),
    ] = "all"


class Ahead(Coupled):
    """Stand-in."""

    name = "ahead"
    Options = AheadOptions
    streams = True
    family = "coupled"
