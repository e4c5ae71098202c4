"""The expansion of a tree: what "auto" expects of other trees, and which tree it chooses."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from pilotfish.device_runtime.choice import Evidence
from pilotfish.device_runtime.choice.predictive import PredictivePolicy
from pilotfish.device_runtime.plan import Plan
from pilotfish.speculation.cut_mass import acceptance_at
from pilotfish.speculation.more_candidates import acceptance_of
from pilotfish.speculation.tree import nodes_at_most
from pilotfish.wire.protocols.protocol import PairSizes
from tests.support import choosing
from tests.support.choosing import DRAFTER, SHARP, VOCAB, informed, link, played, sigma_at
from tests.support.plans import plan

SPREAD = 0.9  # parameter s of `acceptance_at` with which the target rejects a third of the drafts
SIGMA = sigma_at(SHARP, 64)
ALPHA = acceptance_at(SIGMA, SPREAD)
EXPANSIONS = ((1, 1, 1), (2, 2, 2), (4, 2, 1), (3, 1, 1))
chosen = partial(choosing.chosen, "tree")


def tree(*expansion: int, **options) -> Plan:
    return plan(protocol="tree", temperature=1.0, expansion=list(expansion), **options)


def no_gain(candidates: int, alpha: float, sigma: float) -> float:
    """Return θ of k candidates for a drafter that is wrong with all candidates or with none."""
    return alpha


@pytest.mark.parametrize("used", EXPANSIONS)
def test_rounds_of_one_tree_tell_the_acceptance_of_others(used: tuple[int, ...]) -> None:
    seen = informed(tree(*used), SHARP, spread=SPREAD)
    for expansion in EXPANSIONS:
        expected = seen.acceptance_by_depth(tree(*expansion))
        law = [acceptance_of(candidates, ALPHA, SIGMA) for candidates in expansion]
        np.testing.assert_allclose(expected, law, atol=0.04)


def test_rounds_of_chains_tell_the_acceptance_of_trees() -> None:
    chain = plan(protocol="tslt", temperature=1.0, window=3)
    seen = informed(chain, SHARP, spread=SPREAD)
    law = [acceptance_of(candidates, ALPHA, SIGMA) for candidates in (4, 2, 1)]
    np.testing.assert_allclose(seen.acceptance_by_depth(tree(4, 2, 1)), law, atol=0.04)


def test_what_was_measured_stands_above_the_forecast() -> None:
    """More candidates gain nothing here, and rounds of such trees show it."""
    pair = {"spread": SPREAD, "gain": no_gain}
    seen = informed(tree(1, 1, 1), SHARP, **pair)
    forecast = seen.acceptance_by_depth(tree(2, 2, 2))
    assert forecast[0] > ALPHA + 0.03
    for seed in range(30):
        seen.add(tree(2, 2, 2), played(tree(2, 2, 2), SHARP, seed, **pair))
    assert seen.acceptance_by_depth(tree(2, 2, 2))[0] == pytest.approx(ALPHA, abs=0.03)
    assert seen.acceptance_by_depth(tree(1, 1, 1))[0] == pytest.approx(ALPHA, abs=0.03)


@pytest.mark.parametrize("protocol", ["tslt", "tree", "dsd", "coupled"])
def test_a_window_without_drafts_yields_one_token(protocol: str) -> None:
    seen = informed(tree(2, 2, 1), SHARP, answers=1)
    empty = plan(protocol=protocol, temperature=1.0, window=0)
    assert seen.tokens(empty) == 1.0
    seen.add(empty, played(empty, SHARP, 0))
    assert len(seen.acceptance_by_depth(empty)) == 0


def test_at_temperature_0_equal_candidates_are_one() -> None:
    greedy = {"protocol": "tree", "temperature": 0.0}
    wide, narrow = (plan(expansion=each, **greedy) for each in ([2, 2], [1, 1]))
    seen = Evidence(DRAFTER, {}, PairSizes(VOCAB, 576))
    seen.add(wide, played(tree(2, 2), SHARP, 0))
    np.testing.assert_allclose(seen.acceptance_by_depth(wide), seen.acceptance_by_depth(narrow))


def test_a_slow_round_gets_a_wide_tree_and_a_thin_uplink_a_narrow_one() -> None:
    seen = informed(tree(2, 2, 1), SHARP, spread=SPREAD)
    far, choice = chosen(seen, link(1e9, rtt_s=0.3))
    thin, _ = chosen(seen, link(3e4, rtt_s=0.02))
    assert nodes_at_most(far.expansion) > 2 * len(far.expansion)
    assert nodes_at_most(thin.expansion[:-1]) == len(thin.expansion) - 1  # one q̂ for each level
    listed = ",".join(map(str, far.expansion))
    assert choice.expansion == far.expansion
    assert f"tree, window {choice.window}, expansion {listed}, K {far.top_k} at " in choice.reason


def test_a_choice_of_a_tree_needs_a_clear_reason_to_change() -> None:
    seen = informed(tree(2, 2, 1), SHARP, spread=SPREAD)
    policy = PredictivePolicy()
    state = link(1e9, rtt_s=0.3)
    first = chosen(seen, state, policy)[0].expansion
    for rtt_s in (0.29, 0.31, 0.3):
        assert chosen(seen, link(1e9, rtt_s=rtt_s), policy)[0].expansion == first


@pytest.mark.parametrize("most", [4, 8, 16])
def test_no_tree_exceeds_what_the_edge_takes(most: int) -> None:
    seen = informed(tree(2, 2, 1), SHARP, spread=SPREAD)
    _, choice = chosen(seen, link(1e9, rtt_s=0.3), most=most, vocab_size=VOCAB)
    assert max(nodes_at_most(each.expansion) for each in choice.forecasts) <= most


def test_a_client_that_names_the_protocol_gets_its_own_expansion() -> None:
    named = plan(protocol="tree", temperature=1.0, window=4)
    assert named.expansion == (2, 2, 1, 1)
    assert not named.free.branchings
    assert tree(3, 1).expansion == (3, 1)
