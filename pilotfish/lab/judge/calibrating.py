"""Calibrate the relaxation of `adaptive` for a pair of models (decentralized-dsd §2.3).

A relaxation has a strength τ and the thresholds λ₁, λ₂, λ₃, which decide the key tokens: tokens to
which the strict acceptance rule applies.

In:  prompts, τ, and a budget: the allowed mean deviation (total variation) of a position. Out: the
values of each position of sampled answers, and the relaxation chosen by them.

Method:
- The answers are sampled from the target alone, because relaxed answers deviate little from them.
  At each position, p is the target's distribution and q̂ the one that a device would draft from.
- Relaxation raises a position's acceptance by exactly its deviation (`speculation.adaptive`). So
  all λ that use up the budget raise mean acceptance equally, but at different positions.
- The best λ give the most expected tokens in a round of γ drafts: 1 + Σₖ Π αᵢ over consecutive
  positions, where αᵢ is the acceptance of position i (TSLT, equation 8).
- Candidates: λ₁ from the quantiles of the entropy ratios, λ₃ in steps of a tenth. For each (λ₁, λ₃)
  λ₂ is the largest gap at which the mean deviation stays within the budget.
- The outcome of the chosen λ is measured on prompts that were held out of the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.settings import setting
from pilotfish.bridge import Pair
from pilotfish.edge_runtime.relaxation_file import Outcome
from pilotfish.lab.judge.model_passes import Procedure, Readers
from pilotfish.lab.judge.question_reader import PairSettings, QuestionReader
from pilotfish.lab.judge.tasks import TASKS, Question
from pilotfish.speculation.adaptive import HIGHEST_RATIO, DistributionComparison, Relaxation
from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.randomness import Purpose, noise, sample
from pilotfish.speculation.truncation import truncate
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols.adaptive import Adaptive

QUANTILES, TENTHS = 20, 10

Values = NDArray[np.float64]


class CalibrateSettings(PairSettings, frozen=True, kw_only=True):
    """Options of ``pilotfish judge calibrate``."""

    prompts: Annotated[
        Path,
        setting(
            "prompts, one per line, or JSON lines with 'prompt' or 'question'; at least two",
            metavar="FILE",
        ),
    ]
    out: Annotated[
        Path, setting("output: the file for edge serve --relaxation", metavar="NAME.json")
    ]
    task: (
        Annotated[
            str,
            setting(
                "make the prompts as this task of judge mine does; FILE holds the task's questions",
                choices=tuple(name for name, task in TASKS.items() if task.instruction),
            ),
        ]
        | None
    ) = None
    tau: Annotated[float, setting("strength of the relaxation", ge=0, le=1, metavar="τ")] = 0.2
    deviation: Annotated[
        float,
        setting("budget: maximum mean total variation per position", ge=0, le=1, metavar="D"),
    ] = 0.02
    temperature: Annotated[float, setting("temperature of both models", gt=0, metavar="T")] = 1.0
    draft_top_k: Annotated[
        int,
        setting(
            "number K of likeliest tokens to which the drafter's distribution is truncated",
            ge=1,
            le=2048,  # a calibration keeps three numbers of each token
            metavar="K",
        ),
    ] = Adaptive.default_top_k
    window: Annotated[
        int,
        setting("draft tokens per round, for computing the expected tokens", ge=1, le=MAX_WINDOW),
    ] = 4
    max_tokens: Annotated[int, setting("maximum number of tokens in an answer", ge=1)] = 64
    seed: Annotated[int, setting("seed of all draws", ge=0)] = 0
    count: Annotated[int, setting("use only the first N prompts (default: all)", ge=2)] | None = (
        None
    )


class Position(NamedTuple):
    """One position's inputs of the relaxation rule; K is the number of tokens in q̂.

    strict: the position's acceptance without relaxation. drawn: q̂, f64 [K]. gap: |p − q̂|, f64 [K].
    gain: increase of each token's acceptance by τ if the token is not a key token, f64 [K].
    """

    entropy_ratio: float
    norm_match: float
    strict: float
    drawn: Values
    gap: Values
    gain: Values

    @classmethod
    def from_comparison(cls, comparison: DistributionComparison, tau: float) -> Position:
        """Compute the inputs of the rule from a position's p and q̂."""
        strict = comparison.strict_mass()
        return cls(
            comparison.entropy_ratio,
            comparison.norm_match,
            float(strict.sum()),
            comparison.drafter,
            comparison.gap,
            comparison.softened_mass(tau) - strict,
        )


@dataclass(frozen=True, eq=False)
class ObservedPositions:
    """The n positions of several answers, concatenated, and the m tokens of their q̂.

    answer: index of each position's answer, i64 [n]. entropy_ratio, norm_match, strict: see
    `Position`, f64 [n]. at: index of each token's position, i64 [m]. drawn, gap, gain: see
    `Position`, f64 [m].
    """

    answer: NDArray[np.int64]
    entropy_ratio: Values
    norm_match: Values
    strict: Values
    at: NDArray[np.int64]
    drawn: Values
    gap: Values
    gain: Values

    @classmethod
    def from_answers(cls, answers: Sequence[Sequence[Position]]) -> ObservedPositions:
        """Concatenate the positions of several answers; there must be at least one position."""
        positions = [position for answer in answers for position in answer]
        ratios, matches, strict, drawn, gaps, gains = zip(*positions, strict=True)
        return cls(
            answer=np.repeat(np.arange(len(answers)), [len(answer) for answer in answers]),
            entropy_ratio=np.array(ratios),
            norm_match=np.array(matches),
            strict=np.array(strict),
            at=np.repeat(np.arange(len(positions)), [len(values) for values in gaps]),
            drawn=np.concatenate(drawn),
            gap=np.concatenate(gaps),
            gain=np.concatenate(gains),
        )

    def __len__(self) -> int:
        return len(self.answer)

    def key_tokens(self, relaxation: Relaxation) -> NDArray[np.bool_]:
        """Compute whether each token is a key token, bool [m]."""
        all_key = ~self.relaxable(relaxation.lambda1, relaxation.lambda3)
        key_tokens: NDArray[np.bool_] = all_key[self.at] | (self.gap > relaxation.lambda2)
        return key_tokens

    def relaxable(self, lambda1: float, lambda3: float) -> NDArray[np.bool_]:
        """Compute whether λ₁ and λ₃ allow a position to have tokens that are not key, bool [n]."""
        loose_positions: NDArray[np.bool_] = (self.entropy_ratio <= lambda1) & (
            self.norm_match >= lambda3
        )
        return loose_positions

    def deviation(self, relaxation: Relaxation) -> Values:
        """Compute each position's deviation, the sum of its relaxed tokens' gains, f64 [n]."""
        spared = np.where(self.key_tokens(relaxation), 0.0, self.gain)
        return np.bincount(self.at, spared, len(self)).astype(np.float64)

    def tokens(self, alpha: Values, window: int) -> float:
        """Compute the expected tokens of a round of ``window`` drafts, as a mean over all starts.

        alpha: acceptance of each position, f64 [n]. A round ends where its answer ends.
        """
        reached, total = np.ones(len(self)), np.ones(len(self))
        for ahead in range(min(window, len(self))):
            shifted = np.zeros(len(self))
            same = self.answer[ahead:] == self.answer[: len(self) - ahead]
            shifted[: len(self) - ahead] = np.where(same, alpha[ahead:], 0.0)
            reached *= shifted
            total += reached
        return float(total.mean())

    def outcome(self, relaxation: Relaxation, window: int) -> Outcome:
        """Compute a relaxation's outcome at these positions.

        The relaxation must have the τ with which the gains were computed.
        """
        deviation = self.deviation(relaxation)
        relaxed = np.minimum(1.0, self.strict + deviation)
        key = np.bincount(self.at, self.drawn * self.key_tokens(relaxation), len(self))
        return Outcome(
            prompts=len(np.unique(self.answer)),
            positions=len(self),
            strict=float(np.minimum(1.0, self.strict).mean()),
            relaxed=float(relaxed.mean()),
            deviation=float(deviation.mean()),
            key=min(1.0, float(key.mean())),
            strict_tokens=self.tokens(self.strict, window),
            relaxed_tokens=self.tokens(relaxed, window),
        )


def choose_relaxation(
    observed: ObservedPositions, tau: float, budget: float, window: int
) -> Relaxation:
    """Choose the relaxation with the most expected tokens of a round.

    budget: largest mean deviation. If no relaxation within the budget gains tokens, the result is
    one under which every token is a key token.
    """
    best = Relaxation(tau=tau, lambda1=0.0, lambda2=0.0, lambda3=1.0)
    most = observed.tokens(observed.strict, window)
    order = np.argsort(observed.gap, kind="stable")
    order = order[observed.gain[order] > 0.0]
    ratios = np.unique(np.quantile(observed.entropy_ratio, np.linspace(0.0, 1.0, QUANTILES + 1)))
    for lambda1 in np.minimum(ratios, HIGHEST_RATIO).tolist():
        for lambda3 in np.linspace(1.0, 0.0, TENTHS + 1).tolist():
            spared = order[observed.relaxable(lambda1, lambda3)[observed.at[order]]]
            lambda2 = _largest_gap(
                observed.gap[spared], observed.gain[spared], budget * len(observed)
            )
            candidate = Relaxation(tau=tau, lambda1=lambda1, lambda2=lambda2, lambda3=lambda3)
            tokens = observed.tokens(observed.strict + observed.deviation(candidate), window)
            if tokens > most:
                best, most = candidate, tokens
    return best


def _largest_gap(gaps: Values, gains: Values, most: float) -> float:
    """Find the largest gap for which the gains up to it sum to at most ``most``; 0 if none.

    gaps, gains: f64 [m] each, gaps ascending.
    """
    ends = np.flatnonzero(np.diff(gaps, append=np.inf) > 0.0)  # index of the last of equal gaps
    fitting = ends[np.cumsum(gains)[ends] <= most]
    return float(gaps[fitting[-1]]) if len(fitting) else 0.0


def observe(
    readers: Readers,
    pair: Pair,
    questions: Sequence[Question],
    settings: CalibrateSettings,
    on_position: Callable[[], None] = lambda: None,
) -> Iterator[tuple[str, list[Position]]]:
    """Yield each question's key and the positions of its answer, as soon as the answer ends.

    on_position: callback after each position.
    """
    try:
        target = Sampling(temperature=settings.temperature)
        drafter = Sampling(temperature=settings.temperature, top_k=settings.draft_top_k)
    except ValueError as error:
        raise UnsupportedError(f"{error}.") from error
    if target.greedy:
        raise UnsupportedError("Nothing can be relaxed at temperature 0: use a higher temperature.")

    def begin(number: int, question: Question) -> Procedure[list[Position]]:
        """Sample the target's answer; compare both models' distributions before each token."""
        reader = QuestionReader(question, pair, settings.max_tokens)
        answer: list[int] = []
        positions: list[Position] = []
        drafts, start = reader.window(answer), 0
        while len(answer) < settings.max_tokens and not reader.has_ended(answer):
            reading = yield drafts.read(answer[start:])
            row = truncate(drafts.logits(reading)[0], drafter).row(0)
            logits = yield from reader.logits(answer)
            p = probabilities(logits[None], target)[0]
            positions.append(Position.from_comparison(DistributionComparison(p, row), settings.tau))
            words = noise(len(p), settings.seed + number, Purpose.TARGET, len(answer))
            answer.append(sample(p, words))
            if len(answer) - start == settings.window or not reader.can_draft(answer[-1]):
                drafts, start = reader.window(answer), len(answer)
            on_position()
        return positions

    return readers.run(
        [(question.key, partial(begin, n, question)) for n, question in enumerate(questions)]
    )
