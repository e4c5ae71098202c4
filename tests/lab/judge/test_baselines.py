"""The rules with which a sweep compares a head: a coin, and a bound of the target's logit gap."""

from __future__ import annotations

import numpy as np
import pytest

from pilotfish.base.errors import UnsupportedError
from pilotfish.lab.judge.baselines import Baseline, MinedMismatches, draw_uniform
from pilotfish.lab.judge.episodes import Episode
from pilotfish.lab.judge.figures import figures
from pilotfish.lab.judge.instances import GOOD, as_decoded
from pilotfish.lab.judge.rivals import rivalries
from pilotfish.lab.judge.sweep_file import LinkProfile, QuestionCounts, SweepHeader, SweepSetting
from pilotfish.lab.judge.sweeping import settings_of, sweep
from pilotfish.lab.judge.tasks import Exact
from pilotfish.lab.judge.trajectories import WalkSettings
from tests.lab.judge.test_trajectories import QUESTIONS, JudgedPair, models

__all__ = ["models"]  # a fixture

FAST = LinkProfile(500.0, 5.0)


def mined(models: JudgedPair, count: int = 200) -> MinedMismatches:
    """Mismatches with random states, and gaps 0.1, 0.2, …"""
    random = np.random.default_rng(0)
    card = models.head.card
    return MinedMismatches(
        random.standard_normal((count, card.drafter.hidden), np.float32),
        random.standard_normal((count, card.target.hidden), np.float32),
        np.zeros((count, 2), np.int64),
        np.arange(1, count + 1, dtype=np.float32) / 10,
    )


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_both_rules_forgive_as_many_mined_mismatches_as_the_head(
    models: JudgedPair, share: float
) -> None:
    mismatches, head = mined(models), models.head
    states = as_decoded(mismatches.drafter, head.card.hidden)
    logits = head.logits(states, mismatches.target, mismatches.tokens, GOOD)
    threshold = float(1 / (1 + np.exp(-np.quantile(logits.astype(np.float64), share))))
    judge = head.judge(GOOD, threshold)
    forgiven = int((~judge(states, mismatches.target, mismatches.tokens)).sum())
    assert abs(forgiven / 200 - share) < 0.02
    coin, gap = mismatches.baselines(head, GOOD, threshold)
    assert coin == Baseline("coin", forgiven / 200)
    assert sum(not gap.rejects(float(each), 0.0) for each in mismatches.gap) == forgiven
    draws = [draw_uniform("q", [token], 3) for token in range(4000)]
    tossed = np.mean([not coin.rejects(1.0, draw) for draw in draws])
    assert abs(tossed - coin.bound) < 0.03


def test_a_rule_that_forgives_nothing_rejects_a_gap_of_nothing() -> None:
    assert Baseline("gap", -1.0).rejects(0.0, 0.0)
    assert Baseline("coin", 0.0).rejects(0.0, 0.0)
    assert not Baseline("coin", 1.0).rejects(9.0, 0.999)


def test_episodes_of_earlier_versions_are_refused() -> None:
    old = Episode(
        key="a", at=np.array([1]), tokens=np.array([[1, 2]]), drafter=np.zeros((1, 3), np.float32),
        target=np.zeros((1, 3), np.float32), critical=np.array([False]),
        stalling=np.array([False]), answer=[1, 2], outcome="", right=True,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="mine them again"):
        MinedMismatches.from_episodes([old])
    with pytest.raises(UnsupportedError, match="no mismatch"):
        MinedMismatches.from_episodes([])


def test_baselines_walk_as_greedy_or_as_the_drafter_at_their_ends(models: JudgedPair) -> None:
    rules = [Baseline("coin", 0.0), Baseline("gap", -1.0), Baseline("coin", 1.0)]
    rules += [Baseline("gap", float("inf"))]
    courses = [WalkSettings(4), *(WalkSettings(4, baseline=rule) for rule in rules)]
    forgiven = 0
    for greedy, coin, gap, all_coin, all_gap in models.walks(courses):
        assert greedy.tokens == coin.tokens == gap.tokens
        assert greedy.rounds == coin.rounds == gap.rounds
        assert all_coin.tokens == all_gap.tokens
        assert all(each.accepted == each.drafted for each in all_coin.rounds)
        forgiven += sum(each.forgiven for each in all_coin.rounds)
    assert forgiven > 0


def test_a_sweep_counts_each_rule_beside_its_threshold(models: JudgedPair) -> None:
    mismatches = mined(models)

    def rules(_: str, threshold: float, profile: LinkProfile) -> tuple[Baseline, ...]:
        return mismatches.baselines(models.head, profile.channel, threshold)

    settings = settings_of([4], {"random": [0.5]}, [FAST], baselines=rules)
    assert [each.baseline and each.baseline.rule for each in settings] == [
        None,
        None,
        "coin",
        "gap",
    ]
    header = SweepHeader(
        task="exact", instruction="", most=12, whole=0, drafter={}, target={}, heads={},
        settings=settings,
    )  # fmt: skip
    swept = sweep(models.readers, models.pair, Exact(), QUESTIONS, header, {"random": models.head})
    counts = [row for _, row in swept]
    compared = rivalries(header, counts)
    assert [each.rule for each in compared] == ["coin", "gap"]
    rows = figures(header, counts)
    for each, row in zip(compared, rows[2:], strict=True):
        assert each.setting == settings[1]
        assert (each.accuracy, each.aal, each.forgiven) == (row.accuracy, row.aal, row.forgiven)
        assert each.gained == pytest.approx(rows[1].accuracy - row.accuracy)


def test_a_head_wins_only_if_the_interval_excludes_nothing_gained() -> None:
    judged = SweepSetting(4, "h", 0.5, FAST)
    header = SweepHeader(
        task="exact", instruction="", most=12, whole=0, drafter={}, target={}, heads={},
        settings=[SweepSetting(4), judged, judged._replace(baseline=Baseline("coin", 0.5))],
    )  # fmt: skip

    def row(head: bool, coin: bool) -> list[QuestionCounts]:
        def counts(right: bool) -> QuestionCounts:
            return QuestionCounts(right, 8, 2, 6, 1, 2, 1, 0, 0, 0, {4: 2})

        return [counts(True), counts(head), counts(coin)]

    (clear,) = rivalries(header, [row(True, False)] * 30 + [row(True, True)] * 30)
    assert clear.gained == 0.5
    assert clear.is_won
    (even,) = rivalries(header, [row(True, False), row(False, True)] * 30)
    assert even.gained == 0.0
    assert not even.is_won
