"""`pilotfish field report`: a run's figures, and the statistics behind them."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import RunFileError
from pilotfish.device_runtime.record import STAGES
from pilotfish.lab.field.configuration import Cell, Configuration
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.report.figures import by_series, figures, lowest, steady_token_ms
from pilotfish.lab.field.report.hindsight import hindsight
from pilotfish.lab.field.report.plausible import expect_plausible
from pilotfish.lab.field.run import Run
from pilotfish.lab.statistics import median_interval, positions, share_interval, spread
from tests.support.made_answers import answer, chain, chosen, recorded

# Statistics


def test_a_spread_is_median_and_95th_percentile():
    values = [3.0, 1.0, 2.0, 10.0, 4.0]
    result = spread(values)
    assert result.n == 5
    assert result.median == statistics.median(values)
    assert result.p95 == pytest.approx(statistics.quantiles(values, n=20, method="inclusive")[-1])
    assert min(values) <= result.low <= result.median <= result.high <= max(values)


def test_too_few_values_have_no_interval():
    assert spread([]) is None
    assert spread([1.0, 2.0]).low is None


@given(st.lists(st.floats(0.1, 1e4), min_size=3, max_size=30))
def test_an_interval_holds_its_median_and_is_the_same_again(values):
    low, high = median_interval(values)
    assert min(values) <= low <= high <= max(values)
    assert low <= statistics.median(values) <= high
    assert (low, high) == median_interval(values)


def test_95_of_100_intervals_hold_the_true_median():
    random = np.random.default_rng(3)
    samples = random.lognormal(0.0, 0.5, (300, 15))  # median 1
    inside = [low <= 1.0 <= high for low, high in map(median_interval, samples.tolist())]
    assert 0.90 <= np.mean(inside) <= 0.99


def test_wilson_is_the_textbooks():
    low, high = share_interval(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert share_interval(10, 10)[1] == pytest.approx(1.0)
    assert share_interval(0, 10)[0] == pytest.approx(0.0)


def test_acceptance_by_position_of_rounds_made_by_hand():
    rounds = [chain(4, 4), chain(4, 0), chain(4, 2), chain(2, 2), chain(1, 0)]
    result = [(p.depth, p.drafted, p.reached, p.accepted) for p in positions(rounds)]
    assert result == [(1, 5, 5, 3), (2, 4, 3, 3), (3, 3, 2, 1), (4, 3, 1, 1)]


# Figures


def test_first_rounds_are_in_the_first_token_only():
    slow, quick = chain(4, 1, ms=500.0), chain(4, 4, ms=20.0)
    (result,) = figures([answer([slow, quick, quick])])
    assert result.token_ms.median == pytest.approx(4.0)
    assert result.round_ms.median == pytest.approx(20.0)
    assert result.first_token_ms.median == pytest.approx(500.0)
    assert result.tokens_per_s == pytest.approx(10 / 0.04)
    assert sum(result.stages_ms.values()) == pytest.approx(4.0)
    assert result.tokens_per_round == pytest.approx(12 / 3)
    assert result.up_bytes_per_token == pytest.approx(150 / 12)


def test_an_answer_of_one_round_has_no_steady_figures():
    (result,) = figures([answer([chain(4, 1)])])
    assert result.token_ms is None
    assert result.stages_ms == {}
    assert result.first_token_ms.n == 1
    assert lowest([result]) is None


def test_what_a_decision_head_did_is_told_where_there_was_one():
    judged = [
        chain(4, 4, protocol="wisv-selective", notes={"forgiven": 1}, inquired=2),
        chain(4, 4, protocol="wisv-selective", notes={"forgiven": 1}, inquired=1),
        chain(4, 0, protocol="wisv-selective", inquired=3),
        chain(4, 2, protocol="wisv-selective"),
    ]
    greedy, wisv = figures([answer([chain(4, 2)]), answer(judged, protocol="wisv-selective")])
    assert (greedy.notes["forgiven"], greedy.asked) == (None, None)
    assert wisv.notes["forgiven"] == pytest.approx(2 / 10)
    assert wisv.asked == pytest.approx(3 / 4)


def test_a_stream_of_a_federation_has_its_omitted_mass():
    tokens = [
        chain(0, 0, protocol="stream", notes={"omitted_mass": mass}) for mass in (0.125, 0.25, 1.0)
    ]
    plain = [chain(0, 0, protocol="ahead"), chain(2, 1, protocol="ahead")]
    answers = [
        answer(tokens, protocol="stream", window=None),
        answer(plain, protocol="ahead", window=None),
    ]
    expect_plausible(Path("run"), answers)
    masses = {each.configuration.protocol: each.notes["omitted_mass"] for each in figures(answers)}
    assert masses == {"stream": pytest.approx(1.375 / 3), "ahead": None}
    tokens[0].notes["omitted_mass"] = 1.001
    with pytest.raises(RunFileError, match="omitted mass"):
        expect_plausible(Path("run"), answers)


def test_only_what_says_the_targets_text_is_the_lowest():
    result = figures(
        [
            answer([chain(2, 1), chain(2, 1, ms=30.0)], window=2),
            answer([chain(0, 0), chain(0, 0, ms=1.0)], protocol="local", window=None),
            answer([chain(2, 1), chain(2, 1, ms=2.0)], protocol="auto", window=None),
            answer([chain(2, 1), chain(2, 1, ms=3.0)], protocol="wisv-full", window=2),
        ]
    )
    assert str(lowest(result).configuration) == "greedy γ=2"


def test_energy_is_the_answers_own():
    (result,) = figures([answer([chain(4, 4)] * 2, energy_j=30.0), answer([chain(4, 4)] * 2)])
    assert (result.joules_per_token.n, result.joules_per_token.median) == (1, 3.0)


def test_the_figures_of_a_real_run_are_those_of_its_rounds(walk, report):
    """Everything in the JSON, computed again from the file by other means."""
    with Run.open(walk) as run:
        answers = list(run.answers())
    (display,) = report[1]["runs"]
    assert display["answers"] == len(answers) == 2 * 2 * 7
    assert display["left_out"] == {"warm_up": 7, "unfinished": 0}
    for result in display["figures"]:
        mine = [
            a for a in answers if (a.protocol, a.window) == (result["protocol"], result["window"])
        ]
        assert result["n"] == len(mine) == 4
        per_token = []
        for item in mine:
            rest = item.rounds[1:]
            seconds = math.fsum(getattr(r.timings, stage) for r in rest for stage in STAGES)
            per_token.append(1e3 * seconds / sum(len(r.tokens) for r in rest))
        assert result["token_ms"]["median"] == pytest.approx(statistics.median(per_token))
        assert result["token_ms"]["p95"] == pytest.approx(np.quantile(per_token, 0.95))
        rounds = [r for item in mine for r in item.rounds]
        tokens = sum(len(r.tokens) for r in rounds)
        assert result["up_bytes_per_token"] == sum(r.uplink_bytes for r in rounds) / tokens
        assert result["down_bytes_per_token"] == sum(r.downlink_bytes for r in rounds) / tokens
        assert result["joules_per_token"] is None
        for place in result["positions"]:
            depth = place["depth"]
            accepted = [r for r in rounds if r.accepted >= depth]
            assert place["accepted"] == len(accepted)


# What auto chose


def auto_answer(choice, ms):
    rounds = [chain(choice.window, 1, ms=99.0), chain(choice.window, 1, ms=2 * ms)]
    return answer(rounds, protocol="auto", window=None, choice=choice)


def test_hindsight_of_choices_made_by_hand():
    compared = [("greedy", 2, 0.010), ("greedy", 4, 0.012), ("stream", 0, 0.030)]
    fixed = [
        answer([chain(2, 1), chain(2, 1, ms=18.0)], window=2),  # 9 ms a token
        answer([chain(4, 1), chain(4, 1, ms=16.0)], window=4),  # 8
        answer([chain(0, 0), chain(0, 0, ms=1.0)], protocol="local", window=None),  # not compared
    ]
    seen = hindsight(
        [
            *fixed,
            auto_answer(chosen("greedy", 2, 0.010, compared), 10.0),
            auto_answer(chosen("greedy", 2, 0.010, compared, "later"), 12.0),
            auto_answer(chosen("greedy", 4, 0.012, compared), 8.0),
        ]
    )
    by_name = {str(each.configuration): each for each in seen.alternatives}
    assert list(by_name) == ["greedy γ=2", "greedy γ=4", "stream", "local"]
    assert [each.chosen for each in by_name.values()] == [2, 1, 0, 0]
    assert by_name["greedy γ=2"].measured.median == pytest.approx(11.0)
    assert by_name["greedy γ=2"].fixed.median == pytest.approx(9.0)
    assert by_name["greedy γ=2"].reason == "later"
    assert by_name["stream"].forecast_ms == pytest.approx(30.0)
    assert by_name["stream"].fixed is None
    assert str(seen.best.configuration) == "greedy γ=4"
    assert seen.auto.median == pytest.approx(10.0)
    assert seen.excess == pytest.approx(10.0 / 8.0 - 1.0)
    assert sorted(seen.predicted) == [
        (10.0, pytest.approx(10.0)),
        (10.0, pytest.approx(12.0)),
        (12.0, pytest.approx(8.0)),
    ]
    assert seen.error == pytest.approx(1 / 6)


def test_hindsight_of_plans_that_differ_in_whose_hints_they_use():
    """A run does not tell them apart, so the better one is what was expected."""
    compared = [("ahead", 0, 0.02, 0.02, "all"), ("ahead", 0, 0.03, 0.03, "edge")]
    seen = hindsight([auto_answer(chosen("ahead", 0, 0.02, compared), 21.0)])
    (alternative,) = seen.alternatives
    assert str(alternative.configuration) == "ahead"
    assert (alternative.chosen, alternative.forecasts) == (1, 1)
    assert alternative.forecast_ms == pytest.approx(20.0)


def test_ahead_is_one_thing_whatever_the_windows_of_the_run(tmp_path):
    """Older runs measured it once a window: one row, one line and one choice."""
    rounds = [chain(0, 0, protocol="ahead"), chain(3, 2, protocol="ahead")]
    fixed = [
        answer(rounds, protocol="ahead", window=window, prompt=prompt)
        for window in (2, 4)
        for prompt in (0, 1)
    ]
    compared = [("ahead", 0, 0.02, 0.02, "all"), ("stream", 0, 0.03)]
    auto = auto_answer(chosen("ahead", 3, 0.02, compared), 21.0)
    path = recorded(tmp_path / "old.pilotfish", [*fixed, auto])
    with Run.open(path) as run:
        read = list(run.answers())
    ahead = [each for each in figures(read) if each.configuration.protocol == "ahead"]
    assert [(str(each.configuration), each.n) for each in ahead] == [("ahead", 4)]
    assert list(by_series(figures(read))) == ["ahead", "auto"]
    choices = {str(each.configuration): each for each in hindsight(read).alternatives}
    assert list(choices) == ["ahead", "stream"]
    assert (choices["ahead"].chosen, choices["ahead"].fixed.n, choices["ahead"].forecasts) == (
        1,
        4,
        1,
    )
    with Recorder.resume(path) as recorder:
        cells = {
            cell for cell in recorder.finished_cells() if cell.configuration.protocol == "ahead"
        }
    assert cells == {Cell(Configuration("ahead", None), prompt, 0) for prompt in (0, 1)}


def test_without_auto_there_is_no_hindsight():
    assert hindsight([answer([chain(2, 1)])]) is None


def test_choices_of_a_real_run_add_up(walk, report):
    auto = report[1]["runs"][0]["auto"]
    assert auto["n"] == sum(each["chosen"] for each in auto["alternatives"]) == 4
    with Run.open(walk) as run:
        answers = [item for item in run.answers() if item.protocol == "auto"]
    pairs = [[item.choice.token_s * 1e3, steady_token_ms(item)] for item in answers]
    assert auto["predicted"] == [pytest.approx(pair) for pair in pairs]
