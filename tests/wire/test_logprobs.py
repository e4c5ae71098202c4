"""Frames of log-probabilities: what goes in comes out, and no bytes do harm."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import MalformedError, PilotfishError, TokenOutOfRangeError
from pilotfish.wire.codecs.logprobs import (
    decode_logprobs,
    entry_type,
    make_entries,
    unknown_entries,
)
from tests.support.examples import examples

VOCAB = 9


@given(st.integers(0, 2**31), st.integers(0, 20), st.integers(0, 4), st.integers(0, VOCAB - 1))
@examples(100)
def test_what_goes_in_comes_out(seed: int, most: int, rows: int, forbidden: int) -> None:
    random = np.random.default_rng(seed)
    logits = random.standard_normal((rows, VOCAB), np.float32) * 4
    logits[:, :forbidden] = -np.inf
    tokens = random.integers(forbidden, VOCAB, rows).tolist()
    frame = make_entries(logits, tokens, most).tobytes()
    assert len(frame) == rows * (4 + 8 * most)
    logprobs = decode_logprobs(frame, most, VOCAB, (rows,))
    for row, token, info in zip(logits, tokens, logprobs, strict=True):
        p = np.exp(row.astype(float) - row.max())
        p /= p.sum()
        assert info is not None
        assert info.logprob == pytest.approx(math.log(p[token]), abs=1e-5)
        likeliest = sorted(range(forbidden, VOCAB), key=lambda id: (-row[id], id))[:most]
        assert [id for id, _ in info.top] == likeliest
        assert [value for _, value in info.top] == pytest.approx(np.log(p[likeliest]), abs=1e-5)


def test_what_is_not_known_is_none() -> None:
    assert decode_logprobs(unknown_entries(2, 3).tobytes(), 3, VOCAB, (1, 2)) == [None, None]


@given(st.binary(max_size=80), st.integers(0, 3))
@examples(200)
def test_any_bytes_are_entries_or_a_typed_error(data: bytes, most: int) -> None:
    size = entry_type(most).itemsize
    try:
        logprobs = decode_logprobs(data, most, VOCAB, (0, 1, 2))
    except PilotfishError:
        return
    assert len(logprobs) == len(data) / size
    for logprob in logprobs:
        assert logprob is None or logprob.logprob <= 0
        assert all(id < VOCAB and value <= 0 for id, value in (logprob.top if logprob else ()))


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [("own", 0.1, MalformedError), ("own", np.inf, MalformedError), ("values", 1.0, MalformedError),
     ("values", np.nan, MalformedError), ("ids", VOCAB, TokenOutOfRangeError)],
)  # fmt: skip
def test_numbers_that_cannot_be(field: str, value: float, error: type[Exception]) -> None:
    frame = make_entries(np.zeros((2, VOCAB), np.float32), [1, 2], 2)
    frame[field][1] = value
    with pytest.raises(error):
        decode_logprobs(frame.tobytes(), 2, VOCAB, (2,))
