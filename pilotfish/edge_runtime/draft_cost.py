"""Cost of a draft: the tokens that the edge would produce in the time that it adds to a pass.

In:  each pass: positions, seconds, committed tokens. Out: the cost of a draft; and the number of
     drafts that a pass takes from each session.

A pass over S positions takes a + b·S seconds. A draft adds one position, so it delays every session
of the pass by b seconds. At X tokens/s the edge would produce b·X tokens in this time. A pass takes
a draft if the draft's acceptance is at least b·X. So a full edge takes no drafts, and protocol
`ahead` becomes `stream` there; the draft of a lone session costs almost nothing.

This rule maximises the sum of all sessions' tokens, but could slow one session. So in a shared pass
drafts may add time only up to a limit: the recent gain of the session that gains least, plus 1.5 %.
A session without drafts should keep 97 % of its speed; it loses up to 1.5 % to the drafts of other
sessions, and about as much to the receipt of their hints.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np

_FADE = 0.98  # factor by which the weight of older passes shrinks at each pass
# Weight of the slope measured at the start, in squared positions: it is needed because passes of
# equal size contain no information about the slope.
_TRUST = 40.0
# A pass that takes more than `_STALLED` times the expected seconds counts as a stall of the edge;
# the expected time is then recorded. If there was another stall in the last `_BEFORE` passes,
# `_STALLED` times the expected time is recorded, so that the estimate follows a lasting slowdown.
_STALLED, _BEFORE = 4.0, 16
_LEAST = 0.002  # lowest cost of a draft (tokens)
_SLOWED = 0.015  # share of its speed that a session may lose to others' drafts
_SAVED = 4.0  # upper limit of unused drafts that shared passes carry over


class DraftCost:
    """Estimates b and X from passes over windows; passes with prompts are left out.

    initial_times: number of positions → seconds of such a pass, measured at the start.
    """

    def __init__(self, initial_times: Mapping[int, float]) -> None:
        times = initial_times or {1: 0.0}
        self._widths = [float(width) for width in times]
        self._seconds = [float(seconds) for seconds in times.values()]
        self._slope_s = _slope(np.array(self._widths), np.array(self._seconds))
        self._weight = self._positions = self._spent_s = 0.0
        self._squares = self._products = 0.0  # Σ positions², Σ positions·seconds
        # Σ seconds of the same passes, as predicted by the measurement at the start
        self._expected_s = 0.0
        self._tokens = 0.0
        self._saved = 0.0  # number of drafts that shared passes were allowed but did not use
        self._recorded = True  # whether the last pass was recorded
        self._steady = _BEFORE  # passes since the last stall

    def record_pass(self, positions: int, seconds: float) -> None:
        """Record a pass over windows: its positions and seconds."""
        self._recorded = True
        usual_s = self.predict_pass_s(positions)
        self._steady += 1
        if 0.0 < _STALLED * usual_s < seconds:
            seconds = usual_s if self._steady > _BEFORE else _STALLED * usual_s
            self._steady = 0
        expected_s = self._initial_time(positions)
        self._weight = _FADE * self._weight + 1.0
        self._positions = _FADE * self._positions + positions
        self._spent_s = _FADE * self._spent_s + seconds
        self._squares = _FADE * self._squares + positions * positions
        self._products = _FADE * self._products + positions * seconds
        self._expected_s = _FADE * self._expected_s + expected_s
        self._tokens *= _FADE

    def skip_pass(self) -> None:
        """Leave out a pass that also read a prompt, together with its committed tokens."""
        self._recorded = False

    def record_tokens(self, tokens: int) -> None:
        """Record the tokens that the last pass committed."""
        if self._recorded:
            self._tokens += tokens

    @property
    def seconds_per_position(self) -> float:
        """Seconds that one more position adds to a pass, b."""
        if not self._weight:
            return self._slope_s
        slower = self._spent_s / self._expected_s if self._expected_s else 1.0
        mean = self._positions / self._weight
        squares = self._squares - mean * self._positions  # Σ (positions − mean)²
        products = self._products - mean * self._spent_s
        fitted = (_TRUST * self._slope_s * slower + products) / (_TRUST + squares)
        return max(0.0, fitted)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of target time, X; before the first pass, one token per pass."""
        if self._tokens and self._spent_s:
            return self._tokens / self._spent_s
        return 1.0 / self._seconds[0] if self._seconds[0] else 0.0

    @property
    def tokens_per_draft(self) -> float:
        """Cost of a draft in tokens, b·X."""
        return max(_LEAST, float(self.seconds_per_position * self.tokens_per_s))

    @property
    def seconds_per_pass(self) -> float:
        """Seconds of a pass, the mean of the last ones; before the first, of one position."""
        return self._spent_s / self._weight if self._weight else self._seconds[0]

    def predict_pass_s(self, positions: int) -> float:
        """Estimate the seconds of a pass over this number of positions."""
        if not self._weight:
            return self._initial_time(positions)
        beyond = positions - self._positions / self._weight
        return max(0.0, self._spent_s / self._weight + beyond * self.seconds_per_position)

    def _initial_time(self, positions: int) -> float:
        """Interpolate the times measured at the start; beyond them the nearest one holds.

        Each pass asks once, and `np.interp` takes longer than this for so few numbers.
        """
        widths, seconds = self._widths, self._seconds
        above = bisect_right(widths, positions)
        if above == 0:
            return seconds[0]
        if above == len(widths):
            return seconds[-1]
        below = above - 1
        slope = (seconds[above] - seconds[below]) / (widths[above] - widths[below])
        return slope * (positions - widths[below]) + seconds[below]

    def allocate(
        self, positions: int, proposals: Sequence[Sequence[float]], tokens_per_pass: Sequence[float]
    ) -> list[int]:
        """Return the number of drafts that a pass takes from each session.

        positions: positions of the pass without drafts. proposals: for each session, the path
        acceptances of its drafts, falling. tokens_per_pass: recent speed of each session; a session
        without drafts has 1.
        """
        counts = [len(proposal) for proposal in proposals]
        position_s = self.seconds_per_position
        if len(proposals) == 1 or position_s <= 0.0:
            return counts
        longer_s = (min(tokens_per_pass) / (1.0 - _SLOWED) - 1.0) * self.predict_pass_s(positions)
        room = longer_s / position_s + self._saved
        if sum(counts) > room:
            best = sorted(
                (-acceptance, at) for at, offer in enumerate(proposals) for acceptance in offer
            )
            counts = [0] * len(proposals)
            for _, at in best[: int(room)]:
                counts[at] += 1
        self._saved = min(_SAVED, room - sum(counts))
        return counts


def _slope(
    widths: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    seconds: "np.ndarray[tuple[int], np.dtype[np.float64]]",
) -> float:
    """Fit the slope of seconds [n] over widths [n] by least squares."""
    deviations = widths - widths.mean()
    squares = float(deviations @ deviations)
    return max(0.0, float(deviations @ (seconds - seconds.mean())) / squares) if squares else 0.0
