"""What a draft costs a target pass, in tokens that the edge makes fewer meanwhile.

In:  each pass: its positions, its seconds, the tokens that it committed. Out: the price; and of the
drafts that several sessions offer a pass, how many it takes.

A pass over S positions takes a + b·S. A draft adds a position, so it delays every session of the
pass by b; in that time the edge would have made b·X tokens, X being its tokens a second. A draft is
worth its odds: it is taken if they are at least b·X. So a full edge takes none, and `ahead` is
`stream` there; a lone session's draft costs next to nothing.

That is fair to the sum of all sessions, not to each. So where sessions share a pass, drafts may
make it longer only by what the one that gains least has gained lately, and 1.5 %: one that brings
no drafts shall keep 0.97 of its tokens a second, and taking in the hints of others costs as much.
"""

from collections.abc import Mapping, Sequence

import numpy as np

_FADE = 0.98  # a pass
# How much the slope that was measured at the start counts, as a sum of squared deviations: passes
# of one size tell nothing about the slope.
_TRUST = 40.0
# A pass that takes more than so many times what was expected stalled: the edge stood still, which
# says nothing of positions. If passes before it did, too, so many times count: what lasts is
# followed.
_STALLED, _BEFORE = 4.0, 16
_LEAST = 0.002  # of a price: no draft is free
_SLOWED = 0.015  # of its tokens a second, that a session may lose by the drafts of others
_SAVED = 4.0  # drafts that passes may leave to later ones


class DraftCost:
    """Fits b and X, by passes of at most a window a session.

    at_start: seconds of a pass by its positions.
    """

    def __init__(self, initial_times: Mapping[int, float]) -> None:
        self._widths = np.array([*initial_times], dtype=np.float64) if initial_times else np.ones(1)
        self._seconds = np.array([*initial_times.values()], dtype=np.float64)
        if not initial_times:
            self._seconds = np.zeros(1)
        self._slope_s = _slope(self._widths, self._seconds)
        self._weight = self._positions = self._spent_s = 0.0
        self._squares = self._products = 0.0  # Σ S², Σ S·seconds
        self._expected_s = 0.0  # what these passes would have taken at the start
        self._tokens = 0.0
        self._saved = 0.0  # drafts that shared passes could have taken
        self._noted = True  # whether the last pass was
        self._steady = _BEFORE  # passes since one stalled

    def record_pass(self, positions: int, seconds: float) -> None:
        """Note a pass."""
        self._noted = True
        usual_s = self.predict_pass_s(positions)
        self._steady += 1
        if 0.0 < _STALLED * usual_s < seconds:
            seconds = usual_s if self._steady > _BEFORE else _STALLED * usual_s
            self._steady = 0
        expected_s = float(np.interp(positions, self._widths, self._seconds))
        self._weight = _FADE * self._weight + 1.0
        self._positions = _FADE * self._positions + positions
        self._spent_s = _FADE * self._spent_s + seconds
        self._squares = _FADE * self._squares + positions * positions
        self._products = _FADE * self._products + positions * seconds
        self._expected_s = _FADE * self._expected_s + expected_s
        self._tokens *= _FADE

    def skip_pass(self) -> None:
        """Leave out a pass, since it read a prompt as well, and the tokens that it commits."""
        self._noted = False

    def record_tokens(self, tokens: int) -> None:
        """Note tokens that the last pass committed."""
        if self._noted:
            self._tokens += tokens

    @property
    def seconds_per_position(self) -> float:
        """b: seconds that a position adds to a pass."""
        if not self._weight:
            return self._slope_s
        slower = self._spent_s / self._expected_s if self._expected_s else 1.0
        mean = self._positions / self._weight
        squares = self._squares - mean * self._positions  # of deviations
        products = self._products - mean * self._spent_s
        fitted = (_TRUST * self._slope_s * slower + products) / (_TRUST + squares)
        return max(0.0, fitted)

    @property
    def tokens_per_s(self) -> float:
        """X, while the target is at work; one token a pass before there was any."""
        if self._tokens and self._spent_s:
            return self._tokens / self._spent_s
        return 1.0 / self._seconds[0] if self._seconds[0] else 0.0

    @property
    def tokens_per_draft(self) -> float:
        """b·X: the tokens that a draft costs."""
        return max(_LEAST, float(self.seconds_per_position * self.tokens_per_s))

    def predict_pass_s(self, positions: int) -> float:
        """Estimate the seconds of a pass."""
        if not self._weight:
            return float(np.interp(positions, self._widths, self._seconds))
        beyond = positions - self._positions / self._weight
        return max(0.0, self._spent_s / self._weight + beyond * self.seconds_per_position)

    def allocate(
        self, positions: int, proposals: Sequence[Sequence[float]], tokens_per_pass: Sequence[float]
    ) -> list[int]:
        """Count the drafts of each session that a pass takes.

        positions: without drafts. offers: odds of each session's drafts, along the path and so
        falling. paces: tokens a pass that each session has had lately; 1 without drafts.
        """
        counts = [len(offer) for offer in proposals]
        position_s = self.seconds_per_position
        if len(proposals) == 1 or position_s <= 0.0:
            return counts
        longer_s = (min(tokens_per_pass) / (1.0 - _SLOWED) - 1.0) * self.predict_pass_s(positions)
        room = longer_s / position_s + self._saved
        if sum(counts) > room:
            best = sorted((-odds, at) for at, offer in enumerate(proposals) for odds in offer)
            counts = [0] * len(proposals)
            for _, at in best[: int(room)]:
                counts[at] += 1
        self._saved = min(_SAVED, room - sum(counts))
        return counts


def _slope(
    widths: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    seconds: "np.ndarray[tuple[int], np.dtype[np.float64]]",
) -> float:
    """Fit the slope of seconds over widths by least squares."""
    deviations = widths - widths.mean()
    squares = float(deviations @ deviations)
    return max(0.0, float(deviations @ (seconds - seconds.mean())) / squares) if squares else 0.0
