"""Measure the time for which the edge has been away, across reconnections.

The retry policies promise times (`device_runtime.link.retry`). A new connection does not yet prove
that the link works: some paths carry the handshake but never a prompt. So the seconds without the
edge add up until the edge makes progress on this device's work.
"""

import enum

from pilotfish.device_runtime.link.retry import RetryPolicy


class LinkPhase(enum.Enum):
    """The present activity of the link to the edge.

    AWAY: there is no connection, or it is quiet. CONNECTING: a handshake makes progress. BLOCKED:
    packets arrive from the edge, but the device's do not reach the edge, perhaps because a queue on
    the way is full. CARRYING: a message is crossing, however slowly. IDLE: the connection is alive.
    """

    AWAY = enum.auto()
    CONNECTING = enum.auto()
    BLOCKED = enum.auto()
    CARRYING = enum.auto()
    IDLE = enum.auto()


# Seconds for which each phase is tolerated before the edge counts as away: handshakes take at most
# four round trips of three seconds, and queues of routers hold seconds of traffic.
_TOLERATED_S = {LinkPhase.CONNECTING: 15.0, LinkPhase.BLOCKED: 5.0}


class AbsenceClock:
    """Adds up the seconds for which the edge is away, and for which its reply is due.

    away_s: seconds for which the edge was away since its last progress on this device's work.
    owed_s: seconds for which the edge was connected but did not send the expected reply.
    """

    def __init__(self, patience: RetryPolicy, now_s: float) -> None:
        self._retry_policy = patience
        self._noted_s = now_s
        self._phase = LinkPhase.AWAY  # until the first connection
        self.away_s = self.owed_s = 0.0
        self._spent_s = dict.fromkeys(_TOLERATED_S, 0.0)

    def note(self, phase: LinkPhase, now_s: float, stalled_s: float = 0.0) -> None:
        """Set the phase of the link; the time since the last call counts as this phase.

        stalled_s: seconds for which this process was suspended; these do not count.
        """
        passed_s = max(0.0, now_s - self._noted_s - stalled_s)
        before, self._phase, self._noted_s = self._phase, phase, now_s
        if phase in _TOLERATED_S:
            self._spent_s[phase] += passed_s
            if self._spent_s[phase] > _TOLERATED_S[phase]:
                self.away_s += passed_s
        elif phase is LinkPhase.AWAY and before is not LinkPhase.IDLE:
            self.away_s += passed_s
        elif phase is LinkPhase.IDLE or (phase is LinkPhase.CARRYING and self.in_doubt):
            self.owed_s += passed_s  # after a break, crossing data may be a repetition

    def expect(self, now_s: float) -> None:
        """Start to measure the time until an expected reply."""
        self.owed_s, self._noted_s = 0.0, now_s
        if self._retry_policy.policy != "local":
            self._phase = LinkPhase.IDLE

    def on_progress(self) -> None:
        """Reset the absence: a reply has come, or more of a message has crossed than before."""
        self.away_s = 0.0
        self._spent_s = dict.fromkeys(_TOLERATED_S, 0.0)

    @property
    def in_doubt(self) -> bool:
        """Whether the edge was away and has made no progress since."""
        return self.away_s > 0.0

    @property
    def away(self) -> bool:
        """Whether the edge was away at the last `note`."""
        standing = self._phase
        if standing in _TOLERATED_S:
            return self._spent_s[standing] > _TOLERATED_S[standing]
        return standing is LinkPhase.AWAY

    @property
    def expired(self) -> bool:
        """Whether the edge has been away for longer than the policy allows."""
        return self.away and self.away_s > self._retry_policy.absent_s

    @property
    def overdue(self) -> bool:
        """Whether the edge's reply has been due for longer than the policy allows."""
        return self.owed_s > self._retry_policy.silent_s
