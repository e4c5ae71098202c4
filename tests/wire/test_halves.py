"""Probabilities as halves: NumPy's own rounding, and the law of `dsd` where halves are coarsest."""

from __future__ import annotations

import numpy as np
import pytest

from pilotfish.speculation.distributions import Floats, Sampling, probabilities
from pilotfish.wire.codecs.halves import HALF_ERROR, LARGEST_HALF, from_halves, halves
from pilotfish.wire.messages import Buffer
from pilotfish.wire.protocols import DrawKey, SamplingParams
from pilotfish.wire.protocols.dsd import (
    DenseDraft,
    Distributions,
    Dsd,
    DsdOptions,
    check_distributions,
)
from pilotfish.wire.protocols.protocol import Ids
from tests.support.enumeration import p_value
from tests.support.rounds import ONE, Setting, exact_law, frequencies, logits
from tests.wire.test_protocol_outcomes import assert_exact

EVERY = np.arange(LARGEST_HALF + 1, dtype=np.uint16)
ONE_AS_HALF = 0x3C00
SEEDS = 500


def test_every_half_and_its_neighbours_round_as_numpys() -> None:
    values = EVERY[: ONE_AS_HALF + 1].view(np.float16).astype(np.float32)
    middles = (values[1:] + values[:-1]) / 2
    near = np.concatenate([middles, np.nextafter(middles, 0), np.nextafter(middles, 1)])
    for numbers in (values, near.astype(np.float32)):
        np.testing.assert_array_equal(halves(numbers), numbers.astype(np.float16).view(np.uint16))
    np.testing.assert_array_equal(from_halves(EVERY[: ONE_AS_HALF + 1]), values)


@pytest.mark.parametrize("deviation", [0.0, 1.0, 6.0])
@pytest.mark.parametrize("vocab", [151_665, 1_000_003])
def test_the_edge_takes_every_softmax_that_was_rounded(deviation: float, vocab: int) -> None:
    """The flattest and large vocabularies, where much of the mass is below the least half."""
    row = deviation * np.random.default_rng(1).standard_normal(vocab).astype(np.float32)
    values = probabilities(row[None], ONE)[0]
    [token], q = Dsd().draw(row, SamplingParams(sampling=ONE, seed=1), DrawKey(3, 0))
    check_distributions(np.array([token], np.uint32), q[None])
    error = np.abs(from_halves(q) - values)
    assert (error <= np.maximum(values * HALF_ERROR, 2.0**-25)).all()


# Temperatures at which the weights of the five tokens reach from 1 to far below the least half:
# some q are subnormal, some are 0 for all but the argmax.
COLD = (0.25, 0.18, 0.1, 0.03)


def coarse(setting: Setting) -> dict[str, int]:
    """Count the rounded numbers of q after the first tokens, by kind."""
    kinds = {"0": 0, "subnormal": 0, "alone": 0}
    for last in np.ndindex(setting.vocab, setting.vocab):
        q = probabilities(logits(setting.models[1], last)[None], setting.drafting)[0]
        bits = halves(q)
        kinds["0"] += int(((bits == 0) & (q > 0)).sum())
        kinds["subnormal"] += int(((bits > 0) & (bits < 0x400)).sum())
        kinds["alone"] += int((bits > 0).sum() == 1)
    return kinds


@pytest.mark.parametrize("temperature", COLD)
def test_the_law_is_exact_where_halves_are_coarse(temperature: float) -> None:
    """Over all outcomes of a round: the sum of q is not 1, and tokens that p allows have q = 0."""
    setting = Setting("dsd", (1, 1), ONE, Sampling(temperature=temperature), vocab=4)
    assert_exact(setting, 0)


def test_the_coarse_settings_are_coarse() -> None:
    kinds = [
        coarse(Setting("dsd", (1, 1), ONE, Sampling(temperature=each), vocab=4)) for each in COLD
    ]
    assert all(any(each[kind] for each in kinds) for kind in kinds[0])


def test_sampled_texts_follow_the_target_where_halves_are_coarse() -> None:
    setting = Setting("dsd", (1, 1), ONE, Sampling(temperature=0.18))
    counts = frequencies(setting, SEEDS)
    assert p_value(counts, exact_law(setting.models[0], ONE) * SEEDS) > 1e-4
    assert p_value(counts, exact_law(setting.models[1], setting.drafting) * SEEDS) < 1e-12


def test_a_device_that_samples_before_it_rounds_breaks_the_law() -> None:
    """The mutant: tests of the law would fail if q were rounded after sampling."""

    class RoundsAfterwards(Dsd):
        def draw(
            self, logits: Floats, params: SamplingParams, key: DrawKey
        ) -> tuple[list[int], Distributions]:
            plain = Dsd(DsdOptions(format="fp32"))
            tokens, q = plain.draw(logits, params, key)
            # a coarser format, so that few draws show it
            return tokens, np.maximum(np.rint(q * 4) / 4, q * (np.arange(len(q)) == tokens[0]))

        def encode_draft(self, draft: DenseDraft, pending: Ids, vocab_size: int) -> list[Buffer]:
            draft.q[:] /= draft.q.sum(axis=1, keepdims=True)
            return super().encode_draft(draft, pending, vocab_size)

    setting = Setting("dsd", (1, 1))
    counts = frequencies(setting, SEEDS, exchange=RoundsAfterwards())
    assert p_value(counts, exact_law(setting.models[0], ONE) * SEEDS) < 1e-6
