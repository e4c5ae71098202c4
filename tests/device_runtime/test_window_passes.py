"""A window's passes with a drafter with a mask token: chosen by what rounds take, and learnt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotfish.device_runtime.record import Timings
from pilotfish.device_runtime.window_passes import WindowPasses
from pilotfish.drafting.ahead import ModelAcceptance
from tests.support.plans import plan

FLAT = {1: 0.01, 15: 0.01}
GREEDY = plan(protocol="greedy", temperature=0.0)


def passes_of(drafts_per_pass: int = 8, token_s: float = 0.01) -> tuple[WindowPasses, Any]:
    drafter = SimpleNamespace(drafts_per_pass=drafts_per_pass, pass_times=FLAT, places={})
    edge = SimpleNamespace(token_s=token_s)
    return WindowPasses(cast(Any, drafter), cast(Any, edge), ModelAcceptance()), drafter


def learn(passes: WindowPasses, drafter: Any, waiting_s: float) -> None:
    """Rounds in which the first draft of a pass is right, and the second is wrong."""
    drafter.places = dict(enumerate(range(4)))
    for _ in range(60):
        passes.record_round(GREEDY, 1, Timings(draft=5.0, verify=waiting_s))


def test_a_long_round_gets_passes_of_one_draft() -> None:
    passes, drafter = passes_of()
    passes.start(0.0)
    assert passes.single(GREEDY, 4) == 0  # all places are as good before any evidence
    learn(passes, drafter, 0.2)
    assert passes.single(GREEDY, 4) >= 3
    learn(passes, drafter, 1e-4)
    assert passes.single(GREEDY, 4) == 0


def test_before_the_second_round_the_rtt_and_the_edges_own_time_count() -> None:
    passes, drafter = passes_of()
    passes.start(0.0)
    learn(passes, drafter, 1e-4)
    passes.start(0.3)
    assert passes.rtt_s == 0.3
    assert passes.single(GREEDY, 4) >= 3
    passes.record_round(GREEDY, 1, Timings(verify=1e-4))  # it reads the prompt: not counted
    assert passes.single(GREEDY, 4) >= 3
    passes.record_round(GREEDY, 1, Timings(verify=1e-4))
    assert passes.single(GREEDY, 4) == 0


@pytest.mark.parametrize("protocol", ["dsd", "tslt", "dssd"])
def test_drafts_that_were_discarded_have_no_influence_on_draws(protocol: str) -> None:
    passes, drafter = passes_of()
    passes.start(0.0)
    learn(passes, drafter, 0.2)
    assert passes.single(plan(protocol=protocol, temperature=1.0), 4) == 0
    assert passes.single(plan(protocol="coupled", temperature=0.0), 4) >= 3


def test_an_ordinary_drafter_has_nothing_to_choose() -> None:
    passes, drafter = passes_of(drafts_per_pass=1)
    passes.start(0.0)
    learn(passes, drafter, 0.2)
    assert passes.single(GREEDY, 4) == 0
