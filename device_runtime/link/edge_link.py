"""The device's side of the connection: ask the edge, notice when it is gone, ask again.

A request is bytes that may be sent again: when the connection breaks and comes back, or a reply is
overdue, the very same bytes go out, and the edge answers what it has answered already.
"""

import secrets
import time
from collections.abc import Callable, Sequence

from pilotfish.device_runtime.link.gauge import Answer, Connection, Gauge
from pilotfish.device_runtime.link.line import Line
from pilotfish.device_runtime.link.loss import FAIL, RESEND_S, Interrupt, Patience
from pilotfish.device_runtime.link.presence import Presence, Setbacks
from pilotfish.device_runtime.record import Probing
from pilotfish.wire.errors import EdgeUnreachableError, from_code
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.link.meter import FRESH_S
from pilotfish.wire.link.state import LinkState, Reading
from pilotfish.wire.messages import Buffer, Failure, Ping, Pong, Reply, Request, Welcome

RATES_FRESH_S = 60.0
_NEWS_S = 0.02  # of a connection, after what shows that there is none
_PINGS = 2  # at most, for one RTT
PROBE_BYTES = 12_000  # fits a connection's first flight, and is large enough to tell a rate


class EdgeLink:
    """One edge, connected or to be connected. Raises typed errors that say what to do.

    It never hangs: `patience` says how long an edge may be away, `interrupt` ends every wait. One
    thread talks; `up`, `state` and `redirect` are for any.
    """

    def __init__(
        self,
        endpoint: str,
        keys: DeviceKeys | None,
        patience: Patience = FAIL,
        interrupt: Interrupt | None = None,
    ) -> None:
        interrupt = interrupt or Interrupt()
        self._line = Line(endpoint, keys, interrupt)
        self._patience = patience
        self._sent_on = Connection(0, 0)
        self._echoes = True  # the edge sends the bytes of a ping back
        self.presence = Presence(self._line, patience, interrupt)
        self.gauge = Gauge()

    def reach(self) -> None:
        """Wait for the first connection; `EdgeUnreachableError` if nobody answers."""
        self.presence.await_connection(EdgeUnreachableError)

    def greet(self) -> None:
        """See to it that the edge that is there now has been greeted; waits for one."""
        self._line.catch_up()
        self.presence.await_edge()

    @property
    def welcome(self) -> Welcome | None:
        """What the edge said of itself when it was greeted last; None if it does not suit."""
        return self.presence.welcome

    def setbacks(self) -> Setbacks:
        """To count what goes wrong with the request that comes now."""
        return Setbacks(self.presence, self._line)

    # What is known about the link

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
        self.gauge.pinged(answer, pong.received_ns, pong.sent_ns - pong.received_ns)

    @property
    def probing(self) -> Probing:
        """What measuring the link has cost so far."""
        return self.gauge.probing

    def refresh(self, *, rates: bool, anew: bool = False) -> None:
        """See to it that RTT, and rates if wanted, are known; with one ping, or none.

        What real messages have told lately needs none. One ping cannot tell both: rates that are
        due go first, as long as the RTT is not as old. anew: the RTT is measured now, whatever was
        known, and both are where rates are due.
        """
        if anew:
            self._measure_rtt()
        state = self.gauge.state(None)
        readings = (state.up, state.down) if self._echoes else (state.up,)
        due = rates and any(_older(rate, RATES_FRESH_S) for rate in readings)
        if due and not _older(state.rtt, RATES_FRESH_S):
            self.ping(PROBE_BYTES)
        elif _older(state.rtt, FRESH_S):
            self.ping()

    def _measure_rtt(self) -> None:
        """Measure the RTT by a ping; by another one if that told nothing.

        A ping tells nothing where it was sent twice, or behind a prompt that nobody waited for.
        """
        self.gauge.next_answer()
        for _ in range(_PINGS):
            self.ping()
            if self.gauge.rtt_is_new:
                return

    def state(self) -> LinkState:
        """What is known about the link now, and how old that is. For any thread."""
        return self.gauge.state(self._line.segments())

    def up(self) -> bool:
        """Is there a connection? For any thread."""
        return self._line.up()

    def redirect(self, endpoint: str, keys: DeviceKeys | None) -> None:
        """From now on the edge is there. For any thread."""
        self._line.lead_to(endpoint, keys)

    # Talking

    def tell(self, message: Request, frames: Sequence[Buffer] = ()) -> None:
        """Send what is not answered by itself."""
        size, _ = self._send(message, frames)
        self.gauge.sent_ahead(size)

    def mention(self, message: Request) -> int:
        """Send what is not worth waiting for: no bytes are sent where there is no connection."""
        return self._line.send(message) or 0

    def ask(
        self,
        message: Request,
        frames: Sequence[Buffer],
        wanted: Callable[[Reply], bool],
        meanwhile: Callable[[], None] | None = None,
    ) -> Answer:
        """Send a request and wait for the reply that is ``wanted``; older replies are dropped.

        meanwhile: what there is to do while it is on its way.
        """
        size, sent_ns = self._send(message, frames)
        if meanwhile is not None:
            meanwhile()
        return self.wait(message, frames, wanted, size, sent_ns, late=meanwhile is not None)

    def wait(
        self,
        message: Request,
        frames: Sequence[Buffer],
        wanted: Callable[[Reply], bool],
        size: int = 0,
        sent_ns: int = 0,
        *,
        late: bool = False,
    ) -> Answer:
        """Wait for a reply that is already on its way; ``message`` is sent again if need be.

        late: something else was done since it was sent, so the reply may lie here already.
        """
        line = self._line
        give_up = time.monotonic() + self._patience.silent_s
        resend = time.monotonic() + RESEND_S
        resent = False
        while (now := time.monotonic()) < give_up:
            arrived = line.receive(0.0 if late else min(resend, give_up) - now)
            if arrived is not None:
                reply, reply_frames, reply_size = arrived
                if isinstance(reply, Failure) and _concerns(reply, message):
                    raise from_code(reply.code, reply.message)
                if wanted(reply):
                    now_ns = time.monotonic_ns()
                    return Answer(
                        reply, reply_frames, size, reply_size, sent_ns, now_ns, resent,
                        line.connection, late,
                    )  # fmt: skip
                continue
            late = False  # what comes now is waited for
            gone = not line.connected or line.connection != self._sent_on
            if gone:
                self.presence.lost()
            if gone or time.monotonic() >= resend:
                size += self._send(message, frames)[0]
                resent = True
                give_up += time.monotonic() - now  # what was waited for a connection
                resend = time.monotonic() + RESEND_S
        raise self.presence.silent()

    def _send(self, message: Request, frames: Sequence[Buffer]) -> tuple[int, int]:
        """Send, when there is an edge; the bytes, and when they left."""
        give_up = time.monotonic() + self._patience.silent_s
        while True:
            self.presence.await_edge()
            sent_ns = time.monotonic_ns()
            size = self._line.send(message, frames)
            if size is not None:
                self._sent_on = self._line.connection
                return size, sent_ns
            if time.monotonic() > give_up:
                raise self.presence.silent()
            self._line.await_news(_NEWS_S)

    def close(self) -> None:
        """Hang up."""
        self._line.close()


def _older(reading: Reading | None, age_s: float) -> bool:
    return reading is None or reading.age_s > age_s


def _concerns(failure: Failure, message: Request) -> bool:
    """Whether a failure is about this request; one that names none is about what was sent last."""
    generation = getattr(message, "generation", None)
    return failure.generation is None or failure.generation == generation
