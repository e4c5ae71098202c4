"""K of the drafter's distributions: what "auto" expects of another K, and which K it chooses."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from pilotfish.device_runtime.choice import Evidence
from pilotfish.device_runtime.choice.predictive import PredictivePolicy
from pilotfish.device_runtime.plan import Auto, Plan
from pilotfish.speculation.cut_mass import CUT_SIZES, acceptance_at
from pilotfish.wire.codecs.sparse import MAX_TOKENS, typical_bytes
from pilotfish.wire.protocols import Tslt
from pilotfish.wire.protocols.protocol import PairSizes
from pilotfish.wire.request import Options
from tests.support import choosing
from tests.support.choosing import (
    DRAFTER,
    FLAT,
    SHARP,
    TARGET,
    VOCAB,
    informed,
    link,
    played,
    sigma_at,
)
from tests.support.plans import alternatives, plan

SPREAD = 0.2
TOP_KS = Tslt.top_ks
chosen = partial(choosing.chosen, "tslt")


def tslt(**options) -> Plan:
    return plan(protocol="tslt", temperature=1.0, window=4, **options)


@pytest.mark.parametrize("cut", [FLAT, SHARP])
@pytest.mark.parametrize("used", [16, 64, 1024])
def test_rounds_at_one_k_tell_the_acceptance_at_every_k(cut: tuple[float, ...], used: int) -> None:
    seen = informed(tslt().with_top_k(used), cut)
    known = sigma_at(cut, used)
    for top_k in TOP_KS:
        sigma = sigma_at(cut, top_k)
        expected = seen.acceptance_by_depth(tslt().with_top_k(top_k))[0]
        error = 0.03 + 0.1 * abs(sigma - known)  # far from the rounds' own K it is less exact
        assert expected == pytest.approx(acceptance_at(sigma, SPREAD), abs=error)


@pytest.mark.parametrize("used", [16, 64, 1024])
def test_bytes_of_another_k_follow_from_the_measured_ones(used: int) -> None:
    seen = informed(tslt().with_top_k(used), FLAT, answers=2)
    for top_k in TOP_KS:
        up = seen.round_bytes(tslt().with_top_k(top_k)).up
        assert up == pytest.approx(60 + 1.1 * typical_bytes(4, top_k), rel=0.12)


def test_bytes_measured_at_a_k_count_for_this_k() -> None:
    seen = informed(tslt(), FLAT, answers=1)
    small = tslt().with_top_k(16)
    rounds = played(small, FLAT, seed=9)
    for round_ in rounds:
        round_.uplink_bytes = 1000
    seen.add(small, rounds)
    assert seen.round_bytes(small).up == pytest.approx(1000)
    assert seen.round_bytes(tslt()).up == pytest.approx(60 + 1.1 * typical_bytes(4, 64), rel=0.05)


def test_a_thin_uplink_gets_a_small_k_and_a_fast_one_a_large_k() -> None:
    seen = informed(tslt(), FLAT)
    thin, _ = chosen(seen, link(20e3))
    usual, _ = chosen(seen, link(3e5))
    fast, _ = chosen(seen, link(1e9))
    assert thin.top_k < usual.top_k < fast.top_k == max(TOP_KS)


def test_whole_distributions_are_sent_where_they_fit_and_pay() -> None:
    seen = informed(tslt(), FLAT)
    fast, choice = chosen(seen, link(1e11), vocab_size=VOCAB)
    assert fast.top_k == choice.top_k == VOCAB
    assert f", K {VOCAB} at " in choice.reason
    assert seen.acceptance_by_depth(fast)[0] > seen.acceptance_by_depth(fast.with_top_k(1024))[0]
    for forecast in choice.forecasts:  # longer windows keep another K
        assert forecast.window * forecast.top_k <= MAX_TOKENS
    fast.expect_sendable(VOCAB)
    assert chosen(seen, link(1e6), vocab_size=VOCAB)[0].top_k <= max(TOP_KS)
    assert chosen(seen, link(1e11), vocab_size=VOCAB, window=8)[0].top_k == max(TOP_KS)


def test_where_k_does_not_matter_it_stays() -> None:
    seen = informed(tslt(), SHARP)
    policy = PredictivePolicy()
    for rate in (5e6, 1e9, 20e6, 1e9):
        assert chosen(seen, link(rate), policy)[0].top_k == 64


def test_a_choice_of_k_needs_a_clear_reason_to_change() -> None:
    """Between two rates at which a new device would choose two K, each K stays."""
    seen = informed(tslt(), FLAT)
    rates = np.geomspace(2e4, 1e9, 60)
    policy = PredictivePolicy()
    up = [chosen(seen, link(rate), policy)[0].top_k for rate in rates]
    down = [chosen(seen, link(rate), policy)[0].top_k for rate in rates[::-1]]
    assert sorted(up) == up
    assert sorted(down, reverse=True) == down
    assert all(high >= low for high, low in zip(down[::-1], up, strict=True))
    assert up != down[::-1]


@pytest.mark.parametrize(
    "options", [{"draft_top_k": 100}, {"draft_top_p": 0.9}, {"top_k": 40}, {"top_p": 0.9}]
)
def test_a_truncation_that_the_request_names_stays(options: dict[str, float]) -> None:
    seen = informed(tslt(), FLAT)
    plan_, choice = chosen(seen, link(1e9), **options)
    assert plan_.top_k == options.get("draft_top_k", options.get("top_k", 0))
    assert plan_.names_truncation
    assert not plan_.free.top_ks
    assert choice.top_k == plan_.top_k


def test_the_choice_tells_k() -> None:
    seen = informed(tslt(), FLAT)
    plan_, choice = chosen(seen, link(1e9))
    assert choice.top_k == plan_.top_k == plan_.drafting.sampling.top_k
    assert f"window {choice.window}, K {choice.top_k} at " in choice.reason
    assert {forecast.top_k for forecast in choice.forecasts} == {choice.top_k}


def test_other_protocols_have_no_k() -> None:
    others = ["coupled", "dssd", "stream"]
    auto = Auto(among=others)
    plans = alternatives(auto, Options(temperature=1.0), offered=others)
    _, choice = PredictivePolicy().choose(auto, plans, link(1e6), informed(tslt(), FLAT))
    assert {forecast.top_k for forecast in choice.forecasts} == {0}
    assert " K " not in choice.reason


@pytest.mark.parametrize(("used", "share"), [(16, 1.0), (1024, 0.0)])
def test_rounds_that_the_model_does_not_explain_give_a_possible_acceptance(
    used: int, share: float
) -> None:
    """All or none of the drafts are accepted, whatever mass K cuts off."""
    seen = Evidence(DRAFTER, TARGET, PairSizes(VOCAB, 576))
    at_used = tslt().with_top_k(used)
    for seed in range(30):
        rounds = played(at_used, FLAT, seed, count=8)
        for round_ in rounds:
            round_.accepted = round(share * round_.window)
        seen.add(at_used, rounds)
    assert seen.acceptance_by_depth(at_used)[0] == pytest.approx(share, abs=0.05)
    others = [plan(protocol=name, temperature=1.0, window=4) for name in ("dsd", "dssd", "coupled")]
    for each in (tslt(), at_used, *others, plan(protocol="ahead", temperature=1.0)):
        by_depth = seen.acceptance_by_depth(each)
        assert by_depth.min() >= 0.0
        assert by_depth.max() <= 1.0


def test_evidence_does_not_grow_with_the_ks_and_temperatures_of_requests() -> None:
    seen = Evidence(DRAFTER, TARGET, PairSizes(VOCAB, 576))
    rounds = played(tslt(), FLAT, 0, count=2)
    for number in range(1, 200):
        seen.add(tslt(draft_top_k=number), rounds)
        warm = plan(protocol="tslt", temperature=number / 10, window=4)
        seen.add(warm, rounds)
        seen.acceptance_by_depth(warm.with_top_k(256))
    cut_masses = seen._acceptance._cut_masses
    assert [len(each) for each in (seen._up_ratios._ratios, cut_masses._sums)] == [64, 64]
    newest = plan(protocol="tslt", temperature=19.9, window=4)
    (count, sums), at = cut_masses._sums[19.9, 0.0], CUT_SIZES.index(64)
    assert cut_masses.sigma(newest, 64) == pytest.approx(sums[at] / count)


def test_requests_with_another_min_p_have_a_sigma_of_their_own() -> None:
    """min_p drops unlikely tokens, so K cuts off less."""
    seen = Evidence(DRAFTER, TARGET, PairSizes(VOCAB, 576))
    sharp = plan(protocol="tslt", temperature=1.0, window=4, min_p=0.2)
    cut_masses = seen._acceptance._cut_masses
    before = cut_masses.sigma(tslt(), 64)
    for seed in range(20):
        seen.add(sharp, played(sharp, (0.0,) * len(CUT_SIZES), seed, count=8))
    assert cut_masses.sigma(sharp, 64) < 0.1 * before
    assert cut_masses.sigma(tslt(), 64) == before
