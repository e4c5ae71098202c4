"""Chooses what makes a token key, for a pair (decentralized-dsd §2.3: λ₁, λ₂, λ₃ are calibrated).

In:  prompts, τ, and a budget: the mean deviation a position that is accepted. Out: what target and
     drafter say at each position of answers that the target samples; and, of that, the relaxation.

Method. The text of an answer under `adaptive` is the target's but for the deviation, so positions
are taken from answers of the target alone, each with p and the q̂ that a device would draft from
there. As acceptance rises by exactly the deviation (`speculation.adaptive`), any λ that use up the
budget accept equally much of a position; they differ in where. So what is maximised is the expected
number of tokens of a round of γ drafts, 1 + Σₖ Π αᵢ over the positions that follow each other (tslt
(8) with an α a position). λ₁ runs over quantiles of the entropy ratios, λ₃ over tenths, and for
each pair of them λ₂ is the largest gap with which the mean deviation stays within the budget. Some
prompts are kept out: what the choice does there is what it may be trusted with.
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
from pilotfish.device_runtime.bridge import Pair
from pilotfish.edge_runtime.relaxation_file import Outcome
from pilotfish.judge.model_passes import Procedure, Readers
from pilotfish.judge.question_reader import PairSettings, QuestionReader
from pilotfish.judge.tasks import TASKS, Question
from pilotfish.speculation.adaptive import HIGHEST_RATIO, DistributionComparison, Relaxation
from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.randomness import Purpose, noise, sample
from pilotfish.speculation.truncation import truncate
from pilotfish.wire.codecs.sparse import ROW_TOKENS
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols.adaptive import Adaptive

QUANTILES, TENTHS = 20, 10

Values = NDArray[np.float64]


class CalibrateSettings(PairSettings, frozen=True, kw_only=True):
    """What ``pilotfish judge calibrate`` is told."""

    prompts: Annotated[
        Path,
        setting(
            "a prompt a line, or JSON lines with 'prompt' or 'question'; two at least",
            metavar="FILE",
        ),
    ]
    out: Annotated[Path, setting("for edge serve --relaxation", metavar="NAME.json")]
    task: (
        Annotated[
            str,
            setting(
                "ask as this task does, see judge mine; FILE is then its questions",
                choices=tuple(name for name, task in TASKS.items() if task.instruction),
            ),
        ]
        | None
    ) = None
    tau: Annotated[float, setting("how far to soften", ge=0, le=1, metavar="τ")] = 0.2
    deviation: Annotated[
        float,
        setting("the budget: mean total variation a position", ge=0, le=1, metavar="D"),
    ] = 0.02
    temperature: Annotated[float, setting("of both", gt=0, metavar="T")] = 1.0
    draft_top_k: Annotated[
        int, setting("as the drafter will be truncated; 0: not at all", ge=0, metavar="K")
    ] = Adaptive.default_top_k
    window: Annotated[
        int, setting("draft tokens of the rounds that are to become long", ge=1, le=MAX_WINDOW)
    ] = 4
    max_tokens: Annotated[int, setting("an answer's", ge=1)] = 64
    seed: Annotated[int, setting("of all draws", ge=0)] = 0
    count: Annotated[int, setting("the first N prompts (default: all)", ge=2)] | None = None


class Position(NamedTuple):
    """What the rule goes by at one position, over the tokens [K] of q̂.

    drawn: q̂. gap: |p − q̂|. gain: what τ adds to each token's acceptance where it is not key. All
    f64 [K]. strict: the position's acceptance without that.
    """

    entropy_ratio: float
    norm_match: float
    strict: float
    drawn: Values
    gap: Values
    gain: Values

    @classmethod
    def from_comparison(cls, comparison: DistributionComparison, tau: float) -> Position:
        """Keep of a comparison what the rule goes by."""
        strict = comparison.strict()
        return cls(
            comparison.entropy_ratio,
            comparison.norm_match,
            float(strict.sum()),
            comparison.drafter,
            comparison.gap,
            comparison.softened(tau) - strict,
        )


@dataclass(frozen=True, eq=False)
class ObservedPositions:
    """The positions of some answers, one behind the other.

    answer: i64 [n], to which answer each belongs. entropy_ratio, norm_match, strict: f64 [n]. at:
    i64 [m], to which position each of the tokens belongs; drawn, gap, gain: f64 [m].
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
        """Join the positions of answers, of at least one position together."""
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

    def key(self, relaxation: Relaxation) -> NDArray[np.bool_]:
        """Say which of the tokens are key, bool [m]."""
        all_key = ~self.loose(relaxation.lambda1, relaxation.lambda3)
        key_tokens: NDArray[np.bool_] = all_key[self.at] | (self.gap > relaxation.lambda2)
        return key_tokens

    def loose(self, lambda1: float, lambda3: float) -> NDArray[np.bool_]:
        """Say at which positions λ₁ and λ₃ leave a token that is not key, bool [n]."""
        loose_positions: NDArray[np.bool_] = (self.entropy_ratio <= lambda1) & (
            self.norm_match >= lambda3
        )
        return loose_positions

    def deviation(self, relaxation: Relaxation) -> Values:
        """Compute the deviation of each position, f64 [n]."""
        spared = np.where(self.key(relaxation), 0.0, self.gain)
        return np.bincount(self.at, spared, len(self)).astype(np.float64)

    def tokens(self, alpha: Values, window: int) -> float:
        """Compute the expected tokens of a round of γ = ``window`` drafts, over where it begins.

        alpha: the acceptance of each, f64 [n]. A round ends with its answer.
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
        """Say what a relaxation does at these positions; its τ is the one observed with."""
        deviation = self.deviation(relaxation)
        relaxed = np.minimum(1.0, self.strict + deviation)
        key = np.bincount(self.at, self.drawn * self.key(relaxation), len(self))
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
    """Choose the relaxation with the most expected tokens of a round, of those within the budget.

    Where nothing fits it, not even a single token, every one is key.
    """
    best = Relaxation(tau=tau, lambda1=0.0, lambda2=0.0, lambda3=1.0)
    most = observed.tokens(observed.strict, window)
    order = np.argsort(observed.gap, kind="stable")
    order = order[observed.gain[order] > 0.0]
    ratios = np.unique(np.quantile(observed.entropy_ratio, np.linspace(0.0, 1.0, QUANTILES + 1)))
    for lambda1 in np.minimum(ratios, HIGHEST_RATIO).tolist():
        for lambda3 in np.linspace(1.0, 0.0, TENTHS + 1).tolist():
            spared = order[observed.loose(lambda1, lambda3)[observed.at[order]]]
            lambda2 = _widest(observed.gap[spared], observed.gain[spared], budget * len(observed))
            candidate = Relaxation(tau=tau, lambda1=lambda1, lambda2=lambda2, lambda3=lambda3)
            tokens = observed.tokens(observed.strict + observed.deviation(candidate), window)
            if tokens > most:
                best, most = candidate, tokens
    return best


def _widest(gaps: Values, gains: Values, most: float) -> float:
    """Find the largest gap up to which the gains, in ascending order of gaps, sum to ``most``."""
    ends = np.flatnonzero(np.diff(gaps, append=np.inf) > 0.0)  # the last of equal gaps
    fitting = ends[np.cumsum(gains)[ends] <= most]
    return float(gaps[fitting[-1]]) if len(fitting) else 0.0


def observe(
    readers: Readers,
    pair: Pair,
    questions: Sequence[Question],
    settings: CalibrateSettings,
    on_position: Callable[[], None] = lambda: None,
) -> Iterator[tuple[str, list[Position]]]:
    """Yield the positions of each question's answer by its key, in the order in which they end.

    on_position is called after each position.
    """
    try:
        target = Sampling(temperature=settings.temperature)
        drafter = Sampling(temperature=settings.temperature, top_k=settings.draft_top_k)
    except ValueError as error:
        raise UnsupportedError(f"{error}.") from error
    if target.greedy:
        raise UnsupportedError("Nothing can be relaxed at temperature 0: calibrate above it.")

    def begin(number: int, question: Question) -> Procedure[list[Position]]:
        """Sample the target's answer, and compare both ends at each of its tokens."""
        reader = QuestionReader(question, pair, settings.max_tokens)
        answer: list[int] = []
        positions: list[Position] = []
        drafts, start = reader.window(answer), 0
        while len(answer) < settings.max_tokens and not reader.ended(answer):
            reading = yield drafts.read(answer[start:])
            row = truncate(drafts.logits(reading)[0], drafter, ROW_TOKENS).row(0)
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
