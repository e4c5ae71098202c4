"""Put large replies together, which the edge sends in slices as the device asks for them.

In: what arrives. Out: whole replies in their order, and what to ask for next. What an edge sends is
not believed: it gets as much memory as one reply may have.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from pilotfish.base.errors import BusyError, MalformedError
from pilotfish.device_runtime.link.flow import ChunkFlow
from pilotfish.device_runtime.link.line import REPLY_BYTES, ReceivedReply
from pilotfish.wire import messages as m
from pilotfish.wire.transfer import PACKING_BYTES, unpack

_MAX_QUEUED: Final = 256  # replies that wait for a large one before them
_MAX_SETBACKS: Final = 8  # times that the edge may forget a reply while it is fetched


@dataclass(slots=True)
class _ReplyDownload:
    transfer: bytes
    total: int
    requested: int = 0  # the bytes before here were asked for
    size: int = 0  # bytes that arrived, headers included
    body: bytearray = field(default_factory=bytearray)


class Reassembly:
    """The replies of one link. flow: that of its downlink.

    gone: the edge does not have the rest of a reply any more, so the request must be sent again.
    """

    def __init__(self, flow: ChunkFlow) -> None:
        self._flow = flow
        self._current: _ReplyDownload | None = None
        self._ready: deque[ReceivedReply] = deque()
        self._queued: deque[ReceivedReply] = deque()
        self._queued_bytes = 0
        self._furthest = self._reported = (
            0  # bytes of the reply that is waited for: the most so far
        )
        self._setbacks = 0
        self.is_lost = False

    @property
    def is_incomplete(self) -> bool:
        """Whether a part of a reply is missing."""
        return self._current is not None

    def next(self) -> ReceivedReply | None:
        """The next whole reply, if there is one."""
        return self._ready.popleft() if self._ready else None

    def advance(self) -> bool:
        """Whether more of a reply has come since the last call than ever before."""
        before, self._reported = self._reported, self._furthest
        return self._furthest > before

    def take(self, arrival: ReceivedReply) -> None:
        """Take in what has arrived."""
        reply, current = arrival.reply, self._current
        if isinstance(reply, m.Slice) and (current is None or reply.transfer == current.transfer):
            self._take_slice(reply, arrival)
        elif current is None or not _is_ordered(reply):
            self._ready.append(arrival)
        elif len(self._queued) < _MAX_QUEUED and self._queued_bytes + arrival.size <= REPLY_BYTES:
            self._queued.append(arrival)
            self._queued_bytes += arrival.size

    def chunk_requests(self) -> list[m.More]:
        """What may be asked for now."""
        requests: list[m.More] = []
        if (current := self._current) is None:
            return requests
        while size := self._flow.next_size(current.total - current.requested):
            more = m.More(transfer=current.transfer, offset=current.requested, bytes=size)
            current.requested += size
            self._flow.on_sent(current.requested, size)
            requests.append(more)
        return requests

    def resume(self) -> None:
        """Ask again for what was asked for and has not come."""
        self._flow.forget()
        if self._current is not None:
            self._current.requested = len(self._current.body)

    def abandon(self) -> None:
        """Forget what is missing: nobody waits for it any more."""
        if self._current is not None:
            self._finish()
        self.is_lost = False
        self._reset_progress()

    def begin_again(self) -> None:
        """Note that the request whose reply the edge has forgotten is sent again."""
        self.is_lost = False

    def _reset_progress(self) -> None:
        """Note that the next reply is another one."""
        self._furthest = self._reported = self._setbacks = 0

    def _take_slice(self, part: m.Slice, arrival: ReceivedReply) -> None:
        if self._current is None and (part.offset or not part.total):
            return  # of a reply for which nobody waits any more
        try:
            self._check_slice(part, arrival.frames)
            data = arrival.frames[0]
            if self._current is None:
                self._flow.forget()
                self._current = _ReplyDownload(part.transfer, part.total, requested=len(data))
            if not part.total:
                self._on_lost()
            elif part.offset == len(self._current.body):  # else it came before
                self._append(self._current, data, arrival.size)
        except MalformedError:
            self._finish()
            raise

    def _check_slice(self, part: m.Slice, frames: "list[m.Buffer]") -> None:
        most = REPLY_BYTES + PACKING_BYTES
        if len(frames) != 1 or part.total > most or (not part.total and len(frames[0])):
            raise MalformedError(
                "The edge's slice has too many frames, or its message is too long."
            )
        known = part.total if self._current is None else self._current.total
        if part.total not in (0, known) or (part.total and part.offset + len(frames[0]) > known):
            raise MalformedError("The edge's slices contradict each other.")

    def _append(self, current: _ReplyDownload, data: m.Buffer, size: int) -> None:
        current.body += data
        current.size += size
        self._furthest = max(self._furthest, len(current.body))
        self._flow.on_acknowledged(len(current.body))
        if len(current.body) < current.total:
            return
        header, frames = unpack(memoryview(current.body).toreadonly())
        reply = m.decode_reply(header)
        if isinstance(reply, m.Slice):
            raise MalformedError("A reply that comes in slices is no slice itself.")
        self._ready.append(ReceivedReply(reply, frames, current.size, sliced=True))
        self._reset_progress()
        self._finish()

    def _on_lost(self) -> None:
        """Note that the edge has not got the rest any more."""
        self._finish()
        self._setbacks += 1
        if self._setbacks > _MAX_SETBACKS:
            raise BusyError("The edge forgets its reply again and again; try later.")
        self.is_lost = True

    def _finish(self) -> None:
        """Go on with what came behind the reply."""
        queued, self._queued, self._queued_bytes = self._queued, deque(), 0
        self._current = None
        self._flow.forget()
        for arrival in queued:
            self.take(arrival)


def _is_ordered(reply: m.Reply) -> bool:
    """Whether a reply must not overtake one that came before it."""
    if isinstance(reply, m.Failure):
        return reply.session is not None
    return isinstance(reply, m.Verdict | m.StatesRequest | m.Tokens | m.Slice)
