"""Send large messages in acknowledged chunks; after a break, continue with the missing bytes.

In:  a message and its frames. Out: the number of sent bytes, once the edge has the whole message.
     If the reply to a whole message is lost, the device only asks for the edge's byte count;
     then the edge handles the message again.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Final, Protocol

from pilotfish.base.errors import BusyError, from_code
from pilotfish.device_runtime.link.flow import SEGMENT_BYTES, ChunkFlow
from pilotfish.device_runtime.link.link_estimator import LinkEstimator
from pilotfish.device_runtime.link.reassembly import ReceivedReply
from pilotfish.device_runtime.link.retry import BUSY, RESEND_S, RetryingLink
from pilotfish.wire import messages as m
from pilotfish.wire.transfer import pack

_SLICE_S: Final = 0.1  # longest wait for an acknowledgement between two checks
_MAX_SETBACKS: Final = 8  # maximum times that the edge may lose bytes of a message
_NONE: Final = 0  # no connection


class _ChunkedUpload:
    """One message and its progress.

    acked: number of bytes that the edge has. next: offset of the next byte to send. is_unsure: the
    edge must report its number of bytes before more are sent. is_asked: the question for this
    number was sent. progress_s: time of the last progress, or of the beginning (monotonic).
    """

    def __init__(self, message: m.DeviceMessage, frames: Sequence[m.Buffer]) -> None:
        self.message = message
        self._transfer = secrets.token_bytes(8)
        self._body = memoryview(pack(m.encode(message), frames))
        self.acked = self.next = 0
        self.connection = _NONE
        self.is_unsure = self.is_asked = False
        self.progress_s = time.monotonic()
        self._setbacks = 0

    @property
    def left(self) -> int:
        """Number of bytes that are not sent yet."""
        return len(self._body) - self.next

    @property
    def complete(self) -> bool:
        """Whether the edge has all bytes."""
        return self.acked == len(self._body)

    def chunk(self, size: int) -> tuple[m.Chunk, list[m.Buffer]]:
        """Return the next chunk, of ``size`` bytes; 0: a chunk that asks how many the edge has."""
        data = self._body[self.next : self.next + size]
        chunk = m.Chunk(transfer=self._transfer, offset=self.next, total=len(self._body))
        return chunk, [data]

    def ask(self) -> None:
        """Ask the edge how many bytes it has, before more are sent."""
        self.is_unsure, self.is_asked, self.next = True, False, self.acked

    def on_acknowledged(self, ack: m.Ack) -> bool:
        """Update the edge's number of bytes; returns whether it has more than before."""
        if ack.transfer != self._transfer or ack.offset > len(self._body):
            return False
        before, self.acked, self.is_unsure = self.acked, ack.offset, False
        if ack.offset < before:  # another edge, or the edge lost bytes
            self._setbacks += 1
            if self._setbacks > _MAX_SETBACKS:
                raise BusyError("The edge keeps losing the bytes of a message; try later.")
            self.next = ack.offset
        self.next = max(self.next, ack.offset)
        if ack.offset > before:
            self.progress_s = time.monotonic()
        return ack.offset > before


class UploadLink(RetryingLink, Protocol):
    """The interface of a link over which messages are sent in chunks."""

    uplink: ChunkFlow
    estimator: LinkEstimator

    @property
    def takes_chunks(self) -> bool:
        """Whether large messages may be sent in chunks."""

    def await_handshake(self) -> None:
        """Wait for a connection with a completed handshake."""

    def try_send(self, message: m.DeviceMessage, frames: Sequence[m.Buffer] = ()) -> int | None:
        """Send a message without waiting; returns its size, or None if there is no connection."""

    def receive(self, timeout_s: float) -> ReceivedReply | None:
        """Return the next reply; None after a time-out."""

    def on_progress(self) -> None:
        """Record that more of a large message has arrived than before."""

    def check_transfer(self, last_checked_s: float) -> None:
        """Raise an error if the edge was away, or accepted nothing, for too long."""


class ChunkedUploads:
    """Sends the large messages of one link."""

    def __init__(self, link: UploadLink) -> None:
        self._link = link
        self._flow = link.uplink
        self._upload: _ChunkedUpload | None = None

    def send(
        self, message: m.DeviceMessage, frames: Sequence[m.Buffer], size: int, *, again: bool
    ) -> int | None:
        """Send a large message, or the part that the edge lacks; returns the sent bytes.

        Returns None if the message must go in one piece: the link carries it in a short time, or
        takes no chunks. size: bytes of the frames, more than `LEAST_BYTES`. again: the message was
        sent before, and may be lost.
        """
        if not self._link.takes_chunks:
            return None
        self._flow.follow(self._link.connection)
        upload = self._upload
        if upload is not None and upload.message is message:
            upload.ask()
        elif size > self._whole_bytes(again):
            upload = self._upload = _ChunkedUpload(message, frames)
        else:
            self._upload = None
            return None
        try:
            return self._deliver(upload)
        finally:
            self._flow.forget()  # an interrupted message must not delay the next one

    def _whole_bytes(self, again: bool) -> int:
        most = self._flow.whole_bytes(self._link.estimator.rates_bps()[0])
        return min(most, SEGMENT_BYTES) if again else most

    def _deliver(self, upload: _ChunkedUpload) -> int:
        size, begun_s = 0, time.monotonic()
        while not upload.complete or upload.is_unsure:
            self._link.await_handshake()
            if upload.connection not in (_NONE, self._link.connection):
                upload.ask()
            self._flow.follow(self._link.connection)
            upload.connection = self._link.connection
            size += self._push(upload)
            checked_s = time.monotonic()
            try:
                self._receive_ack(upload)
            except BUSY as error:
                self._link.wait_or_raise(error, begun_s)
                upload.ask()
            self._check_progress(upload, checked_s)
        if self._flow.full_bps is not None:
            self._link.estimator.on_transfer(up_bps=self._flow.full_bps)
        return size

    def _push(self, upload: _ChunkedUpload) -> int:
        """Send all chunks that may be sent now; returns their bytes."""
        if upload.is_unsure:
            return 0 if upload.is_asked else self._ask(upload)
        size = 0
        while more := self._flow.next_size(upload.left):
            sent = self._link.try_send(*upload.chunk(more))
            if sent is None:
                break
            upload.next += more
            size += sent
            self._flow.on_sent(upload.next, more)
        return size

    def _ask(self, upload: _ChunkedUpload) -> int:
        self._flow.forget()
        sent = self._link.try_send(*upload.chunk(0))
        upload.is_asked = sent is not None
        return sent or 0

    def _receive_ack(self, upload: _ChunkedUpload) -> None:
        """Wait briefly for an acknowledgement; raise the error if the edge refused a chunk."""
        arrived = self._link.receive(_SLICE_S)
        if arrived is None:
            return
        reply = arrived.reply
        if isinstance(reply, m.Ack):
            if upload.on_acknowledged(reply):
                self._flow.on_acknowledged(upload.acked)
                self._link.on_progress()
            elif self._flow.first_offset > upload.acked:  # the edge lacks a chunk
                upload.ask()
        elif isinstance(reply, m.Failure) and reply.session is None:
            raise from_code(reply.code, reply.message)

    def _check_progress(self, upload: _ChunkedUpload, last_checked_s: float) -> None:
        """Ask the edge again after a time without progress; raise if it is away for too long."""
        if time.monotonic() - upload.progress_s > RESEND_S:
            upload.progress_s = time.monotonic()
            upload.ask()
        self._link.check_transfer(last_checked_s)
