"""The price of a draft follows what passes take: fitted from what happens, with noise on it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.edge_runtime.draft_cost import DraftCost
from tests.support.examples import examples

WIDTHS = (1, 2, 4, 8, 16, 32)


def line(a_s, b_s):
    """What the edge measures at its start, of a machine whose passes take a + b·S."""
    return {width: a_s + b_s * width for width in WIDTHS}


def test_before_the_first_pass_the_times_of_the_start_are_interpolated():
    times = {1: 0.018, 4: 0.0202, 8: 0.0255, 16: 0.0367}
    price = DraftCost(times)
    for positions in range(40):
        expected_s = np.interp(positions, [*times], [*times.values()])
        assert price.predict_pass_s(positions) == expected_s
    assert DraftCost({}).predict_pass_s(5) == 0.0


seconds = st.one_of(st.just(0.0), st.floats(1e-9, 10.0))  # of a pass, as a clock tells them


def passes(price, a_s, b_s, widths, noise=0.0, random=None):
    for width in widths:
        taken_s = a_s + b_s * width
        if random is not None:
            taken_s *= 1.0 + noise * abs(random.standard_normal())
        price.record_pass(int(width), taken_s)
        price.record_tokens(1)


@given(
    st.floats(0.005, 0.2), st.floats(0.0, 0.2), st.sampled_from([0.2, 1.0, 5.0]), st.integers(0, 99)
)
@examples(60)
def test_the_slope_of_mixed_passes_is_found(a_s, share, wrongly, seed):
    """b is a share of a; the start has measured it ``wrongly``, by a factor."""
    b_s, random = share * a_s, np.random.default_rng(seed)
    price = DraftCost(line(a_s, wrongly * b_s))
    passes(price, a_s, b_s, random.integers(1, 17, 300), 0.02, random)
    # 2 % of noise on passes of 1 to 16 positions is about so much of a slope
    assert price.seconds_per_position == pytest.approx(b_s, rel=0.1, abs=0.006 * (a_s + 8 * b_s))


@pytest.mark.parametrize("width", [1, 5, 16])
def test_passes_of_one_size_tell_nothing_about_the_slope(width):
    price = DraftCost(line(0.03, 0.002))
    passes(price, 0.03, 0.002, [width] * 500)
    assert price.seconds_per_position == pytest.approx(0.002, rel=1e-6)
    price = DraftCost(line(0.03, 0.002))
    random = np.random.default_rng(1)
    passes(price, 0.03, 0.002, [width] * 500, 0.1, random)
    assert price.seconds_per_position == pytest.approx(0.002, rel=0.25)


@pytest.mark.parametrize("mixed", [True, False])
def test_it_follows_a_machine_that_becomes_twice_as_slow(mixed):
    random = np.random.default_rng(2)
    price = DraftCost(line(0.03, 0.002))

    def widths(count):
        return random.integers(1, 17, count) if mixed else [1] * count

    passes(price, 0.03, 0.002, widths(300))
    before = price.tokens_per_draft
    passes(price, 0.06, 0.004, widths(300))
    assert price.seconds_per_position == pytest.approx(0.004, rel=0.1)
    # half as many tokens a second, at twice the time: the price in tokens is the same
    assert price.tokens_per_draft == pytest.approx(before, rel=0.15)


def test_the_price_is_the_tokens_that_a_position_delays():
    price = DraftCost(line(0.03, 0.002))
    assert price.tokens_per_draft == pytest.approx(0.002 / 0.032)  # one session, a token a pass
    for _ in range(400):  # 16 sessions, each with its token
        price.record_pass(16, 0.03 + 16 * 0.002)
        for _ in range(16):
            price.record_tokens(1)
    assert price.tokens_per_s == pytest.approx(16 / 0.062, rel=1e-3)
    assert price.tokens_per_draft == pytest.approx(16 * 0.002 / 0.062, rel=1e-3)


def test_of_an_edge_at_its_limit_a_sure_draft_alone_is_worth_it():
    """Where a position costs as much as a token is worth, nothing rides but what is certain."""
    price = DraftCost(line(0.001, 0.01))
    for _ in range(400):
        price.record_pass(32, 0.001 + 32 * 0.01)
        price.record_tokens(32)
    assert price.tokens_per_draft > 0.95


@given(
    st.dictionaries(st.sampled_from(WIDTHS), seconds, max_size=6),
    st.lists(st.tuples(st.integers(1, 512), seconds, st.integers(0, 128)), max_size=30),
)
@examples(100)
def test_no_passes_make_it_negative_or_infinite(at_start, made):
    price = DraftCost(dict(sorted(at_start.items())))
    for positions, seconds, tokens in made:
        assert np.isfinite(
            [price.seconds_per_position, price.tokens_per_s, price.tokens_per_draft]
        ).all()
        assert min(price.seconds_per_position, price.tokens_per_s, price.tokens_per_draft) >= 0.0
        price.record_pass(positions, seconds)
        price.record_tokens(tokens)
    assert np.isfinite(
        [price.seconds_per_position, price.tokens_per_s, price.tokens_per_draft]
    ).all()
    assert min(price.seconds_per_position, price.tokens_per_s, price.tokens_per_draft) >= 0.0


def test_slower_wide_passes_by_chance_do_not_make_positions_free_of_charge_for_good():
    """A slope that chance makes negative counts as none, until passes say otherwise."""
    price = DraftCost(line(0.03, 0.002))
    passes(price, 0.2, -0.01, [1, 16] * 30)
    assert price.seconds_per_position == 0.0
    passes(price, 0.03, 0.002, [1, 16] * 150)
    assert price.seconds_per_position == pytest.approx(0.002, rel=0.2)


@pytest.mark.parametrize("pass_s", [0.004, 0.03, 0.3])
@pytest.mark.parametrize("least", [1.0, 1.02])
def test_shared_passes_get_hardly_longer_than_what_all_have_gained(pass_s, least):
    """One session brings no drafts, another as many sure ones as a pass may take."""
    position_s = pass_s / 40
    price = DraftCost({1: pass_s, 17: pass_s + 16 * position_s})
    drafts = passes = 0
    spent_s = 0.0
    for _ in range(500):
        (taken, none) = price.allocate(2, [[0.99] * 15, []], [2.0, least])
        assert none == 0
        price.record_pass(2 + taken, pass_s + (1 + taken) * position_s)
        price.record_tokens(2 + taken)
        drafts, passes = drafts + taken, passes + 1
        spent_s += pass_s + position_s
    longer = drafts * position_s / spent_s
    # the rule, and what passes had saved up at first
    assert 0.5 * (least - 1.0) < longer < (least / 0.985 - 1.0) + 0.02
    assert drafts > 0


def test_passes_that_take_few_drafts_save_up_few_for_a_later_one():
    """However long a session without drafts was spared, no pass keeps it waiting for all of it."""
    price = DraftCost({1: 0.04, 41: 0.08})
    for _ in range(200):
        assert price.allocate(2, [[0.99], []], [2.0, 1.02]) == [1, 0]
    assert price.allocate(2, [[0.99] * 15, []], [2.0, 1.02])[0] < 7


def test_a_session_that_gains_as_much_does_not_hold_the_others():
    price = DraftCost({1: 0.01, 17: 0.018})
    assert price.allocate(2, [[0.9] * 8, [0.8] * 8], [3.0, 3.0]) == [8, 8]
    assert price.allocate(1, [[0.9] * 8], [1.0]) == [8]  # nothing to share


def test_passes_that_read_prompts_teach_nothing():
    price = DraftCost({1: 0.01, 17: 0.026})
    for positions in (1, 9, 3) * 20:
        price.record_pass(positions, 0.009 + 0.001 * positions)
        price.record_tokens(1)
    before = price.seconds_per_position, price.tokens_per_s
    price.skip_pass()
    price.record_tokens(7)
    assert (price.seconds_per_position, price.tokens_per_s) == before


def paused(price, positions, pause_s, a_s=0.01, b_s=0.0002):
    """One pass of an edge that stood still meanwhile."""
    price.record_pass(positions, pause_s + a_s + b_s * positions)
    price.record_tokens(1)


@pytest.mark.parametrize("pause_s", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("positions", [1, 4, 8, 16])
@pytest.mark.parametrize("before", [0, 5, 300])
def test_a_pause_in_one_pass_prices_out_no_drafts(before, positions, pause_s):
    """Whatever the pass was like, and however little was known before it."""
    price, quiet = DraftCost(line(0.01, 0.0002)), DraftCost(line(0.01, 0.0002))
    random = np.random.default_rng(3)
    for each in (price, quiet):
        passes(each, 0.01, 0.0002, random.integers(1, 9, before))
    paused(price, positions, pause_s)
    for _ in range(60):
        assert price.tokens_per_draft == pytest.approx(quiet.tokens_per_draft, rel=0.35)
        for each in (price, quiet):
            passes(each, 0.01, 0.0002, random.integers(1, 9, 1))
    assert price.tokens_per_draft == pytest.approx(quiet.tokens_per_draft, rel=0.05)
    assert price.predict_pass_s(1) == pytest.approx(quiet.predict_pass_s(1), rel=0.1)


@pytest.mark.parametrize("times", [8.0, 30.0])
def test_it_follows_a_machine_that_becomes_far_slower(times):
    """What repeats is no pause: a machine that lost its cores, contexts that became long."""
    random = np.random.default_rng(4)
    price = DraftCost(line(0.01, 0.0002))
    passes(price, 0.01, 0.0002, random.integers(1, 17, 300))
    passes(price, times * 0.01, times * 0.0002, random.integers(1, 17, 400))
    assert price.predict_pass_s(8) == pytest.approx(times * 0.0116, rel=0.1)
    assert price.seconds_per_position == pytest.approx(times * 0.0002, rel=0.2)
