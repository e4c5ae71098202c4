"""Whole generations of every protocol, with their keyed draws, follow the target's law.

What `test_protocol_outcomes.py` leaves out: that the draws are independent, and what a round passes
on to the next. χ² over the first three tokens; thresholds were fixed before the first run.
"""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from pilotfish.speculation import randomness
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.randomness import Purpose
from pilotfish.wire.protocols import SamplingParams, choose
from tests.support.enumeration import p_value
from tests.support.rounds import (
    COLD,
    DETERMINISTIC,
    EXACT,
    ONE,
    PROMPT,
    WARM,
    Setting,
    exact_law,
    frequencies,
    generate,
    logits,
)
from tests.support.thinned import thinned

HOLDS = 1e-4  # p-value at which a protocol would be said to break the law
REJECTED = 1e-12  # the drafter's own law must be further off than this
SEEDS = 1000
HOT = Sampling(temperature=1.3, top_k=4, top_p=0.95)
LISTED = [
    Setting("dsd", (1, 1), HOT, Sampling(temperature=0.7)),
    Setting("tslt", (1, 1), drafting=Sampling(temperature=1.0, top_k=2)),
    Setting("tslt", (1, 1), HOT, Sampling(temperature=1.0, top_p=0.6), enough=0.75),
    Setting("adaptive", (1, 1), HOT, Sampling(temperature=1.0, top_p=0.6)),
    Setting("tree", (2, 2), drafting=Sampling(temperature=1.0, top_k=3)),
    Setting("tree", (3, 1), HOT, Sampling(temperature=1.5)),
    Setting("dssd", (1, 1), enough=0.75),
    Setting("dssd", (1,), HOT, Sampling(temperature=0.7, top_k=3)),
    Setting("coupled", (1, 1), HOT, Sampling(temperature=0.7)),
]
REST = [
    Setting(name, (1, 1), HOT, Sampling(temperature=0.7))
    for name in WARM
    if name not in {setting.exchange for setting in LISTED}
]
SETTINGS = [*LISTED, *REST]
# The others are enumerated by `test_protocol_outcomes.py`, but for how their draws hang together:
# that no two share a block is below.
QUICK = [*(LISTED[at] for at in (2, 4, 6, 8)), *REST]


@pytest.mark.parametrize(
    "setting", thinned(SETTINGS, QUICK), ids=lambda s: f"{s.exchange}{s.expansion}"
)
def test_the_first_tokens_follow_the_targets_law(setting):
    target, drafter = setting.models
    counts = frequencies(setting, SEEDS)
    assert p_value(counts, exact_law(target, setting.sampling) * SEEDS) > HOLDS
    # the test can fail: the drafter's own law is far away
    assert p_value(counts, exact_law(drafter, setting.drafting) * SEEDS) < REJECTED


@pytest.mark.parametrize("drafting", [Sampling(temperature=1.0, top_k=2), ONE, HOT, Sampling()])
def test_adaptive_at_tau_0_is_tslt_token_for_token(drafting):
    for seed in range(40):
        strict, adaptive = (
            generate(Setting(name, (1, 1, 1), HOT, drafting), seed, length=12)
            for name in ("tslt", "adaptive")
        )
        assert adaptive == strict


@pytest.mark.parametrize("exchange", COLD)
@pytest.mark.parametrize("window", [0, 1, 2, 4])
def test_temperature_zero_is_the_targets_greedy_output(exchange, window):
    wanted = list(PROMPT)
    setting = Setting(exchange, (1,) * window, Sampling(), Sampling())
    for _ in range(12):
        wanted.append(int(logits(setting.models[0], tuple(wanted)).argmax()))
    assert generate(setting, 3, length=12) == tuple(wanted[len(PROMPT) :])


@pytest.mark.parametrize("exchange", sorted({*COLD} & {*WARM}))
def test_temperature_zero_on_one_side_only(exchange):
    """A one-hot p, or a one-hot q."""
    setting = Setting(exchange, (1, 1), Sampling(), ONE)
    counts = frequencies(setting, 40)
    np.testing.assert_array_equal(counts, exact_law(setting.models[0], Sampling()) * 40)
    counts = frequencies(Setting(exchange, (1, 1), ONE, Sampling()), 300)
    assert p_value(counts, exact_law(setting.models[0], ONE) * 300) > HOLDS


@pytest.mark.parametrize("window", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("drafting", [ONE, Sampling(), Sampling(temperature=2.0, top_k=1)])
def test_coupled_is_the_targets_own_sample_whatever_the_window(window, drafting):
    setting = Setting("coupled", (1,) * window, HOT, drafting)
    for seed in range(10):
        law, wanted = SamplingParams(sampling=HOT, seed=seed), PROMPT
        while len(wanted) < len(PROMPT) + 12:
            row = logits(setting.models[0], wanted)
            wanted = (*wanted, choose(row, law, len(wanted), Purpose.TARGET))
        assert generate(setting, seed, length=12) == wanted[len(PROMPT) :]


CHAINS = [(1,), (1, 1), (1, 1, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize(
    ("exchange", "expansion"),
    [
        *((name, chain) for name in EXACT for chain in CHAINS),
        *((name, (2, 2)) for name, exchange in EXACT.items() if exchange.allows_trees),
    ],
)
def test_no_two_draws_of_a_generation_share_a_block(exchange, expansion, monkeypatch):
    """Each draw has an interval of Philox counters of its own.

    Only a deterministic protocol's two ends use the same interval: that of the target's token.
    """
    real, drawn = randomness._words, []

    def recorded(count, *name):
        drawn.append((name, count))
        return real(count, *name)

    monkeypatch.setattr(randomness, "_words", recorded)
    sampling = ONE if exchange in WARM else Sampling()
    setting = Setting(exchange, expansion, sampling, sampling)
    for seed in (1, 2):
        drawn.clear()
        generate(setting, seed, length=24)
        assert bool(drawn) == (exchange in WARM)
        assert {name[0] for name, _ in drawn} <= {seed}
        times = Counter(name for name, _ in drawn)
        shared = {purpose for (_, purpose, *_), count in times.items() if count > 1}
        assert shared == ({Purpose.TARGET} if exchange in DETERMINISTIC else set())
        for (_, end), (begin, _) in pairwise(sorted(map(blocks, set(drawn)))):
            assert end <= begin


def blocks(draw):
    """First and last + 1 of the counter values that a draw takes."""
    (_, purpose, position, round_start, candidate), count = draw
    first = position << 64 | round_start << 128 | (candidate << 32 | purpose) << 192
    return first, first + -(-count // 4)
