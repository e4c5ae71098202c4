"""The link to the edge: connect, greet, send requests, and repeat them after a loss.

After a loss of the connection, another edge may answer, with another model, other limits or another
release. So every connection begins with the handshake (`Hello`, `Welcome`).

When a broken connection is back, or a reply is overdue, the device sends the request's bytes again.
An edge that has already answered repeats its reply.
"""

import logging
import time
from collections.abc import Callable, Sequence

from pilotfish.base.errors import (
    AccessDeniedError,
    BusyError,
    DrainingError,
    EdgeLostError,
    EdgeUnreachableError,
    InterruptedGenerationError,
    MalformedError,
    PilotfishError,
    from_code,
)
from pilotfish.device_runtime.link.connectivity import REFUSALS, Connectivity
from pilotfish.device_runtime.link.flow import LEAST_BYTES
from pilotfish.device_runtime.link.handshake_line import NO_CONNECTION, HandshakeLine
from pilotfish.device_runtime.link.line import SLICE_S, stalled_s
from pilotfish.device_runtime.link.link_estimator import TimedReply
from pilotfish.device_runtime.link.pending import SOON_S, PendingRequest, SentRequest
from pilotfish.device_runtime.link.retry import (
    BUSY,
    FAIL,
    GRACE_S,
    AbsenceClock,
    CancelToken,
    RetryPolicy,
    backoff,
)
from pilotfish.device_runtime.link.upload import ChunkedUploads
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.link.liveness import LARGE_BYTES
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.messages import Buffer, DeviceMessage, Failure, Reply, Train

_log = logging.getLogger("pilotfish.device")

_LOSS_DELAY_S = 0.02  # pause after a failed send, after which the loss of the connection is visible
_START_WAIT_S = 0.2  # longest wait at the start for an edge that may come later


class EdgeLink(HandshakeLine):
    """The link to one edge, connected or not. Raises typed errors that say what to do.

    Every wait is bounded: ``patience`` limits the edge's absence, and ``interrupt`` ends any wait.
    One thread uses the link; any thread may call `is_up`, `state`, `status`, `retry` and
    `redirect`.

    lost_ns: time at which the device noticed the loss of the edge (monotonic); None while tokens
    are verified.
    """

    def __init__(
        self,
        endpoint: str,
        keys: DeviceKeys | None,
        patience: RetryPolicy = FAIL,
        interrupt: CancelToken | None = None,
    ) -> None:
        super().__init__(endpoint, keys, interrupt or CancelToken())
        self.lost_ns: int | None = None
        self._retry_policy = patience
        self._sent_on = NO_CONNECTION
        self._busy_until_s = 0.0
        self._pauses = backoff()
        self._absence = AbsenceClock(patience, time.monotonic())
        self._uploads = ChunkedUploads(self)

    # Waiting

    def connect(self) -> None:
        """Wait for the first connection; raise `EdgeUnreachableError` after the time-out."""
        self._await_connection(EdgeUnreachableError)

    def handshake(self) -> None:
        """Wait for the edge for at most the policy's whole time, and greet it if needed."""
        if self._retry_policy.policy != "local":
            self._absence.on_progress()
            self._absence.expect(time.monotonic())
        self.refresh()
        self.await_handshake()

    def _note_phase(self, process_stall_s: float = 0.0) -> None:
        """Update the absence clock with the link's present phase."""
        phase = self._phase(in_doubt=self._absence.in_doubt)
        self._absence.note(phase, time.monotonic(), process_stall_s)

    def await_handshake(self) -> None:
        """Wait for a connection with a completed handshake."""
        if self._ready:
            return
        since_s = time.monotonic()
        self._await_connection()
        while not self._ready:
            if time.monotonic() - since_s > self._retry_policy.silent_s:
                raise self._silent_error()
            try:
                self._say_hello(self._retry_policy.silent_s)
            except BUSY as error:
                self.wait_or_raise(error, since_s)
            self._await_connection()

    def _await_connection(self, otherwise: type[PilotfishError] = EdgeLostError) -> None:
        """Wait for a connection; raise ``otherwise`` after the time-out."""
        if not self.is_connected:
            self.refresh()
        if self.is_connected:
            return
        self.on_lost()
        # the first attempt to connect has just begun; a later request starts another attempt
        since_s = 0.0 if otherwise is EdgeUnreachableError else time.monotonic()
        self.channel.attempts.retry_now()
        self._note_phase()
        while not self.is_connected:
            status = self.status
            if status.state in REFUSALS and self.channel.attempts.failed_since(since_s):
                self.changed()
                raise status.error(was_welcomed=True, waited_s=0.0)
            if self._absence.expired:
                raise self._away_error(otherwise)
            checked_s = time.monotonic()
            arrived = self.receive(SLICE_S)
            self._note_phase(stalled_s(checked_s))
            if arrived is not None and otherwise is EdgeUnreachableError:
                raise MalformedError(
                    f"The edge at {self.channel.endpoint} sends a message before the handshake."
                )
            # Otherwise the message is a reply to a request from before the break. The edge will
            # repeat this reply, since the request is sent again.

    # Without waiting

    def poll(self) -> bool:
        """Check without waiting whether the edge is ready; greet an edge that is back.

        Raises if the edge is unsuitable, except under policy "local".
        """
        try:
            return self._check_edge()
        except InterruptedGenerationError:
            raise
        except PilotfishError as error:
            if isinstance(error, BUSY):
                self._back_off()
            elif self._retry_policy.policy != "local":
                raise
            self._log_news(logging.WARNING, "the edge cannot be used now: %s", error)
            return False

    def _check_edge(self) -> bool:
        self.refresh()
        now = time.monotonic()
        if now < self._busy_until_s:
            return False
        self._note_phase()
        if not self.is_connected:
            if self._retry_policy.policy != "local" and self.status.state in REFUSALS:
                raise self.status.error(was_welcomed=True, waited_s=0.0)
            return False
        if self._hello is None or self._unsuitable_on == self.connection:
            return False
        if not self._ready:
            self._say_hello(0.0)
        return self._ready

    def wait_briefly(self) -> None:
        """Wait briefly, at the start, for an edge that may come later."""
        begun_s = time.monotonic()
        while not self.poll():
            spent_s = time.monotonic() - begun_s
            if spent_s > (GRACE_S if self.channel.connected else _START_WAIT_S):
                return
            time.sleep(0.005)

    # Requests

    def notify(self, message: DeviceMessage, frames: Sequence[Buffer] = ()) -> None:
        """Send a message without a reply."""
        self.send(message, frames)

    def request(
        self, message: DeviceMessage, frames: Sequence[Buffer], wanted: Callable[[Reply], bool]
    ) -> TimedReply:
        """Send a request and wait for its reply, as `wait` does."""
        return self.wait(self.send(message, frames), wanted)

    def send(
        self, message: DeviceMessage, frames: Sequence[Buffer] = (), *, again: bool = False
    ) -> SentRequest:
        """Send a request after the handshake; again: it was sent before, and may have been lost."""
        if self._replies.has_begun and not again:
            self._replies.abandon()
        give_up = time.monotonic() + self._retry_policy.silent_s
        while True:
            self.await_handshake()
            array_bytes = sum(map(len, frames))
            position = self.channel.position(exact=array_bytes > LARGE_BYTES)
            sent_ns, chunked = time.monotonic_ns(), None
            # a train goes in one piece: in chunks it would measure nothing, and the upload would
            # drop the pongs that arrive between its acknowledgements
            if array_bytes > LEAST_BYTES and not isinstance(message, Train):
                chunked = self._uploads.send(message, frames, array_bytes, again=again)
            if (size := chunked) is None:
                size = self.try_send(message, frames)
            if size is not None:
                self._sent_on = self.connection
                if chunked is not None:  # the edge has the whole message
                    return SentRequest(message, frames, size, sent_ns, chunked=True)
                self.estimator.on_sent(size)
                stalled = time.monotonic_ns() - sent_ns > SOON_S * 1e9
                return SentRequest(message, frames, size, sent_ns, position, stalled=stalled)
            if time.monotonic() > give_up:
                raise self._silent_error()
            self._cancel_token.sleep(_LOSS_DELAY_S)
            self.refresh()

    def wait(
        self,
        sent: SentRequest,
        wanted: Callable[[Reply], bool],
        *,
        late: bool = False,
        on_idle: Callable[[], bool] | None = None,
    ) -> TimedReply:
        """Wait for the ``wanted`` reply; drop older replies; send the request again after a loss.

        late: time has passed since the request was sent, so the reply may already be here. on_idle:
        work to do while no message has arrived; it is called until it returns False (no work is
        left).
        """
        pending = PendingRequest(sent, late=late or on_idle is not None)
        self._absence.expect(time.monotonic())
        while True:
            checked_s = time.monotonic()
            arrived = self.receive(0.0 if pending.late else SLICE_S)
            process_stall_s = stalled_s(checked_s)
            pending.stalled = pending.stalled or process_stall_s > 0.0
            pending.on_wait_end()
            if arrived is not None:
                reply = arrived.reply
                if wanted(reply):
                    self._note_progress()
                    if arrived.sliced:
                        self.estimator.on_transfer(down_bps=self.downlink.full_bps)
                    return pending.timed_reply(arrived, self.connection, self.channel.queued_s)
                if isinstance(reply, Failure) and _concerns(reply, sent.message):
                    error = from_code(reply.code, reply.message)
                    if isinstance(error, AccessDeniedError | DrainingError):
                        error = self._note_refusal(error)
                    raise error
                pending.behind_bytes += arrived.size
                pending.on_wait_begin()
            else:
                # without work, this thread waits for the reply, so the arrival time is known again
                pending.late = on_idle is not None and _takes_long(on_idle)
                pending.on_wait_begin()
                disconnected = not self.holds(self._sent_on)
                if disconnected:
                    self.on_lost()
                if disconnected or self._replies.is_lost or pending.is_lost(self._absence.owed_s):
                    pending.on_resent(self._resend(sent), self._absence.owed_s)
            if self._replies.advance():
                pending.on_progress()
                self.on_progress()
            if pending.advances(self.channel.liveness() if self.channel.connected else None):
                self._note_progress()
            self._check_absence(process_stall_s)

    def _resend(self, sent: SentRequest) -> SentRequest:
        """Request the missing part of a reply, or send the whole request again."""
        if not self._replies.is_incomplete:
            self._replies.begin_again()
            return self.send(sent.message, sent.frames, again=True)
        self.await_handshake()
        self._sent_on = self.connection
        self.resume()
        return sent._replace(size=0, position=None)

    def on_progress(self) -> None:
        """Measure the time until the reply anew: more of a large message has arrived."""
        self._absence.expect(time.monotonic())
        self._note_progress()

    def check_transfer(self, last_checked_s: float) -> None:
        """Raise an error if the edge was away, or accepted nothing, for too long.

        last_checked_s: time at which the last wait began (monotonic).
        """
        self._check_absence(stalled_s(last_checked_s))

    def _check_absence(self, process_stall_s: float) -> None:
        """Update the absence clock; raise if the edge is away or its reply overdue for too long."""
        self._note_phase(process_stall_s)
        if self._absence.away:
            self.on_lost()
        if self._absence.expired:
            raise self._away_error(EdgeLostError)
        if self._absence.overdue:
            raise self._silent_error()

    def _note_progress(self) -> None:
        """Reset the absence: the edge made progress on this device's work."""
        self._absence.on_progress()
        self._second.on_progress()

    def state(self) -> LinkState:
        """Return the link's state, with the age of each reading. For any thread."""
        return self.estimator.state(self.channel.segments())

    # Losses

    def on_lost(self) -> None:
        """Record the time of the loss, unless a loss is already recorded."""
        if self.lost_ns is None:
            self.lost_ns = time.monotonic_ns()
            self.changed()

    def on_verified(self) -> None:
        """Clear the recorded loss: the edge verified tokens, so it is back."""
        self.lost_ns = None
        self._pauses = backoff()

    def wait_or_raise(self, error: PilotfishError, since_s: float) -> None:
        """Wait before the next request to a busy edge, or raise ``error`` if the policy says so.

        An edge that drains or is overloaded counts as lost, and has the same time to come back.
        """
        self.on_lost()
        policy, spent_s = self._retry_policy.policy, time.monotonic() - since_s
        passing = isinstance(error, BusyError | DrainingError)
        waits = policy == "wait" or (policy == "fail" and passing)
        if not waits or spent_s > self._retry_policy.absent_s:
            self._back_off()
            raise error
        self._cancel_token.sleep(next(self._pauses))

    def _back_off(self) -> None:
        """Pause the checks of a busy edge; each pause is longer than the last."""
        self._busy_until_s = time.monotonic() + next(self._pauses)

    def _away_error(self, otherwise: type[PilotfishError]) -> PilotfishError:
        """Return the error for an edge that was away for too long."""
        if self._retry_policy.policy == "local":
            self._back_off()  # pause: the next attempt may resend a whole prompt
        else:
            self._absence.on_progress()  # the next request has the policy's whole time
        status = self.status
        if self.channel.connected and status.state not in REFUSALS:
            status = self.status_of(Connectivity.QUIET)  # the message does not cross
        self.changed()
        was_welcomed = otherwise is EdgeLostError
        return status.error(was_welcomed=was_welcomed, waited_s=self._retry_policy.absent_s)

    def _silent_error(self) -> EdgeLostError:
        """Return the error for an edge that does not answer over an open connection."""
        self.on_lost()
        # greet the edge again: an edge that drops one request may drop all of them
        self._greeted_on = self._hello_sent_on = NO_CONNECTION
        return EdgeLostError(
            f"The edge at {self.channel.endpoint} has not answered for "
            f"{self._retry_policy.silent_s:g} s."
        )


def _takes_long(work: Callable[[], bool]) -> bool:
    """Do some work; returns whether more is left, or the work took long (a reply may be here)."""
    begun_s = time.monotonic()
    return work() or time.monotonic() - begun_s > SOON_S


def _concerns(failure: Failure, message: DeviceMessage) -> bool:
    """Whether a failure concerns this request; a failure without a generation always does."""
    generation = getattr(message, "generation", None)
    return failure.generation is None or failure.generation == generation
