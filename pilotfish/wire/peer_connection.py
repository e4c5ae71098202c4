"""One connection of a listening socket, and the reasons for cutting it."""

import math
import time
from dataclasses import dataclass, field
from typing import Final

from pilotfish.wire.link.liveness import Liveness
from pilotfish.wire.memory_watch import ReceiveCounter

CROWD: Final = "crowd"  # too many strangers, or too many connections
UNFINISHED: Final = "unfinished-message"  # too many bytes of an incomplete message
BACKLOG: Final = "too-much-of-one-key"  # too many bytes of undelivered messages
PER_KEY: Final = "too-many-of-one-key"
REVOKED: Final = "revoked-key"
CLOSING: Final = "closing"  # it arrived while the edge was stopping
QUIET: Final = "quiet"  # its path or its peer is dead
FRAGMENTED: Final = "too-many-frames"  # a message with far too many parts

# After a cut for memory the connection's remaining messages are dropped.
_DROPPING: Final = {UNFINISHED, BACKLOG, FRAGMENTED}


@dataclass(slots=True)
class PeerConnection:
    """The state of one connection."""

    descriptor: int
    peer: str  # an address without its port
    counter: ReceiveCounter
    client: bytes = b""  # ZeroMQ's routing id, known from the first message on
    owner: bytes = b""
    accepted_s: float = field(default_factory=time.monotonic)
    liveness: Liveness = field(init=False)
    sent: int = 0  # bytes sent, without all of the framing
    acknowledged: int = 0  # bytes acknowledged when last read
    revoked_s: float = math.inf  # when its key was first missing from the list
    cut: bool = False
    drop_messages: bool = False  # messages that still arrive from it are dropped

    def __post_init__(self) -> None:
        self.liveness = Liveness(self.accepted_s)

    def note_cut(self, reason: str) -> None:
        """Note that this end cuts the connection."""
        self.cut, self.drop_messages = True, reason in _DROPPING
