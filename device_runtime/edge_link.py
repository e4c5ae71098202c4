"""The device's side of the connection: find the edge, ask it, notice when it is gone.

A request is bytes that may be sent again: when the connection breaks and comes back, or a reply is
overdue, the very same bytes go out, and the edge answers what it has answered already.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import zmq

from device_runtime.record import Timings
from engines.artifact import Manifest
from wire.errors import (
    AccessDeniedError,
    EdgeLostError,
    EdgeUnreachableError,
    MalformedError,
    from_code,
)
from wire.keys import DeviceKeys
from wire.messages import VERSION, Buffer, Failure, Hello, Reply, Request, Times, Welcome
from wire.transport import Channel

CONNECT_S = 2.2  # until an edge that does not answer counts as absent
RESEND_S = 10.0  # a reply that is overdue for so long may have been lost
PATIENCE_S = 120.0  # and after so long nobody waits for it any more
_REPLY_BYTES = 256 * 1024 * 1024


class Answer(NamedTuple):
    """A reply, its bytes both ways, and when the request left and the reply came (monotonic)."""

    reply: Reply
    frames: Sequence[Buffer]
    uplink_bytes: int
    downlink_bytes: int
    sent_ns: int
    received_ns: int


class EdgeLink:
    """One edge, connected. Raises typed errors that say what to do; never hangs."""

    def __init__(self, endpoint: str, keys: DeviceKeys | None, manifest: Manifest) -> None:
        self._channel = Channel(endpoint, keys, _REPLY_BYTES)
        self._encrypted = keys is not None
        self._hello = Hello(
            version=VERSION,
            tokenizer=manifest.tokenizer_fingerprint,
            vocab_size=manifest.vocab_size,
            padded_vocab_size=manifest.padded_vocab_size,
            hidden_size=manifest.dimensions.hidden,
        )
        try:
            self._wait_for_connection(EdgeUnreachableError)
            answer = self.ask(self._hello, (), lambda reply: isinstance(reply, Welcome))
        except BaseException:
            self.close()
            raise
        assert isinstance(answer.reply, Welcome)
        self.welcome = answer.reply
        self.clock_offset_ns = 0  # the edge's clock minus ours
        self._quickest_ns = 2**62
        self.compare_clocks(
            answer, self.welcome.received_ns, self.welcome.sent_ns - self.welcome.received_ns
        )

    def compare_clocks(self, answer: Answer, received_ns: int, held_ns: int) -> int:
        """Nanoseconds that an exchange spent on the link, both ways; learns the clocks' offset.

        received_ns: when the request reached the edge, by its clock; held_ns: until it replied.
        The quickest exchange tells the offset best, if it took equally long both ways. Clocks
        drift, so what was quickest long ago slowly loses its say.
        """
        on_link_ns = max(0, answer.received_ns - answer.sent_ns - held_ns)
        self._quickest_ns += self._quickest_ns >> 10
        if on_link_ns <= self._quickest_ns:
            self._quickest_ns = on_link_ns
            self.clock_offset_ns = received_ns - answer.sent_ns - on_link_ns // 2
        return on_link_ns

    def timings(self, answer: Answer, times: Times, started_ns: int, drafted_ns: int) -> Timings:
        """The stages of a round that was started and drafted at these times (monotonic)."""
        on_link = self.compare_clocks(answer, times.received_ns, times.held_ns)
        uplink = times.received_ns - self.clock_offset_ns - answer.sent_ns
        uplink = min(on_link, max(0, uplink))
        return Timings(
            draft=(drafted_ns - started_ns) * 1e-9,
            encode=(answer.sent_ns - drafted_ns) * 1e-9,
            uplink=uplink * 1e-9,
            queue=(times.held_ns - times.verify_ns) * 1e-9,
            verify=times.verify_ns * 1e-9,
            downlink=(on_link - uplink) * 1e-9,
            settle=(time.monotonic_ns() - answer.received_ns) * 1e-9,
        )

    def tell(self, message: Request, frames: Sequence[Buffer] = ()) -> int:
        """Send what is not answered by itself; returns its bytes."""
        while True:
            try:
                return self._channel.send(message, frames)
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
        sent_ns = time.monotonic_ns()
        size = self.tell(message, frames)
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
        while (now := time.monotonic()) < give_up:
            arrived = self._channel.receive(min(resend, give_up) - now)
            if arrived is not None:
                reply, reply_frames, reply_size = arrived
                if isinstance(reply, Failure) and _concerns(reply, message):
                    raise from_code(reply.code, reply.message)
                if wanted(reply):
                    return Answer(
                        reply, reply_frames, size, reply_size, sent_ns, time.monotonic_ns()
                    )
            elif not self._channel.connected:
                self._wait_for_connection(EdgeLostError)
                size += self.tell(message, frames)
            elif time.monotonic() >= resend:
                resend += RESEND_S
                size += self.tell(message, frames)
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


def _concerns(failure: Failure, message: Request) -> bool:
    """Whether a failure is about this request; one that names none is about what was sent last."""
    generation = getattr(message, "generation", None)
    return failure.generation is None or failure.generation == generation
