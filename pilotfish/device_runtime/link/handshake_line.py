"""The handshake at the beginning of every connection to an edge, and the link's state after it.

In:  a `Hello` that describes the drafter. Out: the edge's `Welcome`, or its refusal. After a loss
     another edge may answer, with another model, other limits or another release.
"""

import logging
import time
from collections.abc import Callable

import msgspec

from pilotfish.base.errors import AccessDeniedError, PairMismatchError, PilotfishError, from_code
from pilotfish.device_runtime.link.connectivity import Connectivity, LinkStatus, state_of_error
from pilotfish.device_runtime.link.line import Line
from pilotfish.device_runtime.link.link_estimator import LinkEstimator
from pilotfish.device_runtime.link.retry import BUSY, RESEND_S, CancelToken
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.link.tcp import is_paced
from pilotfish.wire.messages import Failure, Hello, Welcome

_log = logging.getLogger("pilotfish.device")

NO_CONNECTION = 0
_WHOLE_REPLY_BYTES = 64 << 10  # maximum bytes of an unsliced reply over a link of unknown rate


class HandshakeLine(Line):
    """A line with the handshake.

    welcomed: the last welcome, also from an unsuitable edge. welcome: the last welcome, or None if
    its vocabulary is not the required one. unusable: fingerprint of a vocabulary for which the
    device cannot draft. changed: callback after a possible change of the link's state.
    """

    def __init__(self, endpoint: str, keys: DeviceKeys | None, interrupt: CancelToken) -> None:
        super().__init__(endpoint, keys, interrupt)
        self.estimator = LinkEstimator(paced=is_paced())
        self.welcomed: Welcome | None = None
        self.welcome: Welcome | None = None
        self.unusable: str | None = None
        self.changed: Callable[[], None] = lambda: None
        self._hello: Hello | None = None
        self._required: str | None = None  # fingerprint of the required vocabulary
        self._greeted_on = self._hello_sent_on = self._unsuitable_on = NO_CONNECTION
        self._hello_again_s = 0.0
        # number of the connection on which the edge refused, and the state that it reported
        self._refusal: tuple[int, Connectivity] | None = None
        self._last_news = ""  # text of the last logged refusal since the last welcome

    def set_hello(self, hello: Hello) -> None:
        """Set the `Hello` that is sent on every new connection."""
        self._hello = hello

    def require_vocabulary(self, fingerprint: str | None) -> None:
        """Accept only edges with this vocabulary from now on; None: any."""
        if fingerprint != self._required:
            self._required = fingerprint
            self._unsuitable_on = self._hello_sent_on = NO_CONNECTION
            self.on_welcome(self.welcomed)

    def on_welcome(self, welcome: Welcome | None) -> None:
        """Set the edge's welcome."""
        self.welcomed = welcome
        self.estimator.on_welcome(paced=welcome is not None and welcome.paced)
        suits = self._required in (None, self.vocabulary)
        self.welcome = welcome if suits else None

    @property
    def vocabulary(self) -> str | None:
        """Fingerprint of the last edge's vocabulary; None before the first welcome."""
        return None if self.welcomed is None else self.welcomed.tokenizer

    @property
    def _ready(self) -> bool:
        """Whether the handshake with a suitable edge is complete on the present connection."""
        if not self.is_connected:
            return False
        if self._hello is None:
            return True
        return self._greeted_on == self.connection and self.welcome is not None

    @property
    def takes_chunks(self) -> bool:
        """Whether large messages may be sent in chunks.

        `pilotfish probe` sends no hello, and each message in one piece: it measures what the path
        carries.
        """
        return self._hello is not None

    @property
    def status(self) -> LinkStatus:
        """The link's state, in words. For any thread."""
        refusal = self._refusal
        if not self.channel.connected:
            state = self.unconnected_state()
        elif refusal is not None and refusal[0] == self.connection:
            state = refusal[1]
        elif self.channel.quiet:
            state = Connectivity.QUIET
        else:
            state = Connectivity.CONNECTED if self._ready else Connectivity.CONNECTING
        return self.status_of(state)

    def attend(self) -> None:
        """Greet the edge on a new connection, between answers; neither waits nor raises."""
        try:
            self.refresh()
            if (
                self.channel.connected
                and self._unsuitable_on != self.connection
                and not self._ready
            ):
                self._say_hello(0.0)
        except PilotfishError as error:
            self._log_news(logging.INFO, "%s", error)
        self.changed()

    def _log_news(self, level: int, form: str, error: PilotfishError) -> None:
        """Log an edge's refusal, unless it repeats the last one."""
        if str(error) != self._last_news:
            self._last_news = str(error)
            _log.log(level, form, error)

    def _say_hello(self, wait_s: float) -> None:
        """Greet the edge if needed, and wait up to ``wait_s`` for its welcome."""
        now = time.monotonic()
        if self._hello_sent_on != self.connection or now >= self._hello_again_s:
            self._hello_sent_on, self._hello_again_s = self.connection, now + RESEND_S
            if self.try_send(self._current_hello()) is None:
                self._hello_sent_on = NO_CONNECTION
        while (arrived := self.receive(wait_s)) is not None:
            reply = arrived[0]
            if isinstance(reply, Failure) and reply.session is None:
                self._hello_sent_on = NO_CONNECTION  # send the hello again next time
                raise self._note_refusal(from_code(reply.code, reply.message))
            if isinstance(reply, Welcome):
                self._on_welcome_reply(reply)
                return

    def _current_hello(self) -> Hello:
        """Return the `Hello`, with the maximum bytes of an unsliced reply over this link."""
        assert self._hello is not None
        down_bps = self.estimator.rates_bps()[1]
        most = self.downlink.whole_bytes(down_bps, _WHOLE_REPLY_BYTES)
        return msgspec.structs.replace(self._hello, reply_bytes=most)

    def _note_refusal(self, error: PilotfishError) -> PilotfishError:
        """Record the edge's refusal; returns the error to raise."""
        state = state_of_error(error)
        if state is not None:
            self._refusal = self.connection, state
            self.changed()
        if (
            state is Connectivity.KEY_REFUSED
        ):  # the key may be allowed again before the connection is closed
            return AccessDeniedError(str(self.status))
        if not isinstance(error, BUSY):
            self._unsuitable_on = self.connection
        return error

    def _on_welcome_reply(self, welcome: Welcome) -> None:
        before = self.welcomed
        self.on_welcome(welcome)
        if self.welcome is None:
            self._hello_sent_on, self._unsuitable_on = NO_CONNECTION, self.connection
            # the next answer switches to the edge's vocabulary, if possible
            is_unusable = self.vocabulary == self.unusable
            state = Connectivity.OTHER_VOCABULARY if is_unusable else Connectivity.CONNECTED
            self._refusal = self.connection, state
            self.changed()
            raise PairMismatchError(
                f"The edge serves {welcome.model} now, whose vocabulary is not the vocabulary of "
                "this answer: repeat the request."
            )
        self._greeted_on, self._refusal, self._last_news = self._hello_sent_on, None, ""
        self._diagnosis.clear()
        self.changed()
        if before is not None and (before.model, before.digest) != (welcome.model, welcome.digest):
            _log.warning("the edge now serves %s; before it served %s", welcome.model, before.model)
