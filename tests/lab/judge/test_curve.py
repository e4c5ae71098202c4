"""What a head's card says of its thresholds; and that training says what it lacks."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.extras import install_command
from pilotfish.engines.engine_errors import EngineError
from pilotfish.lab.judge.instances import InstanceOptions, instances
from pilotfish.lab.judge.thresholds import POINTS, auc, curve, recommend_threshold
from pilotfish.lab.judge.training import train
from pilotfish.lab.judge.training_settings import TrainingOptions
from tests.support.made_episodes import MINED, episodes


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=30))
def test_the_area_is_how_often_a_one_scores_above_a_zero(pairs: list[tuple[int, bool]]) -> None:
    scores = np.array([score for score, _ in pairs], np.float32)
    labels = np.array([label for _, label in pairs])
    ones, zeros = scores[labels], scores[~labels]
    if not len(ones) or not len(zeros):
        assert auc(scores, labels) is None
        return
    wins = (ones[:, None] > zeros) + 0.5 * (ones[:, None] == zeros)
    assert auc(scores, labels) == pytest.approx(wins.mean())


def test_the_curve_is_26_quantiles() -> None:
    logits = np.random.default_rng(1).normal(0, 4, (300, 8)).astype(np.float32)
    points = curve(logits)
    assert len(points) == POINTS
    thresholds = [point.threshold for point in points]
    assert thresholds == sorted(thresholds)
    assert 0 < thresholds[0] < thresholds[-1] < 1
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    for number, point in enumerate(points):
        assert point.forgiven == pytest.approx(number / 25, abs=1e-3)
        assert (probabilities <= point.threshold + 1e-9).mean() == pytest.approx(
            point.forgiven, abs=1e-3
        )


def test_extreme_probabilities_do_not_become_the_thresholds_that_mean_all_or_nothing() -> None:
    points = curve(np.array([-1e4, 0.0, 1e4]))
    assert 0 < points[0].threshold < points[-1].threshold < 1


def test_the_recommended_threshold_is_the_largest_within_the_risk() -> None:
    points = curve(np.linspace(-5, 5, 26))
    harmful = np.linspace(0.05, 4.95, 50)
    for risk in (0.0, 0.05, 0.1, 0.5, 1.0):
        chosen = recommend_threshold(points, harmful, risk)
        assert chosen is not None
        assert (harmful <= chosen.logit).mean() <= risk
        above = [point for point in points if point.threshold > chosen.threshold]
        assert all((harmful <= point.logit).mean() > risk for point in above)
    assert recommend_threshold(points, np.full(4, -9.0), 0.05) is None


def test_training_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(EngineError, match=re.escape(install_command("judge"))):
        train(
            "x",
            MINED,
            instances(MINED, episodes(4), InstanceOptions()),
            InstanceOptions(),
            TrainingOptions(),
        )
