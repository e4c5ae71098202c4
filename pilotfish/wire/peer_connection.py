"""One connection of a listening socket, and the reasons for which it is cut."""

import math
import time
from dataclasses import dataclass, field
from typing import Final

from pilotfish.wire.link.liveness import Liveness
from pilotfish.wire.memory_watch import ReceiveCounter

CROWD: Final = "crowd"  # too many strangers, or too many connections
UNFINISHED: Final = "unfinished-message"  # too many bytes of an unfinished message
BACKLOG: Final = "too-much-of-one-key"  # too many bytes of messages not taken in yet
PER_KEY: Final = "too-many-of-one-key"
REVOKED: Final = "revoked-key"
CLOSING: Final = "closing"  # it came while the edge was stopping
QUIET: Final = "quiet"  # its path or its peer is dead, without a goodbye
FRAGMENTED: Final = "too-many-frames"  # a message of so many parts that receiving it delayed others

# Who was cut for the memory that it took has what is left of its messages dropped.
_DROPPING: Final = {UNFINISHED, BACKLOG, FRAGMENTED}


@dataclass(slots=True)
class PeerConnection:
    """What is known of one connection."""

    descriptor: int
    peer: str  # an address without its port
    counter: ReceiveCounter
    client: bytes = b""  # ZeroMQ's name for it, after its first message
    owner: bytes = b""
    accepted_s: float = field(default_factory=time.monotonic)
    liveness: Liveness = field(init=False)
    sent: int = 0  # bytes on the wire, at least
    acknowledged: int = 0  # of these, when last looked at
    revoked_s: float = math.inf  # when its key was first seen to be off the list
    cut: bool = False
    drop_messages: bool = False  # its messages are dropped

    def __post_init__(self) -> None:
        self.liveness = Liveness(self.accepted_s)

    def note_cut(self, reason: str) -> None:
        """Note that this end cuts it."""
        self.cut, self.drop_messages = True, reason in _DROPPING
