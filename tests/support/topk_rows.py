"""Top-K rows for the tests of the codec `topk`."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from pilotfish.speculation.ensemble import TopRows, top_rows
from pilotfish.wire.codecs import TOPK_FORMATS
from tests.support.coded import VOCABS

FORMS = st.sampled_from(TOPK_FORMATS)


def message_of(seed: int, count: int, remaining: int, vocab: int, spread: float = 3.0) -> TopRows:
    """Rows of random models; the larger the spread, the more weight on few tokens."""
    rng = np.random.default_rng(seed)
    return top_rows(rng.normal(0.0, spread, (count, vocab)).astype(np.float32), 1.0, remaining)


@st.composite
def rows(draw: st.DrawFn) -> tuple[TopRows, int]:
    """Rows and V: of models, and of any values that sum to 1 at most."""
    vocab = min(draw(VOCABS), 3000)
    drawn_value = draw(st.one_of(st.integers(1, min(vocab, 80)), st.just(vocab)))
    count, seed = draw(st.integers(1, 6)), draw(st.integers(0, 2**32))
    spread = draw(st.sampled_from([0.0, 0.5, 3.0, 40.0]))
    result = message_of(seed, count, drawn_value, vocab, spread)
    if drawn_value < vocab and draw(st.booleans()):
        rng = np.random.default_rng(seed)
        octaves = rng.uniform(0.0, draw(st.sampled_from([1.0, 30.0, 120.0])), (count, drawn_value))
        weights = np.exp2(-octaves) * (rng.random((count, drawn_value)) < 0.9)
        weights[:, 0] = 1.0
        share = draw(st.sampled_from([1.0, 0.3, 1e-30]))
        values = share * weights / weights.sum(axis=1, keepdims=True)
        result = TopRows(result.ids, values.astype(np.float32))
    return result, vocab


def check(results: TopRows, count: int, remaining: int, vocab: int) -> None:
    """Everything that holds for whatever is decoded."""
    assert results.ids.shape == results.values.shape == (count, min(remaining, vocab))
    assert (results.ids.dtype, results.values.dtype) == (np.uint32, np.float32)
    if count:
        assert (np.diff(results.ids.astype(np.int64), axis=1) > 0).all()
        assert results.ids.max() < vocab
        assert results.values.min() >= 0.0
        assert results.retained_mass.max() <= 1.0011
        assert results.retained_mass.min() > 0.0
