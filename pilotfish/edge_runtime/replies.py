"""Replies to devices: results of generations, cheap replies within limits, and refusals.

A result (verdict or tokens) is computed by a target pass. A cheap reply needs no pass, so its bytes
are charged to its client; a result that is sent again is cheap, too. A reply with more frame bytes
than the device accepts at once is sent in slices, which the device fetches one after another.
"""

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import zmq

from pilotfish.base.errors import PilotfishError, RateLimitedError
from pilotfish.edge_runtime.admission import Admission
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.generation import Generation
from pilotfish.edge_runtime.scheduler import Job
from pilotfish.edge_runtime.transfers import TransferKey, TransferStore
from pilotfish.wire import messages as m
from pilotfish.wire.transfer import pack
from pilotfish.wire.transport import Envelope, Listener

_log = logging.getLogger("pilotfish.edge")

_HEADER_BYTES: Final = 256  # approximate size of a reply's header (bytes)
_STORED_BYTES: Final = 16 << 20  # upper limit of a client's stored replies (bytes), as on a device
_FIRST_BYTES: Final = 16 << 10  # upper limit of a reply's first slice (bytes)
_CLIENTS: Final = 4096  # upper limit of connections with a recorded slice limit (the newest)

Send = Callable[[bytes, m.Reply, Sequence[m.Buffer]], bool]  # returns whether the reply was sent


def create_sender(listener: Listener, metrics: EdgeMetrics) -> Send:
    """Create the function that sends a reply over the listener and counts its bytes."""

    def send(client: bytes, message: m.Reply, frames: Sequence[m.Buffer]) -> bool:
        try:
            metrics.bytes_out += listener.send(client, message, frames)
        except zmq.ZMQError as error:  # the device does not read or is gone; it may retry later
            metrics.dropped_replies += 1
            _log.debug("a device did not receive a reply: %s", error)
            return False
        return True

    return send


def job_times(job: Job, received_ns: int) -> m.Times:
    """Return the times of a finished job whose message arrived at ``received_ns``."""
    return m.Times(
        received_ns=received_ns,
        held_ns=time.monotonic_ns() - received_ns,
        queue_ns=max(0, job.started_ns - job.queued_ns),
        verify_ns=job.done_ns - job.started_ns,
    )


@dataclass(slots=True)
class _Download:
    """Reply that the device fetches in slices; ``sent``: number of bytes sent so far."""

    body: bytes
    touched_s: float
    sent: int = 0

    @property
    def size(self) -> int:
        return len(self.body)

    @property
    def finished(self) -> bool:
        return self.sent == len(self.body)


class _Peer(NamedTuple):
    """Connection's owner and slice limit: replies with more frame bytes are sent in slices."""

    owner: bytes
    most: int


class Downloads:
    """Sends replies, and stores large replies for devices that fetch them in slices.

    send: function that sends a message; returns whether it was sent.
    """

    def __init__(self, send: Send, clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._store: TransferStore[_Download] = TransferStore(_STORED_BYTES, clock)
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        self.expire = self._store.expire

    def __len__(self) -> int:
        return len(self._store)

    def set_slice_limit(self, client: bytes, owner: bytes, most: int) -> None:
        """Set a connection's slice limit: replies with more frame bytes are sent in slices.

        most: the limit; 0: no reply is sent in slices.
        """
        self._peers.pop(client, None)
        if most:
            self._peers[client] = _Peer(owner, most)
            if len(self._peers) > _CLIENTS:
                self._peers.popitem(last=False)

    def send(self, client: bytes, reply: m.Reply, frames: Sequence[m.Buffer]) -> bool:
        """Send a reply or its first slice; return whether it was sent."""
        peer = self._peers.get(client) if frames else None
        if peer is None or sum(map(len, frames)) <= peer.most:
            return self._send(client, reply, frames)
        body, transfer = pack(m.encode(reply), frames), secrets.token_bytes(8)
        key = peer.owner, transfer
        if len(body) > _STORED_BYTES or not self._store.has_room(key, len(body), new=True):
            return self._send(client, reply, frames)
        self._store.add(key, _Download(body, self._store.clock()))
        more = m.More(transfer=transfer, offset=0, bytes=min(_FIRST_BYTES, peer.most))
        taken = self._send_slice(client, key, more)
        if not taken:
            self._store.drop(key)
        return taken

    def more(self, client: bytes, owner: bytes, more: m.More) -> int:
        """Send a requested slice; return the number of its bytes that were sent before.

        If the reply is no longer stored, a slice with total 0 is sent.
        """
        key = owner, more.transfer
        reply = self._store.get(key)
        if reply is None:
            reply_gone = m.Slice(transfer=more.transfer, offset=more.offset, total=0)
            self._send(client, reply_gone, (b"",))
            return 0
        self._store.touch(key)
        again = min(more.bytes, max(0, reply.sent - more.offset))
        self._send_slice(client, key, more)
        return again

    def _send_slice(self, client: bytes, key: TransferKey, more: m.More) -> bool:
        reply = self._store.get(key)
        assert reply is not None
        data = memoryview(reply.body)[more.offset : more.offset + more.bytes]
        reply.sent = max(reply.sent, more.offset + len(data))
        part = m.Slice(transfer=more.transfer, offset=more.offset, total=len(reply.body))
        return self._send(client, part, (data,))


class Replies:
    """Sends all replies of the edge.

    send: function that sends a message; returns whether it was sent.
    """

    def __init__(self, send: Send, admission: Admission, metrics: EdgeMetrics) -> None:
        self._downloads = Downloads(send)
        self.send: Send = self._downloads.send
        self.set_slice_limit = self._downloads.set_slice_limit
        self.expire = self._downloads.expire
        self._admission = admission
        self._metrics = metrics

    def send_result(
        self,
        generation: Generation,
        client: bytes,
        reply: m.Verdict | m.Tokens,
        frames: Sequence[m.Buffer],
    ) -> int:
        """Send a result, with the prompt's log-probabilities if due; return its frames' bytes.

        The log-probabilities are sent once, with the first result of the generation. They are sent
        again only if sending failed, or if the device retries over a new connection.
        """
        prompt = generation.prompt_logprobs
        if prompt is None or prompt.start != reply.start or prompt.sent_to == client:
            self.send(client, reply, frames)
        else:
            frames = (*frames, prompt.frame)
            if self.send(client, reply, frames):
                prompt.sent_to = client
        return sum(map(len, frames))

    def expect_room(self, envelope: Envelope) -> None:
        """Raise `RateLimitedError` if the client has no bytes left for cheap replies."""
        if not self._admission.may_send(envelope.owner):
            raise RateLimitedError(
                "This key requests too many bytes that need no target pass; slow down."
            )

    def send_cheap(
        self, envelope: Envelope, reply: m.Reply, frames: Sequence[m.Buffer] = ()
    ) -> None:
        """Send a cheap reply to a message, and charge its bytes."""
        self.send(envelope.client, reply, frames)
        self.charge(envelope, sum(map(len, frames)))

    def charge(self, envelope: Envelope, size: int) -> None:
        """Charge a cheap reply with ``size`` bytes of frames: the bytes beyond its message's."""
        beyond = max(0, _HEADER_BYTES + size - envelope.size)
        self._admission.charge_bytes(envelope.owner, beyond)

    def send_slice(self, more: m.More, envelope: Envelope) -> None:
        """Send the requested slice of a large reply; bytes that are sent again are charged."""
        self.expect_room(envelope)
        self.charge(envelope, self._downloads.more(envelope.client, envelope.owner, more))

    def refuse(
        self,
        envelope: Envelope,
        message: m.DeviceMessage | None,
        error: PilotfishError,
        *,
        admitted: bool = True,
    ) -> None:
        """Refuse a message. message: None if it was not decoded. admitted: within its rate."""
        if m.is_hint(envelope.header):
            self._metrics.hints["refused"] += 1  # a hint never gets a reply
            return
        self._metrics.refusals[error.code] += 1
        # the message rate limits replies to admitted messages; this limits the other refusals
        if not admitted and not self._admission.may_send(envelope.owner):
            self._metrics.dropped_replies += 1
            return
        about = message if isinstance(message, m.Begin | m.Window | m.States | m.Pull) else None
        failure = m.Failure(
            code=error.code,
            message=str(error)[:1024],
            session=about.session if about else None,
            generation=about.generation if about else None,
            start=about.start if isinstance(about, m.Window | m.States | m.Pull) else None,
        )
        self.send_cheap(envelope, failure)
