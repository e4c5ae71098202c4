"""Large messages in parts: a store with limits, and the uploads under way.

A transfer belongs to a client's key, not to a connection. So after a lost connection the client
continues the transfer. (Without keys a client is its connection, so it loses its transfers with the
connection.) A served upload is stored for some time: a client that missed the reply need not send
the message again. Large replies, which devices fetch in slices, are in `edge_runtime/replies.py`.

Memory is limited per key and in total. To make room, finished transfers are dropped first, the
oldest first; then transfers that were idle for `_IDLE_S`. Transfers in use stay, with one
exception: at the total limit, a new upload of a key replaces the longest idle upload of the key
with most bytes, if that key has more. Idle transfers expire after `_EXPIRE_S`.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from pilotfish.base.errors import BusyError, MalformedError, TooLargeError
from pilotfish.wire import messages as m
from pilotfish.wire.transfer import PACKING_BYTES

_EXPIRE_S: Final = 60.0  # idle time (s) after which a transfer is dropped
_IDLE_S: Final = 5.0  # idle time (s) after which a transfer may be dropped to make room
_EACH: Final = 64  # upper limit of a client's transfers in each direction: a device's lanes
_IN_ALL: Final = 1024  # upper limit of all clients' transfers in each direction
_TIMES: Final = 4  # upper limit of all clients' bytes, as a multiple of one client's limit


class _Transfer(Protocol):
    """Interface of a transfer in a `TransferStore`."""

    touched_s: float

    @property
    def size(self) -> int: ...

    @property
    def finished(self) -> bool: ...


K = TypeVar("K", bound=_Transfer)
TransferKey = tuple[bytes, bytes]  # owner, id of the transfer


class TransferStore(Generic[K]):
    """Store of transfers with limits per owner and in total.

    each_bytes: upper limit of one owner's bytes.
    """

    def __init__(self, each_bytes: int, clock: Callable[[], float]) -> None:
        self._each_bytes = each_bytes
        self.clock = clock
        self._all: OrderedDict[TransferKey, K] = OrderedDict()  # the longest idle transfer first
        self._bytes: Counter[bytes] = Counter()  # owner → bytes
        self._numbers: Counter[bytes] = Counter()
        self.total_bytes = 0  # bytes of all owners

    def __len__(self) -> int:
        return len(self._all)

    def get(self, key: TransferKey) -> K | None:
        """Return a transfer, not marked as in use; None if there is no such transfer."""
        return self._all.get(key)

    def touch(self, key: TransferKey) -> None:
        """Mark a transfer as in use."""
        self._all.move_to_end(key)
        self._all[key].touched_s = self.clock()

    def add(self, key: TransferKey, transfer: K) -> None:
        """Store a new transfer."""
        self._all[key] = transfer
        self._numbers[key[0]] += 1
        self.add_bytes(key, transfer.size)

    def add_bytes(self, key: TransferKey, size: int) -> None:
        """Count ``size`` bytes that were added to a transfer; negative: removed."""
        self._bytes[key[0]] += size
        self.total_bytes += size

    def drop(self, key: TransferKey) -> None:
        """Forget a transfer."""
        owner, transfer = key[0], self._all.pop(key)
        self._bytes[owner] -= transfer.size
        self.total_bytes -= transfer.size
        self._numbers[owner] -= 1
        if not self._numbers[owner]:
            del self._bytes[owner], self._numbers[owner]

    def has_room(self, key: TransferKey, size: int, *, new: bool, insist: bool = False) -> bool:
        """Make room for ``size`` more bytes of a transfer; return whether there is room now.

        new: whether the transfer is not stored yet. insist: whether to drop a transfer in use, too,
        if its owner stores more bytes than this transfer's owner would store afterwards.
        """
        owner = key[0]
        while self._bytes[owner] + size > self._each_bytes or self._numbers[owner] + new > _EACH:
            if not self._drop_idle(key, owner):
                return False
        while self.total_bytes + size > _TIMES * self._each_bytes:
            if not self._drop_any(key, self._bytes, size, insist=insist):
                return False
        while len(self) + new > _IN_ALL:
            if not self._drop_any(key, self._numbers, int(new), insist=insist):
                return False
        return True

    def _drop_idle(self, but: TransferKey, owner: bytes | None) -> bool:
        """Drop a finished or idle transfer; return False if there is none.

        but: transfer to keep. owner: owner of the transfer to drop; None: any owner.
        """
        idle_s = self.clock() - _IDLE_S
        mine = [
            (not transfer.finished, at, key)
            for at, (key, transfer) in enumerate(self._all.items())
            if key != but
            and (owner is None or key[0] == owner)
            and (transfer.finished or transfer.touched_s <= idle_s)
        ]
        if mine:
            self.drop(min(mine)[2])
        return bool(mine)

    def _drop_any(self, but: TransferKey, has: Counter[bytes], more: int, *, insist: bool) -> bool:
        """Drop a transfer of any owner; return False if none may be dropped.

        but: transfer to keep, which needs ``more`` room. has: owner → used room (bytes or number).
        """
        if self._drop_idle(but, None):
            return True
        return insist and self._drop_largest_owners(has, but[0], more)

    def _drop_largest_owners(self, has: Counter[bytes], owner: bytes, more: int) -> bool:
        """Drop the longest idle transfer of the owner who has most (bytes, or transfers).

        Returns False, and drops nothing, if ``owner`` would then have at least as much.
        """
        most = max(has, key=lambda each: has[each])
        if has[most] <= has[owner] + more:
            return False
        self.drop(next(key for key in self._all if key[0] == most))
        return True

    def expire(self) -> None:
        """Drop transfers that have been idle for `_EXPIRE_S`."""
        before_s = self.clock() - _EXPIRE_S
        while self._all:
            key, transfer = next(iter(self._all.items()))
            if transfer.touched_s > before_s:
                return
            self.drop(key)


@dataclass(slots=True)
class _Upload:
    """Received part of a message; ``body`` is emptied when it is no longer needed."""

    total: int
    touched_s: float
    body: bytearray = field(default_factory=bytearray)
    finished: bool = False  # whether the message is complete

    @property
    def size(self) -> int:
        return len(self.body)


class Progress(NamedTuple):
    """Progress of an upload: received bytes, and the message if it is to be served now."""

    offset: int
    message: m.Buffer | None = None


class Uploads:
    """Assembles messages from chunks.

    message_bytes: upper limit of one message, and of all messages of one client.
    """

    def __init__(self, message_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = message_bytes + PACKING_BYTES
        self._store: TransferStore[_Upload] = TransferStore(self._most, clock)
        self.expire = self._store.expire

    def __len__(self) -> int:
        return len(self._store)

    @property
    def total_bytes(self) -> int:
        """Bytes of all stored uploads."""
        return self._store.total_bytes

    def receive_chunk(self, owner: bytes, chunk: m.Chunk, data: m.Buffer) -> Progress:
        """Store a chunk and return the progress; an empty chunk only queries the progress.

        The progress contains the message when it is complete, and again after a later query, since
        the client then missed the reply. Raises `MalformedError` or `TooLargeError` for an invalid
        chunk, `BusyError` if there is no room now.
        """
        self._expect_valid(chunk, len(data))
        key = owner, chunk.transfer
        upload = self._store.get(key)
        if upload is None:
            if chunk.offset or not data:
                return Progress(0)
            self._expect_room(key, len(data), new=True)
            upload = _Upload(chunk.total, self._store.clock())
            self._store.add(key, upload)
        if upload.total != chunk.total:
            raise MalformedError("Two chunks of a message state different lengths of the message.")
        if upload.finished:
            return self._answer_again(key, upload, query=not data)
        return self._append(key, upload, chunk.offset, data)

    def mark_served(self, owner: bytes, transfer: bytes, *, keep: bool) -> None:
        """Record that a message is served; keep: whether to keep its bytes for a later query."""
        key = owner, transfer
        upload = self._store.get(key)
        if upload is not None and not keep:
            self._store.add_bytes(key, -upload.size)
            upload.body = bytearray()

    def _append(self, key: TransferKey, upload: _Upload, offset: int, data: m.Buffer) -> Progress:
        here = upload.size
        # a chunk that does not follow the received bytes is dropped
        new = data[here - offset :] if offset <= here else b""
        if new:
            self._expect_room(key, len(new), new=False)
            upload.body += new
            self._store.add_bytes(key, len(new))
            self._store.touch(key)
        if upload.size < upload.total:
            return Progress(upload.size)
        upload.finished = True
        return Progress(upload.total, memoryview(upload.body).toreadonly())

    def _answer_again(self, key: TransferKey, upload: _Upload, *, query: bool) -> Progress:
        if query and upload.body:
            return Progress(upload.total, memoryview(upload.body).toreadonly())
        return Progress(upload.total)

    def _expect_valid(self, chunk: m.Chunk, size: int) -> None:
        if chunk.total > self._most:
            raise TooLargeError(
                f"The message has {chunk.total} bytes; this edge accepts at most {self._most}. "
                "Use a smaller window, or a protocol that sends less."
            )
        if size > m.MAX_CHUNK or chunk.offset + size > chunk.total or not chunk.total:
            raise MalformedError(
                f"A chunk must have at most {m.MAX_CHUNK} bytes and lie within its message."
            )

    def _expect_room(self, key: TransferKey, size: int, *, new: bool) -> None:
        if not self._store.has_room(key, size, new=new, insist=True):
            raise BusyError(
                "Too many large messages are being sent to this edge; try again a little later."
            )
