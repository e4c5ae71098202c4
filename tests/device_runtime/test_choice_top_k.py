"""K of the drafter's distributions: what "auto" expects of another K, and which K it chooses."""

from __future__ import annotations

import numpy as np
import pytest

from pilotfish.device_runtime.choice import Evidence
from pilotfish.device_runtime.choice.predictive import PredictivePolicy
from pilotfish.device_runtime.choice.top_k import TOP_KS
from pilotfish.device_runtime.plan import Auto, Plan
from pilotfish.device_runtime.record import Choice, Round, Timings
from pilotfish.speculation.cut_mass import CUT_SIZES, acceptance_at
from pilotfish.wire.codecs.sparse import typical_bytes
from pilotfish.wire.link.state import LinkState, Reading
from pilotfish.wire.protocols.protocol import PairSizes
from pilotfish.wire.request import Options
from tests.support.plans import alternatives, plan

DRAFTER = {1: 0.010, 2: 0.012, 4: 0.015}
TARGET = {1: 0.100, 2: 0.100, 4: 0.101, 8: 0.103, 16: 0.106, 32: 0.112}
AUTO = Auto(among=["tslt"])
FLAT = (0.60, 0.50, 0.42, 0.35, 0.29, 0.23, 0.11, 0.03)  # σ at each K of `CUT_SIZES`
SHARP = (0.004, 0.002, 0.001, 0.0005, 0.0, 0.0, 0.0, 0.0)
SPREAD = 0.2


def tslt(**options) -> Plan:
    return plan(protocol="tslt", temperature=1.0, window=4, **options)


def link(up_bps: float, rtt_s: float = 0.02) -> LinkState:
    def reading(value: float) -> Reading:
        return Reading(value=value, age_s=0.1, samples=5)

    return LinkState(rtt=reading(rtt_s), up=reading(up_bps), down=reading(1e9))


def played(used: Plan, cut: tuple[float, ...], seed: int, count: int = 60) -> list[Round]:
    """Play rounds of a pair that accepts at each K as the model says, with frames of usual size."""
    rng = np.random.default_rng(seed)
    top_k = used.top_k
    sigma = float(np.interp(np.log(top_k), np.log(CUT_SIZES), cut))
    alpha, gamma = acceptance_at(sigma, SPREAD), len(used.expansion)
    rounds = []
    for _ in range(count):
        accepted = int(np.cumprod(rng.random(gamma) < alpha).sum())
        rounds.append(
            Round(
                protocol=used.protocol,
                start=10,
                window=gamma,
                nodes=gamma,
                accepted=accepted,
                tokens=[0] * (accepted + 1),
                uplink_bytes=round(60 + 1.1 * typical_bytes(gamma, top_k)),
                downlink_bytes=58,
                timings=Timings(draft=0.010 * gamma, verify=0.1),
                pass_s=0.1,
                cut_masses=cut,
            )
        )
    return rounds


def informed(used: Plan, cut: tuple[float, ...], answers: int = 30) -> Evidence:
    seen = Evidence(DRAFTER, TARGET, PairSizes(49_152, 576))
    for seed in range(answers):
        seen.add(used, played(used, cut, seed))
    return seen


def chosen(
    seen: Evidence, state: LinkState, policy: PredictivePolicy | None = None, **options
) -> tuple[Plan, Choice]:
    plans = alternatives(AUTO, Options(temperature=1.0, **options), offered=["tslt"])
    return (policy or PredictivePolicy()).choose(AUTO, plans, state, seen)


@pytest.mark.parametrize("cut", [FLAT, SHARP])
@pytest.mark.parametrize("used", [16, 64, 1024])
def test_rounds_at_one_k_tell_the_acceptance_at_every_k(cut: tuple[float, ...], used: int) -> None:
    seen = informed(tslt().with_top_k(used), cut)
    known = float(np.interp(np.log(used), np.log(CUT_SIZES), cut))
    for top_k in TOP_KS:
        sigma = float(np.interp(np.log(top_k), np.log(CUT_SIZES), cut))
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
    assert not plan_.has_free_top_k
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
    seen = Evidence(DRAFTER, TARGET, PairSizes(49_152, 576))
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
    seen = Evidence(DRAFTER, TARGET, PairSizes(49_152, 576))
    rounds = played(tslt(), FLAT, 0, count=2)
    for number in range(1, 200):
        seen.add(tslt(draft_top_k=number), rounds)
        warm = plan(protocol="tslt", temperature=number / 10, window=4)
        seen.add(warm, rounds)
        seen.acceptance_by_depth(warm.with_top_k(256))
    entries = (seen._up_ratios._ratios, seen._cut_masses._values, seen._cut_masses._means)
    assert [len(each) for each in entries] == [64, 64, 64]
    newest = plan(protocol="tslt", temperature=19.9, window=4)
    assert seen._cut_masses.sigma(newest, 64) == pytest.approx(FLAT[CUT_SIZES.index(64)])
