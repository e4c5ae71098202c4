"""Is the edge there, and is it one that suits? Waiting for it, and greeting it when it comes.

An edge that has come back may be another one: another model, other limits, another release. So the
handshake (`Hello`, `Welcome`) comes before anything else on every connection.
"""

import logging
import time

from pilotfish.device_runtime.link.gauge import Connection
from pilotfish.device_runtime.link.line import Line
from pilotfish.device_runtime.link.loss import BUSY, GRACE_S, RESEND_S, Interrupt, Patience, backoff
from pilotfish.engines.artifact import Manifest
from pilotfish.wire.errors import (
    AccessDeniedError,
    DrainingError,
    EdgeLostError,
    EdgeUnreachableError,
    InterruptedGenerationError,
    MalformedError,
    PairMismatchError,
    PilotfishError,
    from_code,
)
from pilotfish.wire.messages import VERSION, Failure, Hello, Welcome

_log = logging.getLogger("pilotfish.device")

_GLANCE_S = 0.2  # for an edge to be connected that may come later as well
_NONE = Connection(0, 0)


class Presence:
    """What one link knows of who is at its other end.

    met: what the edge said that was greeted last, whether it suits or not. lost_ns: when it was
    noticed that the edge is away (monotonic); None while tokens get verified.
    """

    def __init__(self, line: Line, patience: Patience, interrupt: Interrupt) -> None:
        self._line = line
        self._patience = patience
        self._interrupt = interrupt
        self._hello: Hello | None = None
        self._greeted = self._asked = self._unsuited = _NONE
        self._ask_again_s = self._busy_until_s = 0.0
        self._pauses = backoff()
        self._away_s: float | None = time.monotonic()  # since when nobody was there
        self._speaks: str | None = None
        self.met: Welcome | None = None
        self.lost_ns: int | None = None

    def introduce(self, manifest: Manifest) -> None:
        """What every edge is to be told: both ends must speak the same wire."""
        self._hello = Hello(
            version=VERSION,
            tokenizer=manifest.tokenizer_fingerprint,
            vocab_size=manifest.vocab_size,
            padded_vocab_size=manifest.padded_vocab_size,
            hidden_size=manifest.dimensions.hidden,
            bridges=True,
            drafter=manifest.origin,
        )

    def speak(self, fingerprint: str | None) -> None:
        """From now on the edge must have this vocabulary; None: any will do, to begin with."""
        if fingerprint != self._speaks:
            self._speaks = fingerprint
            self._unsuited = self._asked = _NONE

    @property
    def vocabulary(self) -> str | None:
        """Fingerprint of the vocabulary of the edge that was met last; an older edge has ours."""
        if self.met is None or self._hello is None:
            return None
        return self.met.tokenizer or self._hello.tokenizer

    @property
    def welcome(self) -> Welcome | None:
        """What the edge said that was met last; None if it does not speak what it is to speak."""
        return self.met if self._speaks in (None, self.vocabulary) else None

    @property
    def _acquainted(self) -> bool:
        """Has the edge on this connection been greeted, and does it suit?"""
        return self._greeted == self._line.connection and self.welcome is not None

    # Waiting

    def await_edge(self) -> None:
        """Wait for a connection over which the edge has been greeted."""
        self.await_connection()
        if self._hello is None or self._acquainted:
            return
        since_s = time.monotonic()
        while not self._acquainted:
            if time.monotonic() - since_s > self._patience.silent_s:
                raise self.silent()
            try:
                self._greet(self._patience.silent_s)
            except BUSY as error:
                self.refused(error, since_s)
            self.await_connection()

    def await_connection(self, otherwise: type[PilotfishError] = EdgeLostError) -> None:
        """Wait for a connection; raises ``otherwise`` if there is none in time."""
        line = self._line
        if not line.connected:
            line.catch_up()
        if line.connected:
            return
        self.lost()
        begun_s = time.monotonic()
        if self._patience.policy == "local":  # the grace is for a loss, not for each answer
            self._away_s = begun_s = self._away_s or begun_s
        while not line.connected:
            left_s = begun_s + self._patience.absent_s - time.monotonic()
            if line.channel.denied:
                raise self._denied()
            if left_s <= 0:
                raise self._absent(otherwise)
            arrived = line.receive(left_s)
            if arrived is not None and otherwise is EdgeUnreachableError:
                raise MalformedError(f"{line.channel.endpoint} speaks before the handshake.")
            # Else it came before the connection broke, or it is back and answers what was sent
            # before the news of that was read. It comes again, for the request is sent again.
        self._away_s = None

    def _greet(self, wait_s: float) -> None:
        """Say hello where that has not been done, and look for the welcome, for a while at most."""
        line = self._line
        now = time.monotonic()
        if self._asked != line.connection or now >= self._ask_again_s:
            self._asked, self._ask_again_s = line.connection, now + RESEND_S
            assert self._hello is not None
            if line.send(self._hello) is None:
                self._asked = _NONE
        while (arrived := line.receive(wait_s)) is not None:
            reply = arrived[0]
            if isinstance(reply, Failure) and reply.session is None:
                self._asked = _NONE  # ask anew, next time
                error = from_code(reply.code, reply.message)
                if not isinstance(error, BUSY):
                    self._unsuited = line.connection
                raise error
            if isinstance(reply, Welcome):
                self._welcomed(reply)
                return

    def _welcomed(self, welcome: Welcome) -> None:
        before, self.met = self.met, welcome
        if self.welcome is None:
            self._asked, self._unsuited = _NONE, self._line.connection
            raise PairMismatchError(
                f"The edge serves {welcome.model} now, whose vocabulary is another one than this "
                "answer's: ask again."
            )
        self._greeted, self._away_s = self._asked, None
        if before is not None and (before.model, before.digest) != (welcome.model, welcome.digest):
            _log.warning("the edge serves %s now; it was %s", welcome.model, before.model)

    # Without waiting

    def look(self) -> bool:
        """Without waiting: is the edge there and ready? One that has come back is greeted.

        One that does not suit raises, unless it can be done without.
        """
        try:
            return self._look()
        except InterruptedGenerationError:
            raise
        except PilotfishError as error:
            if isinstance(error, BUSY):
                self.put_off()
            elif self._patience.policy != "local":
                raise
            _log.warning("the edge is of no use now: %s", error)
            return False

    def _look(self) -> bool:
        line = self._line
        line.catch_up()
        now = time.monotonic()
        if now < self._busy_until_s:
            return False
        if not line.connected:
            self._away_s = self._away_s or now
            if line.channel.denied:
                self.put_off()
                raise self._denied()
            return False
        if self._hello is None or self._unsuited == line.connection:
            return False
        if not self._acquainted:
            self._greet(0.0)
        return self._acquainted

    def look_out(self) -> None:
        """Give an edge that is there at the start the time to say so."""
        begun_s = time.monotonic()
        while not self.look():
            spent_s = time.monotonic() - begun_s
            if spent_s > (GRACE_S if self._line.connected else _GLANCE_S):
                return
            time.sleep(0.005)

    # What others noticed

    def lost(self) -> None:
        """The edge is away."""
        if self.lost_ns is None:
            self.lost_ns = time.monotonic_ns()

    def verified(self) -> None:
        """Tokens have been verified: the edge is what it should be."""
        self.lost_ns = None
        self._pauses = backoff()

    def silent(self) -> EdgeLostError:
        """The edge does not answer over a connection that stands."""
        self.lost()
        self._greeted = self._asked = _NONE  # whoever leaves one request may leave them all
        return EdgeLostError(
            f"The edge at {self._line.channel.endpoint} has not answered for "
            f"{self._patience.silent_s:g} s."
        )

    def refused(self, error: PilotfishError, since_s: float) -> None:
        """Wait before a busy edge is asked again; raises ``error`` if that is not to be.

        One that drains is about to be gone, and has the time that a lost one has.
        """
        self.lost()
        policy, spent_s = self._patience.policy, time.monotonic() - since_s
        waits = policy == "wait" or (policy == "fail" and isinstance(error, DrainingError))
        if not waits or spent_s > self._patience.absent_s:
            self.put_off()
            raise error
        self._interrupt.sleep(next(self._pauses))

    def put_off(self) -> None:
        """The edge takes nothing now; look for it after a while, and next time a longer one."""
        self._busy_until_s = time.monotonic() + next(self._pauses)

    def _denied(self) -> AccessDeniedError:
        self._line.begin_again()  # for whoever tries again: ZeroMQ does not
        return AccessDeniedError(
            f"The edge at {self._line.channel.endpoint} refused this device's key: run "
            "`pilotfish keys allow device.pub` on the edge and restart it."
        )

    def _absent(self, otherwise: type[PilotfishError]) -> PilotfishError:
        endpoint = self._line.channel.endpoint
        # something else may sit there for a while, or a relay hang up: what was welcome will be
        if self._line.channel.broken_handshakes and self.met is None:
            if self._line.encrypted:
                advice = "is edge.pub that edge's present public key, and does it use keys at all?"
            else:
                advice = "it may demand keys: name their folder with --keys."
            return AccessDeniedError(f"{endpoint} answers, but not to our handshake: {advice}")
        if otherwise is EdgeLostError:
            return EdgeLostError(
                f"The edge at {endpoint} is gone and did not come back within "
                f"{self._patience.absent_s:g} s."
            )
        return EdgeUnreachableError(
            f"No edge answers at {endpoint}: is `pilotfish edge serve` running there, and is the "
            "address right?"
        )


class Setbacks:
    """What goes wrong with one request, and when that is enough."""

    _MOST = 3  # an edge that forgets a session more often in one round will not learn it

    def __init__(self, presence: Presence, line: Line) -> None:
        self._presence = presence
        self._line = line
        self._since_s = time.monotonic()
        self._connection = _NONE
        self._forgotten = 0

    def add(self, error: PilotfishError) -> None:
        """One more; returns when it is time to try again, or raises ``error``."""
        if isinstance(error, BUSY):
            self._presence.refused(error, self._since_s)
            return
        if self._connection != self._line.connection:  # another edge, maybe
            self._connection, self._forgotten = self._line.connection, 0
        self._forgotten += 1
        if self._forgotten == self._MOST:
            raise error
