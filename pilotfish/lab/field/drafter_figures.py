"""Compute a drafter's measured values from its speed and its agreement with the target's answers.

In:  agreement by prompt, seconds per draft, and seconds of the target's passes. Out: acceptance,
    survival and expected tokens/s, with 95 % intervals (`field.resampling`).

Expected tokens/s hold for a single session, after the first round (`field.token_speed`). For
protocols in rounds they are computed from the number of rounds that these answers need with the
best window. For `ahead` they are computed from α by depth, by the model in `speculation.ahead`. The
seconds per draft are measured on this machine while it does nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.choice.acceptance import smooth
from pilotfish.lab.agreement import Agreed, count_accepted, count_by_depth
from pilotfish.lab.field.resampling import Estimate, estimate
from pilotfish.speculation.ahead import survival
from pilotfish.speculation.speeds import best_window, hinted_token_s
from pilotfish.wire.protocols.ahead import MOST_DRAFTS

AHEAD = "ahead"
# number of depths that are counted separately; the last depth also counts all deeper drafts
DEPTHS = 64
GROUPS = ((0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, DEPTHS))  # ranges of depths in tables
RUNS = (1, 2, 4, 8, 16)
# number of resamples for a speed; small, because each resample runs the model of `ahead`
SPEEDS = 100
FEWEST_DRAFTS = 10  # minimum number of drafts for which a share is shown
_HOPE = 0.0  # assumed α at depths without any draft
Floats = NDArray[np.float64]


class DepthFigures(NamedTuple):
    """The acceptance α at the depths ``first`` to ``end`` − 1 of a run.

    reached: number of drafts at these depths.
    """

    first: int
    end: int
    reached: int
    acceptance: Estimate

    @property
    def reliable_acceptance(self) -> Estimate:
        """The acceptance if at least `FEWEST_DRAFTS` drafts reached these depths, else none."""
        return self.acceptance if self.reached >= FEWEST_DRAFTS else Estimate(None)


class ExpectedSpeed(NamedTuple):
    """The expected tokens/s at an RTT, with the faster of `ahead` and a protocol in rounds.

    protocol: name of the faster protocol. window: draft tokens per round; 0 under `ahead`. gain:
    ratio to the tokens/s of `stream`. ahead_per_s, rounds_per_s: tokens/s of either protocol.
    """

    rtt_s: float
    protocol: str
    window: int
    tokens_per_s: Estimate
    gain: float
    ahead_per_s: float
    rounds_per_s: float


@dataclass(frozen=True, kw_only=True)
class DrafterEntry:
    """A drafter to compare.

    draft_s: seconds per draft token. agreed: whether each token of an answer is drafted correctly,
    bool [n], by prompt number.
    """

    name: str
    size_bytes: int
    draft_s: float
    agreed: Mapping[int, Agreed]


@dataclass(frozen=True, kw_only=True)
class DrafterFigures:
    """The measured values of a drafter.

    survival: by k, S(k), the share of runs that begin with k right drafts. expected: expected speed
    for each RTT.
    """

    name: str
    size_bytes: int
    draft_s: float
    prompts: int
    left_out: int  # number of prompts that, with their answers, exceed the drafter's context
    tokens: int
    acceptance: Estimate
    by_depth: list[DepthFigures]
    survival: dict[int, Estimate]
    expected: list[ExpectedSpeed]


class Rates(NamedTuple):
    """A drafter's tokens/s at an RTT, with its fastest protocol and window.

    best: tokens/s in each resample, f64 [1 + resamples]; the first is over all prompts.
    ahead_per_s, rounds_per_s: tokens/s of `ahead` and of the protocol in rounds, over all prompts.
    """

    rtt_s: float
    protocol: str
    window: int
    best: Floats
    ahead_per_s: float
    rounds_per_s: float


class DrafterCounts:
    """The counts of a drafter's drafts, tokens and rounds, by prompt."""

    def __init__(self, entry: DrafterEntry, prompts: int, longest: int, in_rounds: str) -> None:
        self.entry = entry
        self._in_rounds = in_rounds
        self._reached = np.zeros((prompts, DEPTHS))
        self._right = np.zeros((prompts, DEPTHS))
        self._tokens = np.zeros(prompts)
        self._rounds = np.zeros((prompts, longest))
        for prompt, agreed in entry.agreed.items():
            self._reached[prompt], self._right[prompt] = count_by_depth(agreed, DEPTHS)
            self._tokens[prompt] = len(agreed)
            self._rounds[prompt] = [len(count_accepted(agreed, 1 + at)) for at in range(longest)]

    def rates(self, weights: Floats, rtt_s: float, target_s: Sequence[float]) -> Rates:
        """Compute tokens/s at an RTT in each resample.

        The protocol and window that are fastest over all prompts are used in every resample.
        """
        draft_s = self.entry.draft_s
        reached, right = weights @ self._reached, weights @ self._right
        ahead = np.array(
            [
                1.0
                / hinted_token_s(
                    smooth(count, right_count, _HOPE),
                    rtt_s=rtt_s,
                    draft_s=draft_s,
                    pass_s=target_s[: MOST_DRAFTS + 1],
                )
                for count, right_count in zip(reached, right, strict=True)
            ]
        )
        # A resample may contain no answer that fits this drafter. It then counts as one token per
        # round.
        tokens = (weights @ self._tokens)[:, None] / np.maximum(weights @ self._rounds, 1.0)
        window, round_s = best_window(
            np.maximum(tokens[0], 1.0).tolist(), rtt_s=rtt_s, draft_s=draft_s, pass_s=target_s
        )
        rounds = np.maximum(tokens[:, window - 1], 1.0) / (
            window * draft_s + rtt_s + target_s[window]
        )
        hinted = bool(ahead[0] * round_s >= 1.0)
        return Rates(
            rtt_s,
            AHEAD if hinted else self._in_rounds,
            0 if hinted else window,
            ahead if hinted else rounds,
            float(ahead[0]),
            1.0 / round_s,
        )

    def figures(
        self, weights: Floats, rates_by_rtt: Sequence[Rates], target_s: Sequence[float]
    ) -> DrafterFigures:
        """Compute acceptance, survival, agreement by depth and expected speeds of the drafter."""
        entry = self.entry
        reached, right = weights @ self._reached, weights @ self._right
        with np.errstate(invalid="ignore", divide="ignore"):
            hazards = right / reached  # α, [resamples, depths]; NaN where no draft was counted
            overall = right.sum(axis=1) / reached.sum(axis=1)
            grouped = [
                right[:, first:end].sum(axis=1) / reached[:, first:end].sum(axis=1)
                for first, end in GROUPS
            ]
        # If all runs end at a depth, survival beyond it is 0, though α there is unknown (NaN).
        hazards[np.logical_or.accumulate(hazards == 0.0, axis=1)] = 0.0
        runs = np.array([survival(row) for row in hazards])
        return DrafterFigures(
            name=entry.name,
            size_bytes=entry.size_bytes,
            draft_s=entry.draft_s,
            prompts=len(entry.agreed),
            left_out=len(self._tokens) - len(entry.agreed),
            tokens=int(self._tokens.sum()),
            acceptance=estimate(overall),
            by_depth=[
                DepthFigures(first, end, int(self._reached[:, first:end].sum()), estimate(values))
                for (first, end), values in zip(GROUPS, grouped, strict=True)
            ],
            survival={length: estimate(runs[:, length]) for length in RUNS},
            expected=[
                ExpectedSpeed(
                    rates.rtt_s,
                    rates.protocol,
                    rates.window,
                    estimate(rates.best),
                    float(rates.best[0]) * target_s[0],
                    rates.ahead_per_s,
                    rates.rounds_per_s,
                )
                for rates in rates_by_rtt
            ],
        )
