"""The comparison of drafters: its figures, the drafter to ship, the tables and the picture."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from pilotfish.cli.field.comparison_tables import print_comparison
from pilotfish.lab.agreement import count_accepted
from pilotfish.lab.drawing import panels
from pilotfish.lab.field import comparison, comparison_picture
from pilotfish.lab.field.comparison import compare
from pilotfish.lab.field.drafter_figures import DrafterEntry
from pilotfish.speculation.speeds import best_window, hinted_token_s


def agreeing(alpha, prompts=20, tokens=200, seed=0):
    """Agreement that is as likely at every place."""
    rng = np.random.default_rng(seed)
    return {prompt: rng.random(tokens) < alpha for prompt in range(prompts)}


def entry(name, alpha, draft_s, size=1):
    return DrafterEntry(name=name, size_bytes=size, draft_s=draft_s, agreed=agreeing(alpha))


def compared(*entries, rtts_s=(0.0, 0.05), pass_s=0.04):
    return compare(entries, prompts=20, target_s=[pass_s] * 17, rtts_s=rtts_s)


# Which to ship


def test_the_better_one_wins_where_both_are_as_fast():
    result = compared(entry("worse", 0.5, 0.005), entry("better", 0.9, 0.005, size=9))
    assert {item.drafter for item in result.ship} == {"better"}
    assert all(item.gain > 1.5 and item.alike == [] for item in result.ship)


def test_the_faster_one_wins_where_both_agree_as_much():
    result = compared(entry("slow", 0.8, 0.03), entry("fast", 0.8, 0.003, size=9))
    assert {item.drafter for item in result.ship} == {"fast"}


def test_of_two_that_are_alike_the_smaller_one():
    result = compared(entry("large", 0.8, 0.005, size=9), entry("small", 0.8, 0.00505, size=2))
    assert [drafter.name for drafter in result.drafters] == ["small", "large"]
    assert all((drafter.drafter, drafter.alike) == ("small", ["large"]) for drafter in result.ship)


def test_none_where_none_gains():
    result = compared(entry("hopeless", 0.05, 0.03), rtts_s=(0.2,))
    (ship,) = result.ship
    assert (ship.drafter, ship.protocol, ship.gain) == (None, "stream", 1.0)


def test_a_small_one_that_gains_too_little_does_not_hide_one_that_gains():
    """Both are alike; one is just below the gain from which a drafter is worth having."""
    small, large = entry("small", 0.5, 0.015, size=2), entry("large", 0.5, 0.01, size=9)
    result = compared(small, large, rtts_s=(0.05,))
    rates = {drafter.name: drafter.expected[0].gain for drafter in result.drafters}
    assert 0.97 * rates["large"] < rates["small"] < 1.05 < rates["large"]
    assert result.ship[0].drafter == "large"


def test_of_what_was_never_seen_nothing_is_expected():
    unseen = DrafterEntry(name="unseen", size_bytes=1, draft_s=0.001, agreed={})
    result = compared(unseen, entry("seen", 0.2, 0.005, size=9))
    assert all(item.gain <= 1.0 for item in result.drafters[0].expected)
    assert all(item.drafter != "unseen" and item.alike == [] for item in result.ship)


def test_of_one_that_is_never_right_no_run_is_either():
    never = {prompt: np.zeros(30, dtype=np.bool_) for prompt in range(20)}
    drafter_entry = DrafterEntry(name="never", size_bytes=1, draft_s=0.01, agreed=never)
    result = compared(drafter_entry).drafters[0]
    assert all(each == (0.0, 0.0, 0.0) for each in result.survival.values())


def test_runs_that_no_answer_was_long_enough_for_are_unknown():
    always = {prompt: np.ones(5, dtype=np.bool_) for prompt in range(20)}
    drafter_entry = DrafterEntry(name="always", size_bytes=1, draft_s=0.01, agreed=always)
    survival = compared(drafter_entry).drafters[0].survival
    assert survival[4].value == 1.0
    assert survival[8].value is None


def test_a_run_that_few_prompts_have_may_be_none():
    """In draws without that prompt no run is so long: these count."""
    rare = {prompt: np.tile([True, False], 10) for prompt in range(20)}
    rare[0] = np.tile([True, True, True, True, False], 4)
    drafter_entry = DrafterEntry(name="rare", size_bytes=1, draft_s=0.01, agreed=rare)
    _, low, high = compared(drafter_entry).drafters[0].survival[4]
    assert low == 0.0 < high


def test_far_away_rounds_lose_and_ahead_does_not():
    result = compared(entry("one", 0.9, 0.005), rtts_s=(0.0, 0.3))
    near, far = result.drafters[0].expected
    assert far.rounds_per_s < 25.0 < far.ahead_per_s  # 25 is the target alone
    assert near.rounds_per_s > 2 * far.rounds_per_s
    assert far.protocol == "ahead"


def test_rounds_are_those_of_the_answers_themselves():
    item = entry("one", 0.7, 0.004)
    result = compared(item, rtts_s=(0.01,)).drafters[0].expected[0]
    rates = []
    for window in range(1, 17):
        rounds = sum(len(count_accepted(agreed, window)) for agreed in item.agreed.values())
        rates.append(20 * 200 / rounds / (window * 0.004 + 0.01 + 0.04))
    assert result.rounds_per_s == pytest.approx(max(rates))


def test_intervals_hold_what_is_true():
    result = compared(entry("one", 0.7, 0.004)).drafters[0]
    _, low, high = result.acceptance
    assert low < 0.7 < high
    assert high - low < 0.06
    assert result.survival[2].low < 0.49 < result.survival[2].high


def test_two_prompts_have_no_interval():
    two = DrafterEntry(name="a", size_bytes=1, draft_s=0.01, agreed=agreeing(0.7, 2))
    result = compare([two], prompts=2, target_s=[0.04] * 17, rtts_s=[0.0])
    assert result.drafters[0].acceptance.low is None
    assert result.drafters[0].survival[2].value is not None


def test_the_best_window_is_the_best_of_all():
    tokens, passes = [1.8, 2.4, 2.9, 3.0], [0.04, 0.041, 0.042, 0.043, 0.044]
    window, token_s = best_window(tokens, rtt_s=0.02, draft_s=0.01, pass_s=passes)
    every = [(w * 0.01 + 0.02 + passes[w]) / tokens[w - 1] for w in range(1, 5)]
    assert token_s == pytest.approx(min(every))
    assert every[window - 1] == min(every)


def test_hints_that_are_always_right_fill_every_pass():
    token_s = hinted_token_s(np.array([1.0]), rtt_s=0.0, draft_s=0.001, pass_s=[0.04] * 16)
    assert token_s == pytest.approx(0.04 / 16, rel=0.05)
    alone = hinted_token_s(np.array([0.0]), rtt_s=0.05, draft_s=0.01, pass_s=[0.04] * 16)
    assert alone == pytest.approx(0.04)


# Tables and the picture


def test_no_figure_is_cut_where_names_are_long(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(comparison, "SPEEDS", 2)
    names = ["folder/a-drafter-of-a-long-name-int4", "text"]
    rtts_s = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
    print_comparison(
        compared(*(entry(name, 0.7, 0.004) for name in names), rtts_s=rtts_s), "target"
    )
    out = capsys.readouterr().out
    assert "…" not in out
    tables = [line for line in out.splitlines() if line.startswith("│")]
    assert {len(line) for line in tables} <= {*range(81)}


def test_of_one_without_room_no_figure_is_told(capsys):
    unseen = DrafterEntry(name="unseen", size_bytes=1, draft_s=0.001, agreed={})
    print_comparison(compared(unseen, entry("seen", 0.7, 0.005, size=9), rtts_s=(0.0,)), "target")
    told = capsys.readouterr().out
    assert "unseen was not measured" in told
    assert "was measured without" not in told


def test_no_two_drafters_look_alike(tmp_path, monkeypatch):
    drawn = []

    @contextmanager
    def kept(*args):
        with panels(*args) as axes:
            drawn.extend(axes)
            yield axes

    monkeypatch.setattr(comparison_picture, "panels", kept)
    monkeypatch.setattr(comparison, "SPEEDS", 2)
    names = [f"{'long/' * 9}{at}/int4" for at in range(9)]
    result = compared(*(entry(name, 0.7, 0.004) for name in names), rtts_s=(0.0,))
    comparison_picture.draw(tmp_path / "picture.png", result)
    bars, labels = drawn[-1].get_legend_handles_labels()
    assert len({*labels}) == 10  # the target alone among them
    lines = [bar[0] for bar in bars if not hasattr(bar, "get_color")]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 9
