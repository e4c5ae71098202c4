"""`Judge`: answers questions with a pair and a decision head, for the figures of wisv.

In:  settings: window, threshold, link. Out: the answers under each setting, and their costs over a
     link.

The rooms of the lab do not import each other. So the command gives a bench its judge: it makes one
of the walks of `judge.sweeping`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pilotfish.lab.field.resampling import Floats
from pilotfish.speculation.latency import Link

if TYPE_CHECKING:
    from pilotfish.lab.field.papers.figure import Bench

QUESTIONS = 30  # number of a judge's questions: as many of each kind


class JudgedSetting(NamedTuple):
    """How questions are answered, at temperature 0.

    window: L, draft tokens of a round. threshold: bound of ρ; None: no head, as under `greedy`.
    link: the link that the head reads; None: the link is unknown to it.
    """

    window: int
    threshold: float | None = None
    link: Link | None = None


class AnswerCosts(NamedTuple):
    """What each answer costs over a link, f64 [questions] each. up, down: bytes of the frames.

    draft_s, verify_s: the measured seconds of a drafter's pass over a token, and of a target's pass
    over a whole window.
    """

    seconds: Floats
    up: Floats
    down: Floats
    draft_s: float
    verify_s: float


@dataclass(frozen=True, eq=False)
class JudgedAnswers:
    """The answers under one setting, f64 [questions] each.

    right: 1 or 0. tokens, rounds: numbers. mismatches: number that the head decided on; forgiven:
    number that it forgave. costs: function of a protocol's name and a link. The bytes follow from
    the counted rounds; the seconds are modelled from measured passes.
    """

    right: Floats
    tokens: Floats
    rounds: Floats
    mismatches: Floats
    forgiven: Floats
    costs: Callable[[str, Link], AnswerCosts]


class Judge(Protocol):
    """A decision head, and questions for it.

    digest: SHA-256 of the head's weights. threshold: the one that its card recommends. curve: its
    thresholds, ascending. prompts: the questions' texts.
    """

    digest: str
    threshold: float
    curve: Sequence[float]
    prompts: Sequence[str]

    def answer(
        self, bench: "Bench", settings: Sequence[JudgedSetting], *, costs: bool
    ) -> Sequence[JudgedAnswers]:
        """Answer all questions under each setting.

        costs: whether `JudgedAnswers.costs` will be called. Then each window is drafted to its end,
        which takes longer. Raises `PairMismatchError` if the head was made for another pair.
        """
