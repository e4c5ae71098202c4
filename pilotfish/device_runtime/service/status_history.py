"""The last five minutes of a device service, in steps of five seconds, for the page's pictures.

In: rounds and readings of the link, with their times in seconds (monotonic). Out:
`StatusHistory.body`, lists of 60 steps each, the oldest step first. A step without drafts has no
acceptance, and a step in which the round trip was not measured has no RTT: these values are None.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pilotfish.device_runtime.record import Round

STEP_S = 5.0
STEPS = 60
_READINGS = 32  # readings of the RTT that a step keeps


@dataclass(slots=True)
class _Step:
    """What happened in one step. number: the step's start, in steps since the service's start."""

    number: int
    accepted: int = 0
    verified: int = 0
    rtts: deque[float] = field(default_factory=lambda: deque(maxlen=_READINGS))
    away: bool = False


class StatusHistory:
    """The steps of the last minutes. Of bounded size; its owner holds a lock."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._steps: deque[_Step] = deque(maxlen=STEPS)

    def add_round(self, record: Round, now_s: float) -> None:
        """Add a round that has just ended."""
        step = self._step(now_s)
        step.accepted += record.accepted
        step.verified += record.verified

    def set_link(self, *, away: bool, rtt_s: float | None, now_s: float) -> None:
        """Add the link's state. away: the edge is away. rtt_s: a reading of this step, or None."""
        step = self._step(now_s)
        step.away |= away
        if rtt_s is not None:
            step.rtts.append(rtt_s)

    def body(self, now_s: float) -> dict[str, Any]:
        """Return the history as JSON types. away: whether the edge was away within the step."""
        newest = self._number(now_s)
        steps = {step.number: step for step in self._steps}
        numbers = range(newest - STEPS + 1, newest + 1)
        row = [steps.get(number) or _Step(number) for number in numbers]
        return {
            "step_s": STEP_S,
            "acceptance": [
                round(step.accepted / step.verified, 4) if step.verified else None for step in row
            ],
            "rtt_s": [round(median(step.rtts), 6) if step.rtts else None for step in row],
            "away": [step.away for step in row],
        }

    def _number(self, now_s: float) -> int:
        return int((now_s - self._began_s) / STEP_S)

    def _step(self, now_s: float) -> _Step:
        number = self._number(now_s)
        if not self._steps or self._steps[-1].number < number:
            self._steps.append(_Step(number))
        return self._steps[-1]
