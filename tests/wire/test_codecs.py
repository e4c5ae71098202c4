"""Codecs: what comes out is what went in, damage is refused or harmless, and frames stay small."""

from __future__ import annotations

from math import lgamma, log
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import MalformedError, TokenOutOfRangeError
from pilotfish.speculation.truncation import SparseRows
from pilotfish.wire.codecs import (
    decode_counts,
    decode_ids,
    decode_sparse,
    encode_counts,
    encode_ids,
    encode_sparse,
)
from tests.support.coded import (
    VOCABS,
    check_rows,
    damaged,
    random_rows,
    rows_of,
    same_rows,
    sparse_rows,
    systematic,
    whole_counts,
)
from tests.support.examples import examples

# Round trips


@given(VOCABS, st.integers(0, 300), st.integers(0, 2**32))
def test_ids_come_out_as_they_went_in(vocab: int, count: int, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, vocab, count)
    frame = encode_ids(ids, vocab)
    assert len(frame) == count * (2 if vocab <= 65_536 else 3)
    for given_frame in (frame, memoryview(bytes(frame))):
        decoded = decode_ids(given_frame, vocab)
        assert decoded.dtype == np.uint32
        assert decoded.tolist() == ids.tolist()


@given(sparse_rows())
@examples(200)
def test_sparse_rows_come_out_as_they_went_in(case: tuple[SparseRows, int]) -> None:
    rows, vocab = case
    frame = encode_sparse(rows, vocab)
    for given_frame in (frame, memoryview(frame)):
        decoded = decode_sparse(given_frame, len(rows), vocab)
        check_rows(decoded, len(rows), vocab)
        assert same_rows(decoded, rows)


@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 300, 49_152])
def test_a_row_may_be_the_whole_vocabulary_or_one_token(vocab: int) -> None:
    for sizes in ([1], [vocab], [1, vocab], [vocab, 1, vocab]):
        rows = random_rows(vocab, vocab, sizes)
        frame = encode_sparse(rows, vocab)
        assert same_rows(decode_sparse(frame, len(sizes), vocab), rows)
        assert len(frame) <= 32 + len(rows.ids) * 8 / 8 + 4 * len(sizes)


def test_no_rows_are_an_empty_frame() -> None:
    assert encode_sparse(rows_of(), 100) == b""
    assert len(decode_sparse(b"", 0, 100)) == 0


@given(whole_counts())
@examples(100)
def test_counts_come_out_as_they_went_in(case: tuple[np.ndarray, int]) -> None:
    counts, bits = case
    frame = encode_counts(counts, bits)
    decoded = decode_counts(memoryview(frame), len(counts), bits)
    assert decoded.dtype == np.int64
    assert np.array_equal(decoded, counts)


@pytest.mark.parametrize("bits", [8, 16, 24])
@pytest.mark.parametrize("vocab", [1, 2, 300, 200_000])
def test_all_the_mass_may_be_on_one_token(vocab: int, bits: int) -> None:
    for token in {0, vocab // 2, vocab - 1}:
        counts = np.zeros(vocab, np.int64)
        counts[token] = 1 << bits
        frame = encode_counts(counts, bits)
        assert len(frame) <= 18
        assert np.array_equal(decode_counts(frame, vocab, bits), counts)


# Damage: refused, or a valid value


@given(sparse_rows(), st.integers(0, 2**32))
@examples(300)
def test_a_damaged_sparse_frame_is_refused_or_valid(case: Any, seed: int) -> None:
    rows, vocab = case
    frame = damaged(encode_sparse(rows, vocab), seed)
    try:
        decoded = decode_sparse(frame, len(rows), vocab)
    except MalformedError:
        return
    check_rows(decoded, len(rows), vocab)
    again = decode_sparse(encode_sparse(decoded, vocab), len(rows), vocab)
    assert same_rows(again, decoded)


@given(st.binary(max_size=60), st.integers(0, 12), VOCABS)
@examples(300)
def test_random_bytes_are_refused_or_valid_rows(frame: bytes, count: int, vocab: int) -> None:
    try:
        decoded = decode_sparse(frame, count, vocab)
    except MalformedError:
        return
    check_rows(decoded, count, vocab)


@given(whole_counts(), st.integers(0, 2**32))
@examples(200)
def test_a_damaged_frame_of_counts_is_refused_or_valid(case: Any, seed: int) -> None:
    counts, bits = case
    frame = damaged(encode_counts(counts, bits), seed)
    try:
        decoded = decode_counts(frame, len(counts), bits)
    except MalformedError:
        return
    assert decoded.shape == counts.shape
    assert decoded.min() >= 0
    assert decoded.sum() == 1 << bits


@given(st.binary(max_size=60), VOCABS, st.integers(8, 24))
@examples(200)
def test_random_bytes_are_refused_or_valid_counts(frame: bytes, vocab: int, bits: int) -> None:
    try:
        decoded = decode_counts(frame, vocab, bits)
    except MalformedError:
        return
    assert decoded.shape == (vocab,)
    assert decoded.min() >= 0
    assert decoded.sum() == 1 << bits


@given(st.binary(max_size=40), VOCABS)
def test_random_bytes_are_refused_or_ids_of_the_vocabulary(frame: bytes, vocab: int) -> None:
    try:
        decoded = decode_ids(frame, vocab)
    except (MalformedError, TokenOutOfRangeError):
        return
    assert all(token < vocab for token in decoded.tolist())


# Sizes


@pytest.mark.parametrize(
    ("skew", "size", "bits"), [(1.2, 8, 17.0), (1.2, 64, 13.2), (1.2, 1024, 9.2), (0.0, 64, 15.1)]
)
def test_a_window_of_drafts_stays_small(skew: float, size: int, bits: float) -> None:
    vocab = 49_152
    frames = [encode_sparse(random_rows(seed, vocab, [size] * 8, skew), vocab) for seed in range(8)]
    assert sum(map(len, frames)) * 8 / (8 * 8 * size) <= bits


def test_a_row_unlike_the_others_stays_small() -> None:
    vocab = 49_152
    low, high = np.arange(1000), np.arange(vocab - 64, vocab)
    rows = SparseRows(
        np.concatenate([low, high]).astype(np.uint32),
        np.zeros(1064, np.uint8),
        np.array([1000, 1064]),
    )
    frame = encode_sparse(rows, vocab)
    assert same_rows(decode_sparse(frame, 2, vocab), rows)
    assert len(frame) * 8 / 1064 <= 11


def test_uniform_ids_cost_little_more_than_they_must() -> None:
    vocab, size = 49_152, 200
    rows = random_rows(1, vocab, [size] * 4)
    flat = SparseRows(rows.ids, np.zeros_like(rows.levels), rows.ends)
    frame = encode_sparse(flat, vocab)
    fewest = (lgamma(vocab + 1) - lgamma(size + 1) - lgamma(vocab - size + 1)) / log(2.0) / size
    # a bit for the level 0
    assert len(frame) * 8 / (4 * size) <= fewest + 1.0 + 0.2


@pytest.mark.parametrize(("bits", "limit"), [(8, 95), (16, 1120), (24, 11_100)])
def test_a_whole_distribution_stays_small(bits: int, limit: int) -> None:
    ranks = np.random.default_rng(0).permutation(49_152)
    counts = systematic((ranks + 3.0) ** -2.0, bits, 0.5)
    assert len(encode_counts(counts, bits)) <= limit
