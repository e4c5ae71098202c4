"""The judge of a paper's figures: a decision head, and questions of the task facts.

In:  a head's name, a seed. Out: a `Judge` for `field.papers`, which answers by `judge.sweeping`.

The questions are a set of their own: no head was trained or rated on them.
"""

import time
from collections.abc import Sequence

import numpy as np

from pilotfish.base.errors import UnsupportedError
from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.lab.field.papers.figure import Bench
from pilotfish.lab.field.papers.judged import (
    QUESTIONS,
    AnswerCosts,
    JudgedAnswers,
    JudgedSetting,
)
from pilotfish.lab.field.resampling import Floats
from pilotfish.lab.judge.costs import ModelPace, measure_pace, mismatch_share
from pilotfish.lab.judge.facts_task import make_questions
from pilotfish.lab.judge.figures import total_costs
from pilotfish.lab.judge.model_passes import Readers
from pilotfish.lab.judge.question_reader import count_tokens
from pilotfish.lab.judge.sweep_file import (
    LinkProfile,
    QuestionCounts,
    SweepHeader,
    SweepSetting,
)
from pilotfish.lab.judge.sweep_plan import plan_sweep
from pilotfish.lab.judge.sweeping import sweep
from pilotfish.lab.judge.tasks import Facts
from pilotfish.speculation.latency import Link

MOST = 64  # largest number of tokens of an answer
_EVERY = 1 << 30  # more windows than an answer has
_SLOTS = 16
_LABEL = "answering questions"


class SweepJudge:
    """A `Judge` that answers questions of the task facts by the walks of a sweep.

    head: its name, as for ``--head``. seed: number of the set of questions. Raises `HeadError` if
    there is no such head.
    """

    def __init__(self, head: str, seed: int) -> None:
        self._head = DecisionHead.load(head)
        self._questions = list(make_questions(f"figures {seed}", QUESTIONS))
        card = self._head.card
        self.digest, self.threshold = card.sha256, card.threshold
        self.curve: Sequence[float] = sorted({point.threshold for point in card.curve})
        self.prompts: Sequence[str] = tuple(question.message for question in self._questions)

    def answer(
        self, bench: Bench, settings: Sequence[JudgedSetting], *, costs: bool
    ) -> list[JudgedAnswers]:
        """Answer all questions under each setting (`Judge.answer`)."""
        pair, engine = bench.pair, EngineSettings(threads=bench.threads)
        pair.require_hidden_states()
        questions, task, heads = self._questions, Facts(), {self._head.card.name: self._head}
        plan = plan_sweep(
            pair,
            heads,
            task,
            [self._sweep_setting(setting) for setting in settings],
            most=MOST,
            whole=len(questions) if costs else 0,
        )
        context = max(count_tokens(question, pair.vocabularies, MOST) for question in questions)
        if context > pair.context:
            raise UnsupportedError(
                f"The questions and their answers have up to {context} tokens, more than the "
                f"models' context of {pair.context}."
            )
        readers = Readers(*pair.paths, slots=_SLOTS, context=context, engine=engine)
        keys = [question.key for question in questions]
        outcomes = sweep(
            readers,
            pair.vocabularies,
            task,
            questions,
            plan,
            heads,
            keys if costs else (),
            windows=_EVERY,
        )
        counted: dict[str, list[QuestionCounts]] = {}
        bench.report(_LABEL, 0, len(keys))
        for key, counts in outcomes:
            counted[key] = counts
            bench.report(_LABEL, len(counted), len(keys))
        pace = self._pace(bench, plan) if costs else None
        return [
            _answers(plan, setting, [counted[key][at] for key in keys], pace)
            for at, setting in enumerate(plan.settings)
        ]

    @staticmethod
    def _pace(bench: Bench, plan: SweepHeader) -> ModelPace:
        """Measure the processor time of passes on one core: other work hardly changes it."""
        engine = EngineSettings(threads=1)
        return measure_pace(bench.pair, plan.windows, engine, clock=time.process_time)

    def _sweep_setting(self, setting: JudgedSetting) -> SweepSetting:
        if setting.threshold is None:
            return SweepSetting(setting.window)
        profile = None if setting.link is None else _profile(setting.link)
        return SweepSetting(setting.window, self._head.card.name, setting.threshold, profile)


def _answers(
    plan: SweepHeader,
    setting: SweepSetting,
    counts: Sequence[QuestionCounts],
    pace: ModelPace | None,
) -> JudgedAnswers:
    """Arrange the counts of one setting as arrays over the questions."""

    def column(name: str) -> Floats:
        return np.array([getattr(count, name) for count in counts], dtype=np.float64)

    def costs(protocol: str, link: Link) -> AnswerCosts:
        assert pace is not None, "the answers were made without costs"
        profile = _profile(link)
        # every window was read to its end, so the share of mismatches is an answer's own
        each = [
            total_costs(plan, setting, [count], profile, pace, mismatch_share([count]))[protocol]
            for count in counts
        ]
        table = np.array([(cost.seconds, cost.up, cost.down) for cost in each])
        seconds, up, down = table.T
        verify_s = pace.verify_pass_s(setting.window + 1)
        return AnswerCosts(seconds, up, down, pace.draft_s, verify_s)

    return JudgedAnswers(
        right=column("right"),
        tokens=column("tokens"),
        rounds=column("rounds"),
        mismatches=column("decided"),
        forgiven=column("forgiven"),
        costs=costs,
    )


def _profile(link: Link) -> LinkProfile:
    return LinkProfile(link.up_bps / 1e6, link.rtt_s * 1e3)
