"""A line whose edge is greeted over each connection, since after a loss another one may answer.

In: what the device says of itself, and the vocabulary that it needs. Out: the edge's welcome.
"""

import logging
import time

import msgspec

from pilotfish.device_runtime.link.gauge import Gauge
from pilotfish.device_runtime.link.loss import BUSY, RESEND_S, Interrupt
from pilotfish.device_runtime.link.sliced_line import SlicedLine
from pilotfish.wire.errors import PairMismatchError, from_code
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.messages import Failure, Hello, Welcome

_log = logging.getLogger("pilotfish.device")

NO_CONNECTION = 0
_WHOLE_REPLY_BYTES = 64 << 10  # that come whole over a link of unknown rate


class GreetedLine(SlicedLine):
    """Knows which edge is there, and whether it suits.

    met: the last welcome, even of an unsuitable edge. welcome: the same, or None if the vocabulary
    is not the one required.
    """

    def __init__(self, endpoint: str, keys: DeviceKeys | None, interrupt: Interrupt) -> None:
        super().__init__(endpoint, keys, interrupt)
        self.gauge = Gauge()
        self.met: Welcome | None = None
        self.welcome: Welcome | None = None
        self._hello: Hello | None = None
        self._required: str | None = None  # fingerprint of a vocabulary
        self._greeted = self._asked = self._unsuited = NO_CONNECTION
        self._ask_again_s = 0.0

    def introduce(self, hello: Hello) -> None:
        """Greet edges with what this says of the drafter."""
        self._hello = hello

    def require_vocabulary(self, fingerprint: str | None) -> None:
        """Accept only edges with this vocabulary from now on; None: any."""
        if fingerprint != self._required:
            self._required = fingerprint
            self._unsuited = self._asked = NO_CONNECTION
            self.meet(self.met)

    def meet(self, welcome: Welcome | None) -> None:
        """Note an edge's welcome."""
        self.met = welcome
        suits = self._required in (None, self.vocabulary)
        self.welcome = welcome if suits else None

    @property
    def vocabulary(self) -> str | None:
        """Fingerprint of the last edge's vocabulary; older edges, which send none, have ours."""
        if self.met is None or self._hello is None:
            return None
        return self.met.tokenizer or self._hello.tokenizer

    @property
    def _ready(self) -> bool:
        """Whether a suitable edge was greeted over the present connection."""
        if not self.here:
            return False
        if self._hello is None:
            return True
        return self._greeted == self.connection and self.welcome is not None

    @property
    def takes_chunks(self) -> bool:
        """Whether the edge takes large messages in chunks."""
        return self.welcome is not None and self.welcome.chunks

    def _say_hello(self, wait_s: float) -> None:
        """Greet the edge if needed, and wait up to ``wait_s`` for its welcome."""
        now = time.monotonic()
        if self._asked != self.connection or now >= self._ask_again_s:
            self._asked, self._ask_again_s = self.connection, now + RESEND_S
            if self.try_send(self._hello_now()) is None:
                self._asked = NO_CONNECTION
        while (arrived := self.receive(wait_s)) is not None:
            reply = arrived[0]
            if isinstance(reply, Failure) and reply.session is None:
                self._asked = NO_CONNECTION  # ask anew, next time
                error = from_code(reply.code, reply.message)
                if not isinstance(error, BUSY):
                    self._unsuited = self.connection
                raise error
            if isinstance(reply, Welcome):
                self._welcomed(reply)
                return

    def _hello_now(self) -> Hello:
        """The greeting, with how large a reply may be that comes whole over this link."""
        assert self._hello is not None
        down_bps = self.gauge.rates_bps()[1]
        most = self.downlink.whole_bytes(down_bps, _WHOLE_REPLY_BYTES)
        return msgspec.structs.replace(self._hello, reply_bytes=most)

    def _welcomed(self, welcome: Welcome) -> None:
        before = self.met
        self.meet(welcome)
        if self.welcome is None:
            self._asked, self._unsuited = NO_CONNECTION, self.connection
            raise PairMismatchError(
                f"The edge serves {welcome.model} now, whose vocabulary is another one than this "
                "answer's: ask again."
            )
        self._greeted = self._asked
        if before is not None and (before.model, before.digest) != (welcome.model, welcome.digest):
            _log.warning("the edge serves %s now; it was %s", welcome.model, before.model)
