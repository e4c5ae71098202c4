"""`drawn` drafts the token that `choose` takes, and tells by how much."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.randomness import Purpose, exponentials, noise
from pilotfish.wire.protocols import SamplingParams, choose
from pilotfish.wire.protocols.ahead import draft_with_margin
from tests.support.examples import examples

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 5]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.95]),
)


def scores(logits, law, position):
    """In logits: those of the tokens, and their noise times the temperature; float64 [V]."""
    if law.sampling.greedy:
        return logits.astype(float)
    p = probabilities(logits[None], law.sampling)[0]
    gumbel = -np.log(exponentials(noise(len(p), law.seed, Purpose.TARGET, position)))
    with np.errstate(divide="ignore"):
        return law.sampling.temperature * (np.log(p.astype(float)) + gumbel)


@given(
    st.integers(2, 4000),
    st.sampled_from([0.01, 1.0, 5.0, 30.0]),
    samplings,
    st.integers(0, 2**32),
    st.booleans(),
)
@examples(400)
def test_it_is_the_choice_and_its_margin(vocab, spread, sampling, seed, ties):
    logits = (spread * np.random.default_rng(seed).standard_normal(vocab)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    law = SamplingParams(seed=seed, sampling=sampling)
    token, margin = draft_with_margin(logits, law, 11)
    assert token == choose(logits, law, 11, Purpose.TARGET)
    second, first = np.sort(scores(logits, law, 11))[-2:]
    # what float32 rounds to 0 cannot win, and leads are infinite then
    clear = 70.0 * sampling.temperature if sampling.temperature else math.inf
    assert min(margin, clear) == pytest.approx(min(first - second, clear), abs=1e-5)
