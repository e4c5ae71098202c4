"""Walks: what a head's edge commits under many settings at once, each as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish.bridge import Pair
from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.edge_runtime.head_file import HeadCard, LinkScale, ModelIdentity, Training
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.lab.judge.model_passes import Procedure, Readers
from pilotfish.lab.judge.question_reader import QuestionReader
from pilotfish.lab.judge.tasks import Question
from pilotfish.lab.judge.trajectories import Trajectory, WalkSettings, walks
from pilotfish.speculation.channel import Channel
from tests.bridge.test_drafter import OWN, THEIRS
from tests.support.tiny import tiny_artifact

MOST = 40
WINDOWS = (2, 3, 5, 9)
GOOD = Channel(rtt_s=0.005, up_bps=5e8, down_bps=5e8, loss=0.0)
POOR = Channel(rtt_s=0.05, up_bps=2e7, down_bps=2e7, loss=0.0)
QUESTIONS = [
    Question(f"q-{at}", requests, "") for at, requests in enumerate(["ab cd", "a", "bcd ab"])
]


class JudgedPair:
    """A drafter and a target, opened, and a head of random weights for them."""

    def __init__(self, drafter: Path, target: Path) -> None:
        ends = [Artifact.open(path) for path in (drafter, target)]
        self.paths = drafter, target
        self.pair = Pair(*(Vocabulary.from_artifact(end) for end in ends))
        self.readers = Readers(
            drafter, target, slots=2, context=160, engine=EngineSettings(threads=1)
        )
        self.head = random_head(*ends)

    def speaker(self, question: Question = QUESTIONS[0], most: int = MOST) -> QuestionReader:
        return QuestionReader(question, self.pair, most)

    def walks(self, courses: Sequence[WalkSettings], *, most: int = MOST, whole: int = 0) -> Walks:
        """Of all questions, a list for each."""

        def begin(question: Question) -> Procedure[list[Trajectory]]:
            return walks(self.speaker(question, most), courses, whole=whole)

        procedures = [(item.key, lambda item=item: begin(item)) for item in QUESTIONS]
        table = dict(self.readers.run(procedures))
        return [table[item.key] for item in QUESTIONS]

    def courses(
        self, thresholds: Sequence[float], channels: Sequence[Channel] = (GOOD, POOR)
    ) -> list[WalkSettings]:
        return [
            WalkSettings(window, self.head.judge(channel, threshold))
            for threshold in thresholds
            for channel in channels
            for window in WINDOWS
        ]


Walks = list[list[Trajectory]]


def random_head(drafter: Artifact, target: Artifact, seed: int = 0) -> DecisionHead:
    """Of weights that forgive about half, and look at the link."""
    ends = [
        ModelIdentity(
            model=item.manifest.model,
            origin=item.manifest.origin,
            hidden=item.manifest.dimensions.hidden,
            precision=item.manifest.precision,
        )
        for item in (drafter, target)
    ]
    card = HeadCard(
        name="random",
        drafter=ends[0],
        target=ends[1],
        link=LinkScale(mean=[7.5, 7.5, 0.0, -1.7], std=[0.6, 0.6, 0.1, 0.4], clip=3.0),
        hidden="fp16",  # int8 would make whole steps of what rounding differs by between passes
        threshold=0.5,
        training=Training(questions=1, examples=1, task="exact", seed=seed),
    )
    random = np.random.default_rng(seed)
    states = ends[0].hidden + ends[1].hidden
    tensors = {
        "w1": random.standard_normal((16, states + 4)) / 8,
        "b1": random.standard_normal(16),
        "w2": random.standard_normal(16),
        "b2": np.zeros(1),
        "mean": np.zeros(states),
        "std": np.ones(states),
    }
    return DecisionHead(card, {name: array.astype("f4") for name, array in tensors.items()})


@pytest.fixture(scope="module", params=["trivial", "bridged"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> JudgedPair:
    """Of one vocabulary, with a drafter that agrees mostly; and of two, with one that does not."""
    folder = tmp_path_factory.mktemp("pair")
    if request.param == "trivial":
        of: dict[str, Any] = {"vocab": 60, "seed": 3, "sharpness": 1.0}
        tiny_artifact(folder / "draft", layers=3, **of)  # of the same weights, but for a layer
        tiny_artifact(folder / "target", layers=4, **of)
    else:
        tiny_artifact(folder / "draft", tokens=OWN, eos="<x>", seed=5)
        tiny_artifact(folder / "target", tokens=THEIRS, eos="<y>", seed=6)
    return JudgedPair(folder / "draft", folder / "target")


def greedy_texts(models: JudgedPair, most: int = MOST) -> list[list[int]]:
    procedures = [
        (question.key, lambda question=question: models.speaker(question, most).finish([]))
        for question in QUESTIONS
    ]
    table = dict(models.readers.run(procedures))
    return [table[question.key] for question in QUESTIONS]


def test_threshold_0_is_the_targets_own_text(models: JudgedPair) -> None:
    wanted = greedy_texts(models)
    plain = [WalkSettings(window) for window in WINDOWS]
    for texts, result in zip(wanted, models.walks([*plain, *models.courses([0.0])]), strict=True):
        assert [walk.tokens for walk in result] == [texts] * len(result)
        for at, course in enumerate(models.courses([0.0])):
            assert result[len(WINDOWS) + at].rounds == result[WINDOWS.index(course.window)].rounds
        assert all(round_.forgiven == 0 for walk in result for round_ in walk.rounds)


def test_threshold_1_accepts_every_window_whole(models: JudgedPair) -> None:
    courses = models.courses([1.0])
    for result in models.walks(courses):
        for course, walk in zip(courses, result, strict=True):
            *rounds, last = walk.rounds
            assert all(item.accepted == item.drafted == course.window for item in rounds)
            assert last.accepted == last.drafted <= course.window
            assert all(item.forgiven == item.decided for item in walk.rounds)


def test_together_each_course_is_what_it_is_alone(models: JudgedPair) -> None:
    courses = [*(WalkSettings(window) for window in WINDOWS), *models.courses([0.3, 0.5, 0.8])]
    together = models.walks(courses)
    assert len({tuple(walk.tokens) for result in together for walk in result}) > 5
    for at, course in enumerate(courses):
        alone = models.walks([course])
        assert [result[at] for result in together] == [result[0] for result in alone]


def test_rounds_add_up_to_the_answer(models: JudgedPair) -> None:
    courses = [WalkSettings(4), *models.courses([0.5, 1.0])]
    for result in models.walks(courses, whole=1000):
        for course, walk in zip(courses, result, strict=True):
            ended = walk.tokens[-1] in models.pair.target.eos_ids
            assert ended or len(walk.tokens) == MOST
            bonus = len(walk.tokens) - sum(item.accepted for item in walk.rounds)
            assert bonus in {len(walk.rounds), len(walk.rounds) - ended}
            for item in walk.rounds:
                assert item.forgiven <= min(item.accepted, item.decided)
                assert item.accepted <= item.drafted <= course.window
                assert item.decided - item.forgiven == (item.accepted < item.drafted)
                assert item.mismatched is not None
                assert item.decided <= item.mismatched <= item.decided + item.after_rejection


def test_reading_windows_whole_changes_nothing_else(models: JudgedPair) -> None:
    courses = models.courses([0.5])
    for part, whole in zip(models.walks(courses), models.walks(courses, whole=1000), strict=True):
        assert [walk.tokens for walk in part] == [walk.tokens for walk in whole]
        for item, other in zip(part, whole, strict=True):
            assert [r.accepted for r in item.rounds] == [r.accepted for r in other.rounds]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_short_answers_end_where_they_must(models: JudgedPair, most: int) -> None:
    wanted = greedy_texts(models, most)
    for text, result in zip(
        wanted, models.walks([WalkSettings(8), WalkSettings(1)], most=most), strict=True
    ):
        assert [walk.tokens for walk in result] == [text, text]
        if most == 1:
            assert [walk.rounds for walk in result] == [[(0, 0, 0, 0, None)]] * 2


def test_what_courses_share_is_read_once_and_nothing_that_need_not_be(models: JudgedPair) -> None:
    def read(courses: Sequence[WalkSettings]) -> tuple[int, list[Trajectory]]:
        other = walks(models.speaker(QUESTIONS[2]), [WalkSettings(1)])
        assert dict(models.readers.run([("q-2", lambda: other)]))  # so that the slot holds another
        before = models.readers.target.tokens
        result = walks(models.speaker(), courses)
        (item,) = models.readers.run([("q-0", lambda: result)])
        return models.readers.target.tokens - before, item[1]

    prompt = len(models.speaker().prompt.ids)
    # what is rejected unseen is not read
    for courses in (
        [WalkSettings(4)],
        [WalkSettings(window) for window in WINDOWS],
        models.courses([0.0]),
    ):
        tokens, result = read(courses)
        assert tokens < prompt + len(result[0].tokens)
    tokens, (walk,) = read(models.courses([0.5])[:1])
    rejected = sum(item.decided - item.forgiven for item in walk.rounds)
    assert rejected
    assert sum(item.forgiven for item in walk.rounds) > 1
    assert tokens < prompt + len(walk.tokens) + rejected
