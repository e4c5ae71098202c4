"""What a token costs under `ahead`, against a simulation of every event and against limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pilotfish.speculation.ahead import MOST_AHEAD, draft_cost, draft_length, survival, token_costs
from tests.support.examples import examples

WIDTH = 15  # drafts that the edge takes into a pass at most
# (α, ms a pass, ms a position in it, ms a draft, RTT in ms): ms, passes, positions and drafts a
# token. Of an event simulation of both ends over 60,000 tokens whose drafts are right with
# probability α each: the edge takes 15 drafts at most, the device drafts 24 ahead, a pass of either
# that has begun is finished, every draft is sent at once.
SIMULATED = {
    (0.5, 10, 0.2, 2, 10): (9.15, 0.890, 1.229, 4.573),
    (0.7, 40, 0.3, 6, 50): (28.97, 0.714, 1.335, 4.828),
    (0.7, 25, 0.3, 6, 0): (15.38, 0.599, 1.353, 2.564),
    (0.8, 25, 0.3, 12, 20): (19.85, 0.781, 1.061, 1.654),
    (0.9, 40, 0.3, 2, 100): (16.42, 0.400, 1.411, 3.035),
    (0.7, 130, 9, 6, 20): (100.18, 0.515, 3.695, 7.455),
    (0.9, 10, 0.2, 20, 50): (10.20, 1.000, 1.000, 0.510),
}
# The survival of SmolLM2-135M drafting for Qwen2.5-Coder-1.5B on twelve answers (α 0.63), and the
# same simulation over the tokens that it was taken from: 40 ms a pass, 0.3 ms more a position,
# 6 ms a draft.
PAIR = (
    1.0,
    0.537,
    0.354,
    0.221,
    0.158,
    0.122,
    0.078,
    0.053,
    0.042,
    0.03,
    0.022,
    0.014,
    *((0.008,) * 5),
    *((0.003,) * 6),
)
PAIR_SIMULATED = {5: (24.73, 0.606, 1.592, 4.120), 50: (30.45, 0.752, 1.304, 5.075)}


def passes(a_ms: float, b_ms: float) -> list[float]:
    return [(a_ms + b_ms * (1 + taken)) * 1e-3 for taken in range(WIDTH + 1)]


def geometric(alpha: float, depth: int = 400) -> NDArray[np.float64]:
    return survival(np.full(depth, alpha))


@pytest.mark.parametrize("cell", SIMULATED, ids=str)
def test_the_model_is_the_simulation(cell: tuple[float, ...]) -> None:
    alpha, a_ms, b_ms, draft_ms, rtt_ms = cell
    found = token_costs(
        geometric(alpha),
        rtt_s=rtt_ms * 1e-3,
        draft_s=draft_ms * 1e-3,
        pass_s=passes(a_ms, b_ms),
        most_ahead=24,
    )
    token_ms, *counts = SIMULATED[cell]
    assert found.token_s * 1e3 == pytest.approx(token_ms, rel=0.02)
    assert (found.passes, found.positions, found.drafts) == pytest.approx(counts, rel=0.07)


@pytest.mark.parametrize("rtt_ms", PAIR_SIMULATED)
def test_the_model_takes_how_a_pair_agrees_not_how_often(rtt_ms: int) -> None:
    found = token_costs(
        np.array(PAIR), rtt_s=rtt_ms * 1e-3, draft_s=0.006, pass_s=passes(40, 0.3), most_ahead=24
    )
    token_ms, *counts = PAIR_SIMULATED[rtt_ms]
    assert found.token_s * 1e3 == pytest.approx(token_ms, rel=0.02)
    assert (found.passes, found.positions, found.drafts) == pytest.approx(counts, rel=0.05)


ROUNDING = 1e-3  # survival below 2e-5 is not followed
paces = st.floats(1e-3, 0.3)
hazards = st.lists(st.floats(0.0, 1.0), max_size=150).map(np.array)


@examples(1500)
@example(np.array([0.0067, 0.1875, 0.203125, 0.375]), 0.0, 0.03125, 0.25, 0.28125, 16)
@given(hazards, st.floats(0, 0.5), paces, paces, st.floats(0.0, 0.3), st.integers(1, MOST_AHEAD))
def test_at_its_price_no_draft_makes_a_token_dearer(
    alphas: NDArray[np.float64],
    rtt_s: float,
    draft_s: float,
    token_s: float,
    steepness: float,
    ahead: int,
) -> None:
    pass_s = [token_s * (1 + steepness * taken) for taken in range(WIDTH + 1)]
    run = survival(alphas)
    found = token_costs(
        run,
        rtt_s=rtt_s,
        draft_s=draft_s,
        pass_s=pass_s,
        most_ahead=ahead,
        draft_cost=draft_cost(pass_s),
    )
    assert found.token_s <= token_s * (1 + ROUNDING)
    assert 1 / (WIDTH + 1) - ROUNDING <= found.passes <= 1 + ROUNDING
    assert found.positions >= 1 - ROUNDING
    assert found.drafts >= found.positions - 1 - ROUNDING  # what is taken was drafted
    # no schedule makes fewer passes than one for each correction, or 1 + WIDTH tokens
    assert found.token_s >= token_s * max(1 / run.sum(), 1 / (WIDTH + 1)) * (1 - ROUNDING)


@examples(1500)
@given(st.floats(0.0, 0.97), paces, paces, st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_a_longer_link_makes_no_token_cheaper(
    alpha: float, draft_s: float, token_s: float, rtt_s: float, more_s: float
) -> None:
    pass_s = [token_s] * (WIDTH + 1)
    near, far = (
        token_costs(geometric(alpha), rtt_s=rtt, draft_s=draft_s, pass_s=pass_s).token_s
        for rtt in (rtt_s, rtt_s + more_s)
    )
    # where the two paces fit each other, a draft that comes a little later may fit better
    assert near <= far * 1.05


@examples(1500)
@given(st.floats(0, 0.5), paces, paces)
def test_without_agreement_it_is_the_target_alone(
    rtt_s: float, draft_s: float, token_s: float
) -> None:
    pass_s = [token_s * (1 + 0.01 * taken) for taken in range(WIDTH + 1)]
    found = token_costs(np.ones(1), rtt_s=rtt_s, draft_s=draft_s, pass_s=pass_s, draft_cost=0.01)
    assert found.token_s == pytest.approx(token_s)
    assert (found.passes, found.positions) == (1.0, 1.0)


def test_hints_that_are_there_at_once_save_all_but_the_corrections() -> None:
    run = geometric(0.8, depth=12)
    found = token_costs(run, rtt_s=0.0, draft_s=0.0, pass_s=[0.04] * (WIDTH + 1))
    assert found.token_s == pytest.approx(0.04 / run.sum())


def test_a_device_drafts_as_far_as_the_odds_reach() -> None:
    assert draft_length(geometric(0.7)) == 10  # 0.7⁹ ≥ 0.03
    assert draft_length(geometric(0.0)) == 1
    assert draft_length(geometric(1.0)) == MOST_AHEAD


def test_a_full_pass_has_its_price() -> None:
    assert draft_cost([0.1, 0.11, 0.12]) == pytest.approx(0.1)
    # at that price a draft of these odds is left out, and it is `stream`
    steep = [0.1 + 0.08 * taken for taken in range(WIDTH + 1)]
    found = token_costs(
        geometric(0.7), rtt_s=0.0, draft_s=0.001, pass_s=steep, draft_cost=draft_cost(steep)
    )
    assert (found.positions, found.token_s) == (1.0, pytest.approx(0.1))
