"""One connection of a listening socket, and the reasons for cutting it."""

import math
import time
from dataclasses import dataclass, field
from typing import Final

from pilotfish.wire.link.liveness import Liveness
from pilotfish.wire.memory_watch import ReceiveCounter

CROWD: Final = "crowd"  # too many connections, or too many that have sent no message
UNFINISHED: Final = "unfinished-message"  # too many bytes of an incomplete message
BACKLOG: Final = "too-much-of-one-key"  # too many bytes of undelivered messages
PER_KEY: Final = "too-many-of-one-key"
REVOKED: Final = "revoked-key"
CLOSING: Final = "closing"  # the connection arrived while the edge was stopping
QUIET: Final = "quiet"  # no sign of life: the path or the peer is dead
FRAGMENTED: Final = "too-many-frames"  # a message with far too many parts

# Reasons that concern memory: after the cut, the connection's remaining messages are dropped.
_DROPPING: Final = {UNFINISHED, BACKLOG, FRAGMENTED}


@dataclass(slots=True)
class PeerConnection:
    """The state of one connection."""

    descriptor: int
    peer: str  # the peer's address without a port
    counter: ReceiveCounter
    client: bytes = b""  # ZeroMQ's routing id, known from the first message on
    owner: bytes = b""
    accepted_s: float = field(default_factory=time.monotonic)
    liveness: Liveness = field(init=False)
    sent: int = 0  # bytes sent, without some of ZeroMQ's framing
    acknowledged: int = 0  # bytes that the peer had acknowledged at the last check
    revoked_s: float = math.inf  # time at which its key was first missing from the list
    cut: bool = False
    drop_messages: bool = False  # its remaining messages are dropped

    def __post_init__(self) -> None:
        self.liveness = Liveness(self.accepted_s)

    def note_cut(self, reason: str) -> None:
        """Note that this process cuts the connection, for this reason."""
        self.cut, self.drop_messages = True, reason in _DROPPING
