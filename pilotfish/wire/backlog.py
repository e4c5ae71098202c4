"""Count the messages that stay in ZeroMQ's queue after their connections have ended.

ZeroMQ keeps the queued messages of a connection that is cut. If they did not count, a client that
reconnects at once could queue as much again each time. Their bytes count for the client's key;
without keys, and for strangers (connections without a message so far), they count for the empty
key. They stop counting when ZeroMQ delivers them, or when its queue was empty. They also stop after
a number of messages of other connections: ZeroMQ serves all connections in turn, so it would have
delivered all messages of the ended connection by then.

The number of bytes that arrive between the last check of a connection and its end is unknown. It is
estimated by the growth of the process in that time, without what open connections hold of it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pilotfish.wire.memory_watch import SLACK_BYTES, ReceiveCounter
from pilotfish.wire.peer_connection import BACKLOG, UNFINISHED, PeerConnection

# Limits of undelivered bytes, in messages of full size: for all peers, and for one key with several
# connections (or for all strangers, since a key is unknown before the first message).
_MAX_TOTAL, _MAX_PER_KEY = 4, 0.5
_MEMORY_PER_BYTE: Final = 4  # bytes of memory that one byte of a message takes
# An ended connection has no message left in the queue after ZeroMQ has delivered 2 messages for
# each connection, and 64 more.
_EMPTY_ROUNDS, _EMPTY_MESSAGES = 2, 64


@dataclass(slots=True)
class _EndedConnection:
    """A connection that ended with messages in the queue."""

    key: bytes
    counter: ReceiveCounter
    drop_messages: bool  # its remaining messages are dropped
    total_at_last: int  # number of messages from all peers when its last message was delivered
    own_messages: int  # number of messages delivered from it
    estimated_bytes: int = 0  # bytes that arrived after the last check
    checked: bool = False  # the connection had ended before the last check

    @property
    def left_bytes(self) -> int:
        return max(0, self.counter.left_bytes + self.estimated_bytes)


class Backlog:
    """The queued messages of ended connections; a caller that changes them must hold a lock.

    message_bytes: maximum size of one message. keyed: clients have keys.
    """

    def __init__(self, message_bytes: int, *, keyed: bool) -> None:
        # bytes at the last check, and bytes of connections that ended since then
        self.bytes_by_key: Counter[bytes] = Counter()
        self._limit = message_bytes + SLACK_BYTES
        self._keyed = keyed
        self._by_client: dict[bytes, _EndedConnection] = {}  # by ZeroMQ's routing id
        self._unidentified: list[_EndedConnection] = []  # connections without a delivered message
        self._unidentified_messages = 0  # delivered messages that may be from these

    def __len__(self) -> int:
        return len(self._by_client) + len(self._unidentified)

    def is_full(self, key: bytes = b"") -> bool:
        """Return whether a key's ended connections left so many bytes that new ones must wait."""
        backlog = self.bytes_by_key
        in_all = backlog[key] > 0 and backlog.total() > _MAX_TOTAL * self._limit
        return in_all or backlog[key] > _MAX_PER_KEY * self._limit

    def add(self, connection: PeerConnection, received: int) -> None:
        """Add an ended connection; received: number of messages delivered so far, of all peers."""
        counter, key = connection.counter, self._charged_key(connection)
        ended = _EndedConnection(key, counter, connection.drop_messages, received, counter.messages)
        if connection.client:
            self._by_client[connection.client] = ended
        else:
            self._unidentified.append(ended)
        self.bytes_by_key[key] += ended.left_bytes

    def note_message(self, client: bytes, size: int, frames: int) -> bool | None:
        """Count a delivered message of a client that is not connected.

        Return whether to drop it; None: no ended connection has this routing id.
        """
        ended = self._by_client.get(client)
        if ended is not None:
            ended.counter.add(size, frames)
            return ended.drop_messages
        return None

    def note_unidentified(self, size: int, frames: int) -> None:
        """Count a delivered message of a connection that ended before its first message."""
        self._unidentified_messages += 1
        if self._unidentified:
            self._unidentified[0].counter.add(size, frames)
            if self._unidentified[0].checked and not self._unidentified[0].left_bytes:
                self._unidentified.pop(0)

    def check(self, received: int, connected: int, grown: int, *, drained: bool) -> None:
        """Recount the bytes that ended connections have left.

        received: messages delivered so far, from all peers. connected: number of open connections.
        grown: bytes by which the process grew since the last check, without the bytes that open
        connections hold. drained: the queue was empty at some time since the last check.
        """
        turns = _EMPTY_ROUNDS * (connected + len(self)) + _EMPTY_MESSAGES

        def remains(ended: _EndedConnection, messages: int) -> bool:
            if ended.own_messages != messages:
                ended.own_messages, ended.total_at_last = messages, received
            emptied = ended.checked and (drained or received - ended.total_at_last > turns)
            return not (
                emptied or (ended.checked and not ended.left_bytes and not ended.drop_messages)
            )

        self._by_client = {
            client: ended
            for client, ended in self._by_client.items()
            if remains(ended, ended.counter.messages)
        }
        self._unidentified = [
            each for each in self._unidentified if remains(each, self._unidentified_messages)
        ]
        every = [*self._by_client.values(), *self._unidentified]
        # a client without a key may have sent nothing but a handshake
        unseen = [each for each in every if not each.checked and (each.key or not self._keyed)]
        self.bytes_by_key = Counter()
        for ended in every:
            if not ended.checked and (ended.key or not self._keyed):
                ended.estimated_bytes = grown // _MEMORY_PER_BYTE // len(unseen)
            ended.checked = True
            self.bytes_by_key[ended.key] += ended.left_bytes

    def excess(self, holders: list[PeerConnection]) -> Iterator[tuple[PeerConnection, str]]:
        """Yield connections to cut, with reasons: strangers first, then the keys with most bytes.

        holders: connections with held bytes.
        """
        limit, backlog = self._limit, self.bytes_by_key
        held_by: Counter[bytes] = Counter()
        for connection in holders:
            held_by[connection.owner] += connection.counter.held_bytes

        def order(connection: PeerConnection) -> tuple[bool, int, int]:
            known, key = bool(connection.client), held_by[connection.owner]
            # A key's connection with the most held bytes is cut last, since it is nearest to the
            # end of its message.
            held = connection.counter.held_bytes
            return (known, -key, held) if known else (known, 0, -held)

        total = held_by.total()
        for connection in sorted(holders, key=order):
            held, of_key = connection.counter.held_bytes, held_by[connection.owner]
            left = backlog[self._charged_key(connection)]
            in_all = total + (backlog.total() if left else 0)
            if held > limit or total > _MAX_TOTAL * limit:
                yield connection, UNFINISHED
            elif held < of_key > _MAX_PER_KEY * limit:
                yield connection, BACKLOG  # the key (or the strangers) has a connection with more
            elif left and (of_key + left > limit or in_all > _MAX_TOTAL * limit):
                yield connection, BACKLOG
            else:
                continue
            total -= held
            held_by[connection.owner] -= held

    def _charged_key(self, connection: PeerConnection) -> bytes:
        """Return the key for which a connection's bytes count."""
        return connection.owner if self._keyed else b""
