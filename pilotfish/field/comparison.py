"""What drafters are worth, by where they agree with the target's answers, and by their pace.

In:  of each drafter, agreement by prompt and the seconds of a draft; the target's passes. Out:
     figures with 95 % intervals, and which drafter to ship at which RTT.

Intervals are percentile bootstraps over *prompts* (Efron 1979): the tokens of an answer depend on
each other, answers to different prompts do not. All drafters are drawn with the same prompts, so
two are compared on the same ground. With fewer than 3 prompts there are none.

Expected tokens/s are of one session in its steady state, without the reading of the prompt: of
rounds as they would have gone along these very answers, with the best window; of `ahead` by its
model (`speculation.ahead`), from α by depth. A drafter's pace is that of this machine at rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.choice.acceptance import smoothed
from pilotfish.device_runtime.choice.pace import pass_s
from pilotfish.field.agreement import Agreed, accepted, by_depth
from pilotfish.field.answering import Answered
from pilotfish.field.resampling import Estimate, estimate, resampled
from pilotfish.speculation.ahead import survival
from pilotfish.speculation.speeds import ALIKE, GAIN, best_window, hinted_token_s, worth_most
from pilotfish.wire.messages import Welcome
from pilotfish.wire.protocols import STREAM
from pilotfish.wire.protocols.ahead import MOST_DRAFTS

AHEAD = "ahead"
DEPTHS = 64  # that are told apart
WINDOWS = 16  # the longest
GROUPS = ((0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, DEPTHS))  # of depths, for people
RUNS = (1, 2, 4, 8, 16)
SPEEDS = 100  # resamples of a speed; each is a run of the model of `ahead`
FEW = 10  # drafts; a share of fewer says too little to be shown
_HOPE = 0.5  # α without evidence
Floats = NDArray[np.float64]
Progress = Callable[[str, int, "int | None"], None]


class DepthFigures(NamedTuple):
    """α at depths from ``first`` to below ``end`` of a run, and how many drafts stood there."""

    first: int
    end: int
    reached: int
    acceptance: Estimate

    @property
    def seen(self) -> Estimate:
        """α, where enough was seen of it to be shown."""
        return self.acceptance if self.reached >= FEW else Estimate(None)


class Expected(NamedTuple):
    """Tokens a second at an RTT, and over those of `stream`; window: of rounds, 0 under `ahead`."""

    rtt_s: float
    protocol: str
    window: int
    tokens_per_s: Estimate
    gain: float
    ahead_per_s: float
    rounds_per_s: float


@dataclass(frozen=True, kw_only=True)
class DrafterEntry:
    """What there is to compare of a drafter. agreed: by prompt; draft_s: of a draft."""

    name: str
    size_bytes: int
    draft_s: float
    agreed: Mapping[int, Agreed]


@dataclass(frozen=True, kw_only=True)
class DrafterFigures:
    """A drafter's figures. survival: by length, that so many drafts in a row are right."""

    name: str
    size_bytes: int
    draft_s: float
    prompts: int
    left_out: int  # prompts without room for their answers
    tokens: int
    acceptance: Estimate
    by_depth: list[DepthFigures]
    survival: dict[int, Estimate]
    expected: list[Expected]


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """What to take at an RTT; drafter None: none, `stream`. alike: others, within the error."""

    rtt_s: float
    drafter: str | None
    protocol: str
    window: int
    tokens_per_s: float
    gain: float
    alike: list[str]


@dataclass(frozen=True, kw_only=True)
class DrafterComparison:
    """The whole. pass_s: of the target by its drafts, 0 and on."""

    prompts: int
    pass_s: list[float]
    streamed_per_s: float
    drafters: list[DrafterFigures]
    ship: list[Shipped]


def target_passes(
    welcome: Welcome, answers: Sequence[Answered], pass_ms: float | None = None
) -> list[float]:
    """Seconds of the target's passes that take 0, 1, … drafts: as it told, at the pace as it was.

    A target that told none counts as one that takes as long for many tokens as for one. pass_ms: so
    long does any take.
    """
    if pass_ms is not None:
        return [pass_ms * 1e-3] * (WINDOWS + 1)
    seen = [one.pass_s for one in answers if one.pass_s > 0.0]
    told = {one.tokens: one.ns * 1e-9 for one in sorted(welcome.passes, key=lambda one: one.tokens)}
    if not told:
        told = {1: median(seen) if seen else 0.05}
        return [told[1]] * (WINDOWS + 1)
    factor = median(seen) / pass_s(told, 1) if seen else 1.0
    return [factor * pass_s(told, 1 + drafts) for drafts in range(WINDOWS + 1)]


def compare(
    entries: Sequence[DrafterEntry],
    *,
    prompts: int,
    target_s: Sequence[float],
    rtts_s: Sequence[float],
    longest: int = WINDOWS,
    in_rounds: str = "greedy",
    progress: Progress = lambda label, done, total: None,
) -> DrafterComparison:
    """Compare drafters over so many prompts, numbered from 0.

    target_s: seconds of passes that take 0 to ``longest`` drafts, or more; longest: of windows.
    in_rounds: the protocol that goes round by round.
    """
    weights = resampled(prompts)
    ordered = sorted(entries, key=lambda one: one.size_bytes)
    tallies = [_Tally(one, prompts, min(longest, len(target_s) - 1), in_rounds) for one in ordered]
    rates: list[dict[str, _Rates]] = []  # [RTTs], of all drafters by name
    for rtt_s in rtts_s:
        progress("expecting speeds", len(rates), len(rtts_s))
        rates.append(
            {one.entry.name: one.rates(weights[: 1 + SPEEDS], rtt_s, target_s) for one in tallies}
        )
    return DrafterComparison(
        prompts=prompts,
        pass_s=list(target_s),
        streamed_per_s=1.0 / target_s[0],
        drafters=[
            one.figures(weights, [found[one.entry.name] for found in rates], target_s)
            for one in tallies
        ],
        ship=[_shipped(found, target_s) for found in rates],
    )


class _Rates(NamedTuple):
    """Of a drafter at an RTT: tokens/s of every resample, f64 [1 + resamples], and the best way."""

    rtt_s: float
    protocol: str
    window: int
    best: Floats
    ahead_per_s: float
    rounds_per_s: float


class _Tally:
    """A drafter's counts by prompt."""

    def __init__(self, entry: DrafterEntry, prompts: int, longest: int, in_rounds: str) -> None:
        self.entry = entry
        self._in_rounds = in_rounds
        self._reached = np.zeros((prompts, DEPTHS))
        self._right = np.zeros((prompts, DEPTHS))
        self._tokens = np.zeros(prompts)
        self._rounds = np.zeros((prompts, longest))
        for prompt, agreed in entry.agreed.items():
            self._reached[prompt], self._right[prompt] = by_depth(agreed, DEPTHS)
            self._tokens[prompt] = len(agreed)
            self._rounds[prompt] = [len(accepted(agreed, 1 + at)) for at in range(longest)]

    def rates(self, weights: Floats, rtt_s: float, target_s: Sequence[float]) -> _Rates:
        """Compute tokens/s at an RTT, in each resample of the way that is best in all prompts."""
        draft_s = self.entry.draft_s
        reached, right = weights @ self._reached, weights @ self._right
        ahead = np.array(
            [
                1.0
                / hinted_token_s(
                    smoothed(seen, true, _HOPE),
                    rtt_s=rtt_s,
                    draft_s=draft_s,
                    pass_s=target_s[: MOST_DRAFTS + 1],
                )
                for seen, true in zip(reached, right, strict=True)
            ]
        )
        # a prompt's answer may be drawn never: then nothing is known, and none is drafted
        tokens = (weights @ self._tokens)[:, None] / np.maximum(weights @ self._rounds, 1.0)
        window, round_s = best_window(
            np.maximum(tokens[0], 1.0).tolist(), rtt_s=rtt_s, draft_s=draft_s, pass_s=target_s
        )
        rounds = np.maximum(tokens[:, window - 1], 1.0) / (
            window * draft_s + rtt_s + target_s[window]
        )
        hinted = bool(ahead[0] * round_s >= 1.0)
        return _Rates(
            rtt_s,
            AHEAD if hinted else self._in_rounds,
            0 if hinted else window,
            ahead if hinted else rounds,
            float(ahead[0]),
            1.0 / round_s,
        )

    def figures(
        self, weights: Floats, found: Sequence[_Rates], target_s: Sequence[float]
    ) -> DrafterFigures:
        """Compute all figures."""
        entry = self.entry
        reached, right = weights @ self._reached, weights @ self._right
        with np.errstate(invalid="ignore", divide="ignore"):
            hazards = right / reached  # [resamples, depths]
            whole = right.sum(axis=1) / reached.sum(axis=1)
            grouped = [
                right[:, first:end].sum(axis=1) / reached[:, first:end].sum(axis=1)
                for first, end in GROUPS
            ]
        runs = np.array([survival(row) for row in hazards])
        return DrafterFigures(
            name=entry.name,
            size_bytes=entry.size_bytes,
            draft_s=entry.draft_s,
            prompts=len(entry.agreed),
            left_out=len(self._tokens) - len(entry.agreed),
            tokens=int(self._tokens.sum()),
            acceptance=estimate(whole),
            by_depth=[
                DepthFigures(first, end, int(self._reached[:, first:end].sum()), estimate(values))
                for (first, end), values in zip(GROUPS, grouped, strict=True)
            ],
            survival={length: estimate(runs[:, length]) for length in RUNS},
            expected=[
                Expected(
                    one.rtt_s,
                    one.protocol,
                    one.window,
                    estimate(one.best),
                    float(one.best[0]) * target_s[0],
                    one.ahead_per_s,
                    one.rounds_per_s,
                )
                for one in found
            ],
        )


def _shipped(rates: Mapping[str, _Rates], target_s: Sequence[float]) -> Shipped:
    """Choose at an RTT; rates: of drafters, the smallest first."""
    name = worth_most({name: float(one.best[0]) for name, one in rates.items()})
    won = rates[name]
    gain = float(won.best[0]) * target_s[0]
    if gain < GAIN:
        return Shipped(
            rtt_s=won.rtt_s,
            drafter=None,
            protocol=STREAM,
            window=0,
            tokens_per_s=1.0 / target_s[0],
            gain=1.0,
            alike=[],
        )
    return Shipped(
        rtt_s=won.rtt_s,
        drafter=name,
        protocol=won.protocol,
        window=won.window,
        tokens_per_s=float(won.best[0]),
        gain=gain,
        alike=[other for other, one in rates.items() if other != name and _alike(one, won)],
    )


def _alike(one: _Rates, won: _Rates) -> bool:
    """Whether a drafter cannot be told from the one that is taken: by times, or by prompts."""
    ratio = estimate(one.best / won.best)
    assert ratio.value is not None
    if ratio.value >= ALIKE:
        return True
    return ratio.high is not None and ratio.high >= 1.0
