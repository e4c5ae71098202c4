"""Measure the goodput of each direction by a transfer that leaves TCP's slow start, if it may.

The messages are those of trains (`docs/wire.md`, rule 6): their frames go up, and their pongs come
down with random bytes. So every edge knows them, and they count for the key's budgets as trains do.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from pilotfish.base.errors import MalformedError, RateLimitedError
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.link_estimator import TimedReply
from pilotfish.device_runtime.link.pending import SentRequest
from pilotfish.device_runtime.record import Probing
from pilotfish.wire.link.transfer_rate import Arrival, Goodput, estimate_goodput
from pilotfish.wire.messages import MAX_TRAIN, MAX_TRAIN_BYTES, Ping, Pong, Reply, Train

MOST_S: Final = 2.0  # time for which a transfer sends (s); what is under way then follows

_LEAST_PIECE, _MOST_PIECE = 1_340, MAX_TRAIN_BYTES  # bytes of a message
_PIECE_S: Final = 0.03  # time (s) of the link that a message takes
_FIRST_BYTES: Final = 32 << 10  # bytes under way at the start: more than TCP's first window
_FIRST_S: Final = 0.5  # but not more time (s) of the link
_MORE: Final = 2  # TCP's window grows by what was received, so this keeps it full
_QUEUE_S: Final = 0.1  # time (s) of the link's rate under way beyond that
_LOOK_EVERY: Final = 8  # arrivals between two looks at the rate


class GoodputReading(NamedTuple):
    """The goodput of both directions, and what the measurement cost.

    A direction is None if it could not be measured: the edge refused the transfer (its budget for
    this key is spent, or it is of a version that knows no trains), or the connection broke.
    """

    up: Goodput | None
    down: Goodput | None
    cost: Probing


def measure_goodput(
    link: EdgeLink, most_bytes: int, *, rtt_s: float, most_s: float = MOST_S
) -> GoodputReading:
    """Measure the goodput up, then down.

    most_bytes: maximum bytes of each direction. rtt_s: the RTT without queues. A transfer ends as
    soon as its rate is steady. Raises the link's errors if the edge is lost.
    """
    link.await_handshake()
    up_bps, down_bps = link.estimator.rates_bps()
    up = _Upload(link, most_bytes, up_bps, rtt_s).run(most_s)
    down = _Download(link, most_bytes, down_bps, rtt_s).run(most_s)
    cost = Probing(*(sum(values) for values in zip(up[1], down[1], strict=True)))
    link.estimator.on_rates(link.connection, None, None, cost)
    return GoodputReading(up[0], down[0], cost)


class _Transfer(ABC):
    """A transfer in one direction: requests, each answered by pongs in their order."""

    def __init__(
        self, link: EdgeLink, most_bytes: int, known_bps: float | None, rtt_s: float
    ) -> None:
        self._link = link
        self._most_bytes = most_bytes
        self._rtt_s = rtt_s
        self._begun_s = time.monotonic()
        self._connection = link.connection
        self._is_broken = False  # whether pongs may be missing
        self._arrivals: list[Arrival] = []
        self._waiting: deque[tuple[SentRequest, int]] = deque()  # and the bytes of each
        self._requested = self._received = 0
        self._uplink_bytes = self._downlink_bytes = self._sent_requests = 0
        first = _FIRST_BYTES if known_bps is None else int(known_bps * _FIRST_S / 8)
        self._first_bytes = max(_LEAST_PIECE * 4, min(_FIRST_BYTES, first))
        self._bps = known_bps or 0.0

    def run(self, most_s: float) -> tuple[Goodput | None, Probing]:
        """Transfer; return the goodput and the cost."""
        looked, result, is_whole = 0, None, True
        until_s = self._begun_s + most_s
        while True:
            left_s = until_s - time.monotonic()
            if is_whole and (result is None or result.is_bound):
                while left_s > 0.0 and (size := self._next_size(left_s)):
                    self._request(size)
            if not self._waiting or self._is_broken:
                break
            is_whole = self._receive() and is_whole
            if len(self._arrivals) >= looked + _LOOK_EVERY:
                looked = len(self._arrivals)
                result = estimate_goodput(self._arrivals, self._rtt_s)
                self._bps = self._recent_bps()
        result = estimate_goodput(self._arrivals, self._rtt_s) if is_whole else None
        return result, Probing(self._sent_requests, self._uplink_bytes, self._downlink_bytes)

    def _next_size(self, left_s: float) -> int:
        """Return the bytes to request now; 0: wait for some that are under way."""
        under_way = self._requested - self._received
        most = self._first_bytes + _MORE * self._received
        if self._bps and self._arrivals:
            bytes_per_s = self._bps / 8
            most = min(most, int(bytes_per_s * (_MORE * self._rtt_s + _QUEUE_S)))
            most = min(most, int(_MORE * bytes_per_s * left_s))
        room = max(most, self._piece()) - under_way
        size = self._piece()
        return size if room >= size and self._requested + size <= self._most_bytes else 0

    def _piece(self) -> int:
        """Return the bytes of a message: few, so that a slow link has many arrivals."""
        return max(_LEAST_PIECE, min(_MOST_PIECE, int(self._bps * _PIECE_S / 8)))

    def _recent_bps(self) -> float:
        """Return the rate of the last half of the arrivals."""
        middle, last = self._arrivals[len(self._arrivals) // 2], self._arrivals[-1]
        took_s = last.at_s - middle.at_s
        return 8 * (last.received_bytes - middle.received_bytes) / took_s if took_s > 0 else 0.0

    @abstractmethod
    def _request(self, size: int) -> None:
        """Send a request that transfers about ``size`` bytes."""

    @abstractmethod
    def _receive(self) -> bool:
        """Wait for the oldest request's next reply; False if it measures nothing."""

    def _send(self, message: Train | Ping, frames: tuple[bytes, ...], size: int) -> None:
        sent = self._link.send(message, frames)
        self._waiting.append((sent, size))
        self._requested += size
        self._sent_requests += 1
        self._uplink_bytes += sent.size

    def _next_pong(self, sent: SentRequest) -> TimedReply | None:
        """Wait for a pong of this request; None if the edge refused it, or the connection broke.

        A refused request has one failure in place of all its pongs. After a request that had to be
        sent again, other pongs may be lost, too: the transfer is broken.
        """
        try:
            answer = self._link.wait(sent, _is_pong(sent))
        except (MalformedError, RateLimitedError):
            return None
        self._downlink_bytes += answer.downlink_bytes
        self._is_broken = answer.resent or answer.connection != self._connection
        return None if self._is_broken else answer


class _Upload(_Transfer):
    """Sends frames; the pongs tell when the edge received them."""

    def _request(self, size: int) -> None:
        frame = secrets.token_bytes(size)  # random, so that nothing compresses it
        self._send(Train(nonce=secrets.randbits(63), pongs=1, bytes=0), (frame,), size)

    def _receive(self) -> bool:
        sent, size = self._waiting.popleft()
        answer = self._next_pong(sent)
        self._received += size
        if answer is None:
            return False
        segments = self._link.channel.segments()
        repeated = None if segments is None else segments.retransmitted
        at_s = _pong(answer).received_ns * 1e-9
        self._arrivals.append(Arrival(at_s, self._received, repeated))
        return True


class _Download(_Transfer):
    """Requests pongs with frames, and after each request the edge's count of repeated segments."""

    def _piece(self) -> int:
        return super()._piece() * MAX_TRAIN // 4

    def _request(self, size: int) -> None:
        pongs = MAX_TRAIN // 4
        train = Train(nonce=secrets.randbits(63), pongs=pongs, bytes=size // pongs)
        self._send(train, (), size // pongs * pongs)
        self._send(Ping(nonce=secrets.randbits(63)), (), 0)

    def _receive(self) -> bool:
        sent, _ = self._waiting.popleft()
        train = sent.message
        if isinstance(train, Ping):
            return self._note_repeated(sent)
        assert isinstance(train, Train)
        for _ in range(train.pongs):
            answer = self._next_pong(sent)
            self._received += train.bytes
            if answer is None:
                return False
            self._arrivals.append(Arrival(answer.received_ns * 1e-9, self._received))
        return True

    def _note_repeated(self, sent: SentRequest) -> bool:
        answer = self._next_pong(sent)
        if answer is None:
            return False
        pong = _pong(answer)
        if pong.segments and self._arrivals:
            self._arrivals[-1] = self._arrivals[-1]._replace(repeated=pong.repeated)
        return True


def _pong(answer: TimedReply) -> Pong:
    assert isinstance(answer.reply, Pong)
    return answer.reply


def _is_pong(request: SentRequest) -> Callable[[Reply], bool]:
    """Return a function that tells the pongs of a ping or train."""
    message = request.message
    assert isinstance(message, Train | Ping)
    return lambda reply: isinstance(reply, Pong) and reply.nonce == message.nonce
