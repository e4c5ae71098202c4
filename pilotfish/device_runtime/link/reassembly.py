"""Assemble large replies, which the edge sends in slices on request.

In:  arriving messages. Out: whole replies in order, and requests for more slices. The edge is not
     trusted: its slices get no more memory than one reply may have.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pilotfish.base.errors import BusyError, MalformedError
from pilotfish.device_runtime.link.flow import ChunkFlow
from pilotfish.wire import messages as m
from pilotfish.wire.transfer import PACKING_BYTES, unpack

REPLY_BYTES: Final = 16 << 20  # maximum bytes of a reply; the longest replies (`dssd`) have 1 MB
_MAX_QUEUED: Final = 256  # maximum replies that wait for an earlier, large reply
_MAX_SETBACKS: Final = 8  # maximum times that the edge may lose a reply during its transfer


class ReceivedReply(NamedTuple):
    """A reply, its frames and size. sliced: it came in slices, so its time measures nothing."""

    reply: m.Reply
    frames: list[m.Buffer]
    size: int
    sliced: bool = False


@dataclass(slots=True)
class _ReplyDownload:
    transfer: bytes
    total: int
    requested: int = 0  # offset of the end of the requested bytes
    size: int = 0  # number of arrived bytes, headers included
    body: bytearray = field(default_factory=bytearray)


class Reassembly:
    """The replies of one link. flow: the chunks in flight on its downlink.

    has_begun: a slice has arrived; before, every message is a whole reply. is_lost: the edge has
    lost the rest of a reply, so the request must be sent again.
    """

    def __init__(self, flow: ChunkFlow) -> None:
        self._flow = flow
        self._current: _ReplyDownload | None = None
        self._ready: deque[ReceivedReply] = deque()
        self._queued: deque[ReceivedReply] = deque()
        self._queued_bytes = 0
        # highest number of bytes of the expected reply that had arrived
        self._furthest = self._reported = 0
        self._setbacks = 0
        self.has_begun = self.is_lost = False

    @property
    def is_incomplete(self) -> bool:
        """Whether a part of a reply is missing."""
        return self._current is not None

    def next(self) -> ReceivedReply | None:
        """Return the next whole reply, if any."""
        return self._ready.popleft() if self._ready else None

    def advance(self) -> bool:
        """Whether more of the reply has arrived since the last call than ever before."""
        before, self._reported = self._reported, self._furthest
        return self._furthest > before

    def take(self, arrival: ReceivedReply) -> None:
        """Add an arriving message."""
        reply, current = arrival.reply, self._current
        self.has_begun = self.has_begun or isinstance(reply, m.Slice)
        if isinstance(reply, m.Slice) and (current is None or reply.transfer == current.transfer):
            self._take_slice(reply, arrival)
        elif current is None or not _is_ordered(reply):
            self._ready.append(arrival)
        elif len(self._queued) < _MAX_QUEUED and self._queued_bytes + arrival.size <= REPLY_BYTES:
            self._queued.append(arrival)
            self._queued_bytes += arrival.size

    def chunk_requests(self) -> list[m.More]:
        """Return the requests for slices that may be sent now."""
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
        """Request again all bytes that have not arrived."""
        self._flow.forget()
        if self._current is not None:
            self._current.requested = len(self._current.body)

    def abandon(self) -> None:
        """Drop the incomplete reply: nobody waits for it any more."""
        if self._current is not None:
            self._finish()
        self.is_lost = False
        self._reset_progress()

    def begin_again(self) -> None:
        """Clear `is_lost`: the request is sent again."""
        self.is_lost = False

    def _reset_progress(self) -> None:
        """Reset the progress for another reply."""
        self._furthest = self._reported = self._setbacks = 0

    def _take_slice(self, part: m.Slice, arrival: ReceivedReply) -> None:
        if self._current is None and (part.offset or not part.total):
            return  # slice of an abandoned reply
        try:
            self._check_slice(part, arrival.frames)
            data = arrival.frames[0]
            if self._current is None:
                self._flow.forget()
                self._current = _ReplyDownload(part.transfer, part.total, requested=len(data))
            if not part.total:
                self._on_lost()
            elif part.offset == len(self._current.body):  # otherwise it is a repetition
                self._append(self._current, data, arrival.size)
        except MalformedError:
            self._finish()
            raise

    def _check_slice(self, part: m.Slice, frames: "list[m.Buffer]") -> None:
        most = REPLY_BYTES + PACKING_BYTES
        if len(frames) != 1 or part.total > most or (not part.total and len(frames[0])):
            raise MalformedError(
                "A slice from the edge has too many frames, or its message is too long."
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
            raise MalformedError("The edge sent a slice within slices.")
        self._ready.append(ReceivedReply(reply, frames, current.size, sliced=True))
        self._reset_progress()
        self._finish()

    def _on_lost(self) -> None:
        """Handle a reply that the edge lost before it was sent whole."""
        self._finish()
        self._setbacks += 1
        if self._setbacks > _MAX_SETBACKS:
            raise BusyError("The edge keeps losing its reply; try later.")
        self.is_lost = True

    def _finish(self) -> None:
        """End the reply, and handle the replies that arrived after it."""
        queued, self._queued, self._queued_bytes = self._queued, deque(), 0
        self._current = None
        self._flow.forget()
        for arrival in queued:
            self.take(arrival)


def _is_ordered(reply: m.Reply) -> bool:
    """Whether a reply must not overtake earlier ones."""
    if isinstance(reply, m.Failure):
        return reply.session is not None
    return isinstance(reply, m.Verdict | m.StatesRequest | m.Tokens | m.Slice)
