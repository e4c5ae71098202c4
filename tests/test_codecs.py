"""What a codec is given comes out again, in few bytes; what is not a frame is refused."""

from __future__ import annotations

import json
import time
import tracemalloc
from math import lgamma, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculation.truncation import MAX_LEVEL, SparseRows
from wire.codecs import (
    decode_counts,
    decode_ids,
    decode_sparse,
    encode_counts,
    encode_ids,
    encode_sparse,
)
from wire.codecs.bits import Slots, write
from wire.errors import MalformedError, TokenOutOfRangeError

VECTORS = json.loads((Path(__file__).parent / "data" / "wire_vectors.json").read_text())
VOCABS = st.one_of(st.integers(1, 40), st.integers(1, 200_000), st.sampled_from([65_536, 65_537]))


def rows_of(*rows: dict[int, int]) -> SparseRows:
    """Rows from {id: level}."""
    return SparseRows(
        np.array([token for row in rows for token in row], np.uint32),
        np.array([level for row in rows for level in row.values()], np.uint8),
        np.cumsum([len(row) for row in rows], dtype=np.int64),
    )


def random_rows(seed: int, vocab: int, sizes: list[int], skew: float = 0.0) -> SparseRows:
    """Rows of these sizes; with a skew, low ids are likelier, as in a tokenizer's vocabulary."""
    rng = np.random.default_rng(seed)
    # Gumbel keys of weights (id + 300)^-skew draw without replacement
    popularity = -skew * np.log(np.arange(vocab) + 300.0)
    ids = [
        np.sort(np.argsort(popularity + rng.gumbel(size=vocab))[vocab - size :]) for size in sizes
    ]
    levels = [
        np.minimum(20.0 - np.minimum(20.0, rng.exponential(4.5, size)), MAX_LEVEL) for size in sizes
    ]
    for row in levels:
        row[rng.integers(len(row))] = 0.0
    return SparseRows(
        np.concatenate(ids).astype(np.uint32),
        np.rint(np.concatenate(levels)).astype(np.uint8),
        np.cumsum(sizes, dtype=np.int64),
    )


def same_rows(one: SparseRows, other: SparseRows) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("ids", "levels", "ends")
    )


def check_rows(rows: SparseRows, count: int, vocab: int) -> None:
    """Everything that holds for any `SparseRows`."""
    assert (rows.ids.dtype, rows.levels.dtype, rows.ends.dtype) == (np.uint32, np.uint8, np.int64)
    assert len(rows.ends) == count
    assert len(rows.ids) == len(rows.levels) == (rows.ends[-1] if count else 0)
    begin = 0
    for end in rows.ends.tolist():
        assert end > begin
        ids, levels = rows.ids[begin:end].astype(np.int64), rows.levels[begin:end]
        assert np.all(np.diff(ids) > 0)
        assert ids[-1] < vocab
        assert levels.min() == 0
        assert levels.max() <= MAX_LEVEL
        begin = end


def systematic(shares: np.ndarray, bits: int, u: float) -> np.ndarray:
    """Shares [V] as integers that sum to 2^bits, with one uniform for all of them."""
    running = np.cumsum(shares)
    running /= running[-1]
    steps = np.floor(np.concatenate([[0.0], running]) * 2**bits + u)
    return np.diff(steps).astype(np.int64)


@st.composite
def sparse_rows(draw: st.DrawFn) -> tuple[SparseRows, int]:
    vocab = draw(VOCABS)
    limit = min(vocab, 90)
    sizes = draw(
        st.one_of(
            st.lists(st.integers(1, limit), max_size=6),
            st.tuples(st.integers(1, limit), st.integers(1, 9)).map(lambda t: [t[0]] * t[1]),
            st.lists(st.sampled_from([1, limit, min(vocab, 700)]), max_size=4),
        )
    )
    if not sizes:
        return rows_of(), vocab
    rows = random_rows(draw(st.integers(0, 2**32)), vocab, sizes, draw(st.sampled_from([0.0, 1.2])))
    worst = draw(st.sampled_from([0, 20, MAX_LEVEL]))
    levels = np.where(rows.levels == 20, worst, np.minimum(rows.levels, worst)).astype(np.uint8)
    return SparseRows(rows.ids, levels, rows.ends), vocab


@st.composite
def whole_counts(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    vocab = draw(VOCABS)
    bits = draw(st.integers(8, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.0, 1.0, 3.0, 30.0]))
    weights = np.exp(-spread * rng.exponential(size=vocab))
    return systematic(weights, bits, rng.random()), bits


def damaged(frame: bytes, seed: int) -> bytes:
    """The frame with a few of its bits turned, bytes lost, or bytes more."""
    rng = np.random.default_rng(seed)
    out = bytearray(frame)
    for _ in range(rng.integers(1, 4)):
        kind = rng.integers(4)
        at = int(rng.integers(len(out) + 1))
        if kind == 0 or not out:
            out[at:at] = rng.bytes(int(rng.integers(1, 4)))
        elif kind == 1:
            del out[at : at + int(rng.integers(1, 4))]
        else:
            out[min(at, len(out) - 1)] ^= 1 << int(rng.integers(8))
    return bytes(out)


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
@settings(max_examples=200)
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
@settings(max_examples=100)
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
@settings(max_examples=300)
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
@settings(max_examples=300)
def test_random_bytes_are_refused_or_valid_rows(frame: bytes, count: int, vocab: int) -> None:
    try:
        decoded = decode_sparse(frame, count, vocab)
    except MalformedError:
        return
    check_rows(decoded, count, vocab)


@given(whole_counts(), st.integers(0, 2**32))
@settings(max_examples=200)
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
@settings(max_examples=200)
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


# Hostile frames, one by one

VOCAB = 1000
ROWS = rows_of({3: 2, 500: 0, 998: 7}, {0: 0, 1: 9, 999: 5})
FRAME = encode_sparse(ROWS, VOCAB)
COUNTS = (
    np.bincount([5, 5, 5, 40, 40, 41, 299], minlength=300) * 32 + np.eye(1, 300, 7, int)[0] * 32
)
COUNTS_FRAME = encode_counts(COUNTS, 8)


@pytest.mark.parametrize("length", range(len(FRAME)))
def test_a_truncated_sparse_frame_is_refused(length: int) -> None:
    with pytest.raises(MalformedError):
        decode_sparse(FRAME[:length], 2, VOCAB)


@pytest.mark.parametrize("length", range(len(COUNTS_FRAME)))
def test_a_truncated_frame_of_counts_is_refused(length: int) -> None:
    with pytest.raises(MalformedError):
        decode_counts(COUNTS_FRAME[:length], 300, 8)


@pytest.mark.parametrize("surplus", [b"\0", b"\1", bytes(50)])
def test_surplus_bytes_are_refused(surplus: bytes) -> None:
    with pytest.raises(MalformedError, match="are due"):
        decode_sparse(FRAME + surplus, 2, VOCAB)
    with pytest.raises(MalformedError, match="are due"):
        decode_counts(COUNTS_FRAME + surplus, 300, 8)
    with pytest.raises(MalformedError):
        decode_sparse(surplus, 0, VOCAB)


def test_padding_that_is_not_zero_is_refused() -> None:
    for frame, decode in (
        (FRAME, lambda bad: decode_sparse(bad, 2, VOCAB)),
        (COUNTS_FRAME, lambda bad: decode_counts(bad, 300, 8)),
    ):
        assert decode(frame) is not None
        with pytest.raises(MalformedError, match="padding"):
            decode(frame[:-1] + bytes([frame[-1] | 1]))


@pytest.mark.parametrize("count", [0, 1, 3, 2**20])
def test_another_number_of_rows_is_refused(count: int) -> None:
    with pytest.raises(MalformedError):
        decode_sparse(FRAME, count, VOCAB)


def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    for rows in (rows_of({1000: 0}), rows_of({1000: 0}, {2: 0}), rows_of({2: 0}, {7: 1, 1023: 0})):
        with pytest.raises(MalformedError, match="beyond the vocabulary"):
            decode_sparse(encode_sparse(rows, VOCAB), len(rows), VOCAB)
    counts = np.zeros(300, np.int64)
    counts[[7, 299]] = 128
    with pytest.raises(MalformedError, match="no token"):
        decode_counts(encode_counts(counts, 8), 299, 8)


@pytest.mark.parametrize("vocab", [1, 49_152, 65_535, 65_537, 200_000])
@pytest.mark.parametrize("count", [1, 1000])
def test_an_id_beyond_the_vocabulary_is_refused(vocab: int, count: int) -> None:
    ids = np.zeros(count, np.int64)
    ids[-1] = vocab - 1
    assert decode_ids(encode_ids(ids, vocab), vocab).tolist() == ids.tolist()
    ids[-1] = vocab
    with pytest.raises(TokenOutOfRangeError, match=f"id {vocab} "):
        decode_ids(encode_ids(ids, vocab), vocab)


@pytest.mark.parametrize(("vocab", "length"), [(100, 1), (65_536, 3), (65_537, 4), (200_000, 2)])
def test_a_broken_length_of_ids_is_refused(vocab: int, length: int) -> None:
    with pytest.raises(MalformedError, match="multiple"):
        decode_ids(bytes(length), vocab)


def test_a_level_beyond_the_last_is_refused() -> None:
    assert len(decode_sparse(encode_sparse(rows_of({1: 0, 2: 62}), VOCAB), 1, VOCAB).ids) == 2
    with pytest.raises(MalformedError, match="levels"):
        decode_sparse(encode_sparse(rows_of({1: 0, 2: 63}), VOCAB), 1, VOCAB)


@pytest.mark.parametrize("first", [0x00, 0x0E, 0x0F, 0x20, 0xC1])
def test_a_first_byte_without_a_meaning_is_refused(first: int) -> None:
    with pytest.raises(MalformedError, match="first byte"):
        decode_sparse(bytes([first]) + FRAME[1:], 2, VOCAB)


@pytest.mark.parametrize("size", [0, VOCAB + 1])
def test_a_row_without_tokens_or_with_too_many_is_refused(size: int) -> None:
    assert FRAME[1] == 3
    with pytest.raises(MalformedError, match="no token, or more"):
        decode_sparse(bytes([FRAME[0] + 8]) + size.to_bytes(2, "little") + FRAME[2:], 2, VOCAB)


@pytest.mark.parametrize("filled", [0, 301])
def test_counts_of_no_token_or_of_too_many_are_refused(filled: int) -> None:
    with pytest.raises(MalformedError, match="cannot have counts"):
        decode_counts(COUNTS_FRAME[:1] + filled.to_bytes(3, "little") + COUNTS_FRAME[4:], 300, 8)


@pytest.mark.parametrize("bits", [7, 9, 24])
def test_counts_with_another_sum_are_refused(bits: int) -> None:
    with pytest.raises(MalformedError, match="sum"):
        decode_counts(COUNTS_FRAME, 300, bits)


def test_a_count_of_too_many_bits_is_refused() -> None:
    one = np.array([1])
    frame = write(bytes([0, 1, 0, 0]), np.array([1, 26]), one, Slots(one * 25))
    with pytest.raises(MalformedError, match="more than 24 bits"):
        decode_counts(frame, 1, 24)


def test_ids_far_beyond_the_vocabulary_are_refused() -> None:
    # K = 2 of 2²⁴ − 1 tokens at the steepest tilt: b is 22 − 4 and 22 + 3
    widths = np.array([18, 25])
    head = bytes([1 << 3 | 1 << 5 | 3 << 6, 2])
    for quotient, what in ((64, "beyond the vocabulary"), (2**21, "bytes for 4 numbers")):
        lengths = np.array([quotient + 1, 1, 1, 1])
        frame = write(head, lengths, np.zeros(2, np.int64), Slots(widths))
        with pytest.raises(MalformedError, match=what):
            decode_sparse(frame, 1, 2**24 - 1)
    good = write(head, np.ones(4, np.int64), np.zeros(2, np.int64), Slots(widths))
    assert decode_sparse(good, 1, 2**24 - 1).ids.tolist() == [0, 1]


@pytest.mark.parametrize("first", [4, 255])
def test_counts_of_an_unknown_tilt_are_refused(first: int) -> None:
    with pytest.raises(MalformedError, match="first byte"):
        decode_counts(bytes([first]) + COUNTS_FRAME[1:], 300, 8)


@pytest.mark.parametrize("count", [1, 8, 128])
def test_a_bomb_costs_neither_time_nor_memory(count: int) -> None:
    vocab = 2**24 - 1
    sparse = bytes([3 << 3 | 1 << 5]) + b"\xff" * 60
    counts = b"\0" + b"\xff" * 60
    tracemalloc.start()
    begun = time.perf_counter()
    with pytest.raises(MalformedError):
        decode_sparse(sparse, count, vocab)
    with pytest.raises(MalformedError):
        decode_counts(counts, vocab, 16)
    spent = time.perf_counter() - begun
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000
    assert spent < 0.5


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


# The specification, word for word and token by token

TILTS = (
    (0, 0, 0, 0, 0, 0, 0, 0),
    (-2, -2, -1, -1, -1, 0, 0, 1),
    (-4, -4, -3, -2, -2, -1, 0, 2),
    (-6, -6, -5, -4, -3, -2, 0, 3),
)


class Bits:
    """The bits behind a head."""

    def __init__(self, body: bytes) -> None:
        self.bits = "".join(f"{byte:08b}" for byte in body)

    def unary(self) -> int:
        zeros, self.bits = self.bits.split("1", 1)
        return len(zeros)

    def fixed(self, width: int) -> int:
        taken, self.bits = self.bits[:width], self.bits[width:]
        return int(taken or "0", 2)


def rice_widths(size: int, vocab: int, tilt: int) -> list[int]:
    density = (vocab // size).bit_length() - 1
    group = [max(j for j in range(8) if size * j // 8 <= i) for i in range(size)]
    return [max(0, density + TILTS[tilt][j]) for j in group]


def read_sparse(frame: bytes, count: int, vocab: int) -> list[list[list[int]]]:
    first = frame[0] if count else 0
    c, width, alike, tilt = first % 8, first // 8 % 4, first // 32 % 2, first // 64
    head = 1 + width * (1 if alike else count)
    sizes = [int.from_bytes(frame[at : at + width], "little") for at in range(1, head, width or 1)]
    sizes = sizes * count if alike else sizes
    bits = Bits(frame[head:])
    quotients = [[bits.unary() for _ in range(size)] for size in sizes]
    high = [[bits.unary() for _ in range(size)] for size in sizes]
    rows = []
    for size, row_quotients, row_high in zip(sizes, quotients, high, strict=True):
        last, ids, heights = -1, [], []
        for b, q, h in zip(rice_widths(size, vocab, tilt), row_quotients, row_high, strict=True):
            last += (q << b) + bits.fixed(b) + 1
            ids.append(last)
            heights.append((h << c) + bits.fixed(c))
        rows.append([[token, max(heights) - h] for token, h in zip(ids, heights, strict=True)])
    assert len(bits.bits) < 8
    assert "1" not in bits.bits
    return rows


def read_counts(frame: bytes, vocab: int) -> list[list[int]]:
    filled = int.from_bytes(frame[1:4], "little")
    bits = Bits(frame[4:])
    quotients = [bits.unary() for _ in range(filled)]
    exponents = [bits.unary() for _ in range(filled)]
    last, counts = -1, []
    for b, q, e in zip(rice_widths(filled, vocab, frame[0]), quotients, exponents, strict=True):
        last += (q << b) + bits.fixed(b) + 1
        counts.append([last, (1 << e) + bits.fixed(e)])
    assert len(bits.bits) < 8
    assert "1" not in bits.bits
    return counts


@given(sparse_rows())
@settings(max_examples=50)
def test_frames_of_rows_are_what_the_specification_says(case: tuple[SparseRows, int]) -> None:
    rows, vocab = case
    split = [
        np.split(part, rows.ends[:-1]) if len(rows) else [] for part in (rows.ids, rows.levels)
    ]
    literal = [np.transpose(pair).tolist() for pair in zip(*split, strict=True)]
    assert read_sparse(encode_sparse(rows, vocab), len(rows), vocab) == literal


@given(whole_counts())
@settings(max_examples=30)
def test_frames_of_counts_are_what_the_specification_says(case: tuple[np.ndarray, int]) -> None:
    counts, bits = case
    if np.count_nonzero(counts) > 2000:
        return
    literal = [[token, int(counts[token])] for token in counts.nonzero()[0].tolist()]
    assert read_counts(encode_counts(counts, bits), len(counts)) == literal


# Vectors: the same frames in any language


@pytest.mark.parametrize("vector", VECTORS["ids"])
def test_ids_vector(vector: dict[str, Any]) -> None:
    ids, vocab, frame = vector["ids"], vector["vocab"], bytes.fromhex(vector["frame"])
    assert bytes(encode_ids(np.array(ids, np.int64), vocab)) == frame
    assert decode_ids(frame, vocab).tolist() == ids


@pytest.mark.parametrize("vector", VECTORS["sparse"])
def test_sparse_vector(vector: dict[str, Any]) -> None:
    rows = rows_of(*(dict(row) for row in vector["rows"]))
    vocab, frame = vector["vocab"], bytes.fromhex(vector["frame"])
    assert encode_sparse(rows, vocab) == frame
    assert read_sparse(frame, len(rows), vocab) == vector["rows"]
    assert same_rows(decode_sparse(frame, len(rows), vocab), rows)


@pytest.mark.parametrize("vector", VECTORS["counts"])
def test_counts_vector(vector: dict[str, Any]) -> None:
    counts = np.zeros(vector["vocab"], np.int64)
    for token, count in vector["counts"]:
        counts[token] = count
    frame = bytes.fromhex(vector["frame"])
    assert encode_counts(counts, vector["bits"]) == frame
    assert read_counts(frame, vector["vocab"]) == vector["counts"]
    assert np.array_equal(decode_counts(frame, vector["vocab"], vector["bits"]), counts)


@pytest.mark.parametrize("octet", [0x00, 0x01, 0x55, 0xFF])
def test_a_frame_of_rubbish_costs_little_however_long(octet: int) -> None:
    """Memory and time are bounded by what a frame may hold, not by what a message may."""
    rubbish = bytes([octet]) * 2**25
    for rows, size in ((64, 2**12), (64, 2**16 - 1), (1, 1)):
        head = bytes([2 | 2 << 3 | 1 << 5]) + size.to_bytes(2, "little")
        tracemalloc.start()
        with pytest.raises(MalformedError):
            decode_sparse(head + rubbish, rows, 2**16)
        assert tracemalloc.get_traced_memory()[1] < 2**27
        tracemalloc.stop()
