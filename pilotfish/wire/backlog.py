"""What ended connections left in ZeroMQ's queue, which stays until it is handed out.

A connection that is cut for what it holds takes nothing of that back: if it were not counted, a
client that comes again at once could bring as much each time. Its bytes count for its key; without
keys, and for strangers, for the empty one. They stop to count as they are handed out, or once the
queue was seen to be empty, or once so many messages of others were that one of theirs must have
been among them: ZeroMQ takes from all in turn.

What came between the last look at a connection and its end nobody knows. It is taken to be what the
process grew by in that time.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pilotfish.wire.memory_watch import SLACK_BYTES, ReceiveCounter
from pilotfish.wire.peer_connection import BACKLOG, UNFINISHED, PeerConnection

# Messages of full size that may be unfinished at once: in all; and of one key with several,
# or of all strangers, whose keys are unknown before their first message.
_UNFINISHED_IN_ALL, _OF_ONE_KEY_TIMES = 4, 0.5
_TIMES: Final = 4  # memory that messages take, by their bytes
_TURNS, _TURNS_MORE = 2, 64  # rounds of ZeroMQ's turns after which nothing is left, and messages


@dataclass(slots=True)
class _Ended:
    key: bytes
    counter: ReceiveCounter
    shed: bool  # its messages are dropped
    asked: int  # messages that the socket had handed out when one of its own last was
    messages: int  # of its own, by then
    guessed: int = 0  # bytes that came after the last look
    settled: bool = False  # it was there when memory was last checked

    @property
    def left(self) -> int:
        return max(0, self.counter.left + self.guessed)


class Backlog:
    """Counts it; whoever changes it holds a lock. message_bytes: a message's most."""

    def __init__(self, message_bytes: int, *, keyed: bool) -> None:
        self.by_key: Counter[bytes] = Counter()  # bytes, as of the last check, and of those since
        self._limit = message_bytes + SLACK_BYTES
        self._keyed = keyed
        self._ended: dict[bytes, _Ended] = {}  # by ZeroMQ's name for the client
        self._nameless: list[_Ended] = []  # ended before their first message was handed out
        self._unknown = 0  # messages that may be one's of these

    def __len__(self) -> int:
        return len(self._ended) + len(self._nameless)

    def is_full(self, key: bytes = b"") -> bool:
        """Whether a key's ended connections left so much that new ones of it have to wait."""
        left = self.by_key
        in_all = left[key] > 0 and left.total() > _UNFINISHED_IN_ALL * self._limit
        return in_all or left[key] > _OF_ONE_KEY_TIMES * self._limit

    def leave(self, connection: PeerConnection, received: int) -> None:
        """Note a connection that ended; received: messages of all until now."""
        counter, key = connection.counter, self._key(connection)
        ended = _Ended(key, counter, connection.shed, received, counter.messages)
        if connection.client:
            self._ended[connection.client] = ended
        else:
            self._nameless.append(ended)
        self.by_key[key] += ended.left

    def took(self, client: bytes, size: int, frames: int) -> bool | None:
        """Note a message of one who is not connected; whether to drop it, None: it is unknown."""
        ended = self._ended.get(client)
        if ended is not None:
            ended.counter.add(size, frames)
            return ended.shed
        self._unknown += 1
        if self._nameless:
            self._nameless[0].counter.add(size, frames)
            if self._nameless[0].settled and not self._nameless[0].left:
                self._nameless.pop(0)
        return None

    def check(self, received: int, connected: int, grown: int, *, drained: bool) -> None:
        """Count anew what is left.

        received: messages until now, of all; connected: how many peers are; grown: bytes of memory
        that the process grew by since the last check; drained: all was handed out since then.
        """
        turns = _TURNS * (connected + len(self)) + _TURNS_MORE

        def remains(ended: _Ended, messages: int) -> bool:
            if ended.messages != messages:
                ended.messages, ended.asked = messages, received
            emptied = ended.settled and (drained or received - ended.asked > turns)
            return not (emptied or (ended.settled and not ended.left and not ended.shed))

        named = self._ended.items()
        self._ended = {client: one for client, one in named if remains(one, one.counter.messages)}
        self._nameless = [each for each in self._nameless if remains(each, self._unknown)]
        every = [*self._ended.values(), *self._nameless]
        # whoever has no key may have sent nothing but a handshake
        unseen = [each for each in every if not each.settled and (each.key or not self._keyed)]
        self.by_key = Counter()
        for ended in every:
            if not ended.settled and (ended.key or not self._keyed):
                ended.guessed = grown // _TIMES // len(unseen)
            ended.settled = True
            self.by_key[ended.key] += ended.left

    def excess(self, holders: list[PeerConnection]) -> Iterator[tuple[PeerConnection, str]]:
        """Return connections to be cut and why: strangers first, then of keys that hold most.

        holders: those that hold bytes that were not handed out.
        """
        limit, left = self._limit, self.by_key
        held_by: Counter[bytes] = Counter()
        for connection in holders:
            held_by[connection.owner] += connection.counter.held_bytes

        def last_to_go(connection: PeerConnection) -> tuple[bool, int, int]:
            known, key = bool(connection.client), held_by[connection.owner]
            # of a key's messages the most complete one is kept
            held = connection.counter.held_bytes
            return (known, -key, held) if known else (known, 0, -held)

        total = held_by.total()
        for connection in sorted(holders, key=last_to_go):
            held, of_key = connection.counter.held_bytes, held_by[connection.owner]
            behind = left[self._key(connection)]
            in_all = total + (left.total() if behind else 0)
            if held > limit or total > _UNFINISHED_IN_ALL * limit:
                yield connection, UNFINISHED
            elif held < of_key > _OF_ONE_KEY_TIMES * limit:
                yield connection, BACKLOG  # not the key's (or the strangers') largest
            elif behind and (of_key + behind > limit or in_all > _UNFINISHED_IN_ALL * limit):
                yield connection, BACKLOG
            else:
                continue
            total -= held
            held_by[connection.owner] -= held

    def _key(self, connection: PeerConnection) -> bytes:
        """For whom the bytes count that a connection leaves."""
        return connection.owner if self._keyed else b""
