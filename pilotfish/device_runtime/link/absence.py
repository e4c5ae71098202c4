"""How long the edge has been away, whatever breaks in between.

The policies promise times (`device_runtime.link.retry`), and a connection that is made anew is not
yet a link: over some paths the handshake passes and a prompt never does. So seconds without the
edge add up until it gets on with this device's work.
"""

import enum

from pilotfish.device_runtime.link.retry import RetryPolicy


class LinkPhase(enum.Enum):
    """What the link to the edge does at the moment.

    AWAY: there is no connection, or it is quiet. CONNECTING: a handshake makes progress. BLOCKED:
    packets come from the edge, but ours do not get there: others have filled a queue, maybe.
    CARRYING: a message is crossing, however slowly. HERE: the connection lives.
    """

    AWAY = enum.auto()
    CONNECTING = enum.auto()
    BLOCKED = enum.auto()
    CARRYING = enum.auto()
    IDLE = enum.auto()


# Seconds in all that do not count as away: handshakes have at most four round trips of three
# seconds, and queues of routers hold seconds.
_TOLERATED_S = {LinkPhase.CONNECTING: 15.0, LinkPhase.BLOCKED: 5.0}


class AbsenceClock:
    """Adds up the seconds for which the edge is away, or owes a reply.

    away_s: away, since it last got on with our work. owed_s: here without the reply that is waited
    for.
    """

    def __init__(self, patience: RetryPolicy, now_s: float) -> None:
        self._retry_policy = patience
        self._noted_s = now_s
        self._phase = LinkPhase.AWAY  # until it has been met
        self.away_s = self.owed_s = 0.0
        self._spent_s = dict.fromkeys(_TOLERATED_S, 0.0)

    def note(self, phase: LinkPhase, now_s: float, stalled_s: float = 0.0) -> None:
        """Note how the link stands; what passed since the last note counts as that.

        stood_s: seconds for which this process was suspended; they do not count as absence.
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
            self.owed_s += passed_s  # what crosses after a break may have crossed before

    def expect(self, now_s: float) -> None:
        """Wait for a reply from now on."""
        self.owed_s, self._noted_s = 0.0, now_s
        if self._retry_policy.policy != "local":
            self._phase = LinkPhase.IDLE

    def on_progress(self) -> None:
        """Note that the edge got on with our work: a reply, or more of a message than ever."""
        self.away_s = 0.0
        self._spent_s = dict.fromkeys(_TOLERATED_S, 0.0)

    @property
    def in_doubt(self) -> bool:
        """Whether the edge was away and has not got on with our work since."""
        return self.away_s > 0.0

    @property
    def away(self) -> bool:
        """Whether the edge was away at the last note."""
        standing = self._phase
        if standing in _TOLERATED_S:
            return self._spent_s[standing] > _TOLERATED_S[standing]
        return standing is LinkPhase.AWAY

    @property
    def expired(self) -> bool:
        """Whether the edge is away, and has been for longer than the policy allows."""
        return self.away and self.away_s > self._retry_policy.absent_s

    @property
    def overdue(self) -> bool:
        """Whether the edge has owed its reply for longer than the policy allows."""
        return self.owed_s > self._retry_policy.silent_s
