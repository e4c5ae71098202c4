"""The device's side of the connection: find the edge, ask it, notice when it is gone.

A request is bytes that may be sent again: when the connection breaks and comes back, or a reply is
overdue, the very same bytes go out, and the edge answers what it has answered already.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import zmq

from device_runtime.record import Probing, Timings
from engines.artifact import Manifest
from wire.errors import (
    AccessDeniedError,
    EdgeLostError,
    EdgeUnreachableError,
    MalformedError,
    from_code,
)
from wire.keys import DeviceKeys
from wire.link.meter import FRESH_S, LinkMeter, Transit
from wire.link.radio import signal_dbm
from wire.link.state import LinkState, Reading
from wire.messages import (
    VERSION,
    Buffer,
    Failure,
    Hello,
    Ping,
    Pong,
    Reply,
    Request,
    Times,
    Welcome,
)
from wire.transport import Channel

CONNECT_S = 2.2  # until an edge that does not answer counts as absent
RESEND_S = 10.0  # a reply that is overdue for so long may have been lost
PATIENCE_S = 120.0  # and after so long nobody waits for it any more
RATES_FRESH_S = 60.0
PROBE_BYTES = 12_000  # fits a connection's first flight, and is large enough to tell a rate
_REPLY_BYTES = 256 * 1024 * 1024


class Answer(NamedTuple):
    """A reply, its bytes both ways, and when the request left and the reply came (monotonic).

    resent: the request went out more than once, so that its times say nothing about the link.
    """

    reply: Reply
    frames: Sequence[Buffer]
    uplink_bytes: int
    downlink_bytes: int
    sent_ns: int
    received_ns: int
    resent: bool


class EdgeLink:
    """One edge, connected. Raises typed errors that say what to do; never hangs."""

    def __init__(self, endpoint: str, keys: DeviceKeys | None) -> None:
        self._channel = Channel(endpoint, keys, _REPLY_BYTES)
        self._encrypted = keys is not None
        self._meter = LinkMeter()
        self._measured = self._greeted = 0  # the connection that the meter, and the welcome, is of
        self._echoes = True  # the edge sends the bytes of a ping back
        self._ahead_bytes = 0  # sent since the last reply, without a reply of its own
        self.probing = Probing()
        try:
            self._wait_for_connection(EdgeUnreachableError)
        except BaseException:
            self.close()
            raise

    def greet(self, manifest: Manifest) -> Welcome:
        """Make sure that both ends speak the same wire and share a vocabulary."""
        hello = Hello(
            version=VERSION,
            tokenizer=manifest.tokenizer_fingerprint,
            vocab_size=manifest.vocab_size,
            padded_vocab_size=manifest.padded_vocab_size,
            hidden_size=manifest.dimensions.hidden,
        )
        welcome = self.ask(hello, (), lambda reply: isinstance(reply, Welcome)).reply
        assert isinstance(welcome, Welcome)
        self._greeted = self._channel.connections
        return welcome

    @property
    def renewed(self) -> bool:
        """There is another connection than the one that was greeted on, maybe to another edge."""
        self._channel.catch_up()
        return self._channel.connected and self._channel.connections != self._greeted

    # What is known about the link

    def measure(self, answer: Answer, edge_received_ns: int, held_ns: int) -> Transit:
        """Seconds that an exchange spent on the link each way; the meter learns from it."""
        ahead, self._ahead_bytes = self._ahead_bytes, 0
        if self._measured != self._channel.connections:
            # another way maybe, and another clock
            self._meter, self._measured = LinkMeter(), self._channel.connections
        return self._meter.exchange(
            up_bytes=answer.uplink_bytes,
            down_bytes=answer.downlink_bytes,
            ahead_bytes=ahead,
            sent_ns=answer.sent_ns,
            received_ns=answer.received_ns,
            edge_received_ns=edge_received_ns,
            held_ns=held_ns,
            learn=not answer.resent,
        )

    def timings(self, answer: Answer, times: Times, started_ns: int, drafted_ns: int) -> Timings:
        """The stages of a round that was started and drafted at these times (monotonic)."""
        # an edge can say what it likes
        held_ns = min(times.held_ns, answer.received_ns - answer.sent_ns)
        verify_ns = min(times.verify_ns, held_ns)
        transit = self.measure(answer, times.received_ns, held_ns)
        return Timings(
            draft=(drafted_ns - started_ns) * 1e-9,
            encode=(answer.sent_ns - drafted_ns) * 1e-9,
            uplink=transit.up_s,
            queue=(held_ns - verify_ns) * 1e-9,
            verify=verify_ns * 1e-9,
            downlink=transit.down_s,
            settle=(time.monotonic_ns() - answer.received_ns) * 1e-9,
        )

    def ping(self, size: int = 0) -> None:
        """Measure the RTT, or the rates with ``size`` bytes each way; waits for the answer.

        An edge that is older than this measure sends none back: then the downlink stays unknown.
        """
        nonce = secrets.randbits(63)
        frames = (secrets.token_bytes(size),) if size else ()  # what no link can compress
        answer = self.ask(
            Ping(nonce=nonce),
            frames,
            lambda reply: isinstance(reply, Pong) and reply.nonce == nonce,
        )
        pong = answer.reply
        assert isinstance(pong, Pong)
        self._echoes = self._echoes and len(answer.frames) == len(frames)
        self.measure(answer, pong.received_ns, pong.sent_ns - pong.received_ns)
        pings, up, down = self.probing
        self.probing = Probing(pings + 1, up + answer.uplink_bytes, down + answer.downlink_bytes)

    def refresh(self, *, rates: bool) -> None:
        """See to it that RTT, and rates if wanted, are known; with one ping, or none.

        What real messages have told lately needs none. One ping cannot tell both: rates that are
        due go first, as long as the RTT is not as old.
        """
        state = self._meter.state()
        readings = (state.up, state.down) if self._echoes else (state.up,)
        due = rates and any(_older(rate, RATES_FRESH_S) for rate in readings)
        if due and not _older(state.rtt, RATES_FRESH_S):
            self.ping(PROBE_BYTES)
        elif _older(state.rtt, FRESH_S):
            self.ping()

    def next_answer(self) -> None:
        """What is measured from now on belongs to another answer."""
        self._meter.next_answer()

    def state(self) -> LinkState:
        """What is known about the link now, and how old that is."""
        return self._meter.state(self._channel.segments(), signal_dbm())

    # Talking

    def tell(self, message: Request, frames: Sequence[Buffer] = ()) -> int:
        """Send what is not answered by itself; returns its bytes."""
        size, _ = self._send(message, frames)
        self._ahead_bytes += size
        return size

    def _send(self, message: Request, frames: Sequence[Buffer]) -> tuple[int, int]:
        """Send, when there is a connection; the bytes, and when they left."""
        while True:
            sent_ns = time.monotonic_ns()
            try:
                return self._channel.send(message, frames), sent_ns
            except zmq.Again:
                self._channel.connected = False
                self._wait_for_connection(EdgeLostError)

    def mention(self, message: Request) -> None:
        """Send what is not worth waiting for: if there is no connection, nobody need know."""
        with suppress(zmq.Again):
            self._channel.send(message)

    def ask(
        self, message: Request, frames: Sequence[Buffer], wanted: Callable[[Reply], bool]
    ) -> Answer:
        """Send a request and wait for the reply that is ``wanted``; older replies are dropped."""
        size, sent_ns = self._send(message, frames)
        return self.wait(message, frames, wanted, size, sent_ns)

    def wait(
        self,
        message: Request,
        frames: Sequence[Buffer],
        wanted: Callable[[Reply], bool],
        size: int = 0,
        sent_ns: int = 0,
    ) -> Answer:
        """Wait for a reply that is already on its way; ``message`` is sent again if need be."""
        give_up = time.monotonic() + PATIENCE_S
        resend = time.monotonic() + RESEND_S
        resent = False
        while (now := time.monotonic()) < give_up:
            arrived = self._channel.receive(min(resend, give_up) - now)
            if arrived is not None:
                reply, reply_frames, reply_size = arrived
                if isinstance(reply, Failure) and _concerns(reply, message):
                    raise from_code(reply.code, reply.message)
                if wanted(reply):
                    now_ns = time.monotonic_ns()
                    return Answer(reply, reply_frames, size, reply_size, sent_ns, now_ns, resent)
            elif not self._channel.connected:
                self._wait_for_connection(EdgeLostError)
                size += self._send(message, frames)[0]
                resent = True
            elif time.monotonic() >= resend:
                resend += RESEND_S
                size += self._send(message, frames)[0]
                resent = True
        raise EdgeLostError(
            f"The edge at {self._channel.endpoint} has not answered for {PATIENCE_S:g} s."
        )

    def _wait_for_connection(self, otherwise: type[Exception]) -> None:
        channel = self._channel
        deadline = time.monotonic() + CONNECT_S
        while not channel.connected:
            left = deadline - time.monotonic()
            if channel.denied:
                raise AccessDeniedError(
                    f"The edge at {channel.endpoint} refused this device's key: run "
                    "`pilotfish keys allow device.pub` on the edge and restart it."
                )
            if left <= 0:
                raise self._absent(otherwise)
            if channel.receive(left) is not None:
                if otherwise is EdgeUnreachableError:
                    raise MalformedError(f"{channel.endpoint} speaks before the handshake.")
                # It is back, and answers what was sent before the news of that was read; what is
                # dropped here comes again, for the request is sent again.
                channel.connected = True

    def _absent(self, otherwise: type[Exception]) -> Exception:
        endpoint = self._channel.endpoint
        if self._channel.broken_handshakes:
            if self._encrypted:
                advice = "is edge.pub that edge's present public key, and does it use keys at all?"
            else:
                advice = "it may demand keys: name their folder with --keys."
            return AccessDeniedError(f"{endpoint} answers, but not to our handshake: {advice}")
        if otherwise is EdgeLostError:
            return EdgeLostError(
                f"The edge at {endpoint} is gone and did not come back within {CONNECT_S:g} s."
            )
        return EdgeUnreachableError(
            f"No edge answers at {endpoint}: is `pilotfish edge serve` running there, and is the "
            "address right?"
        )

    def close(self) -> None:
        """Hang up."""
        self._channel.close()


def _older(reading: Reading | None, age_s: float) -> bool:
    return reading is None or reading.age_s > age_s


def _concerns(failure: Failure, message: Request) -> bool:
    """Whether a failure is about this request; one that names none is about what was sent last."""
    generation = getattr(message, "generation", None)
    return failure.generation is None or failure.generation == generation
