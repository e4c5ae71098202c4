"""The link's state for an edge's decision head, and when to send it again (wisv §III-A: c_k).

In:  the measured state of the link. Out: the head's input; a new one while an answer goes on, if
     the link has changed.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from pilotfish.speculation.channel import Channel
from pilotfish.wire.link.state import LinkState, Reading

_EVERY_S: Final = 1.0  # shortest time between two checks
_CHANGE: Final = 0.1  # smallest change of an RTT or a rate that counts, as a share
_LOSS_CHANGE: Final = 0.01  # smallest change of the loss that counts


def channel_from(state: LinkState | None) -> Channel:
    """Convert the link's state to a decision head's input; a measured 0 counts as unknown.

    The head has one loss: the larger of both ways, since either one delays a round.
    """
    if state is None:
        return Channel()
    losses = (_value(state.retransmitted), _value(state.retransmitted_down))
    loss = max((each for each in losses if each is not None), default=None)
    return Channel(
        rtt_s=_value(state.rtt) or None,
        up_bps=_value(state.up) or None,
        down_bps=_value(state.down) or None,
        # limit: the kernel counts repeated connection attempts as retransmitted, not as sent
        loss=None if loss is None else min(loss, 1.0),
    )


def _value(reading: Reading | None) -> float | None:
    return None if reading is None else reading.value


class LinkRenewal:
    """Decides which state of the link a decision head gets next, at most once a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent, self._checked_s = Channel(), 0.0

    def start(self, channel: Channel) -> None:
        """Begin an answer, for which the edge gets this state."""
        self._sent, self._checked_s = channel, self._clock()

    def renewed(self, read: Callable[[], LinkState]) -> Channel | None:
        """Return the new state if the link has changed; None: the last one still holds.

        A value that is not known any more, for example on a new connection, keeps its last value.
        """
        now_s = self._clock()
        if now_s - self._checked_s < _EVERY_S:
            return None
        self._checked_s = now_s
        measured = channel_from(read())
        known = {name: value for name, value in vars(measured).items() if value is not None}
        channel = replace(self._sent, **known)
        if not _differ(self._sent, channel):
            return None
        self._sent = channel
        return channel


def _differ(channel: Channel, other: Channel) -> bool:
    """Whether two states differ by so much that a head should know."""
    for name, value in vars(channel).items():
        new = getattr(other, name)
        if value == new:
            continue
        if value is None or new is None:
            return True
        if name == "loss":
            changed = abs(new - value) > _LOSS_CHANGE
        else:
            changed = abs(math.log(new / value)) > math.log1p(_CHANGE)
        if changed:
            return True
    return False
