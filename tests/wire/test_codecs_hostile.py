"""Codecs: hostile frames, one by one, each with its own refusal."""

from __future__ import annotations

import numpy as np
import pytest

from pilotfish.base.errors import MalformedError, TokenOutOfRangeError
from pilotfish.wire.codecs import (
    decode_counts,
    decode_ids,
    decode_sparse,
    encode_counts,
    encode_ids,
    encode_sparse,
)
from pilotfish.wire.codecs.bits import BitSlots, write_frame
from pilotfish.wire.codecs.sparse import MAX_TOKENS
from tests.support.bounded import bounded
from tests.support.coded import (
    rows_of,
)

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
    with pytest.raises(MalformedError, match="are expected"):
        decode_sparse(FRAME + surplus, 2, VOCAB)
    with pytest.raises(MalformedError, match="are expected"):
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
    assert len(decode_sparse(encode_sparse(rows_of({1: 0, 2: 75}), VOCAB), 1, VOCAB).ids) == 2
    with pytest.raises(MalformedError, match="levels"):
        decode_sparse(encode_sparse(rows_of({1: 0, 2: 76}), VOCAB), 1, VOCAB)


@pytest.mark.parametrize("first", [0x00, 0x0E, 0x0F, 0x20, 0xC1])
def test_a_first_byte_without_a_meaning_is_refused(first: int) -> None:
    with pytest.raises(MalformedError, match="first byte"):
        decode_sparse(bytes([first]) + FRAME[1:], 2, VOCAB)


@pytest.mark.parametrize("size", [0, VOCAB + 1])
def test_a_row_without_tokens_or_with_too_many_is_refused(size: int) -> None:
    assert FRAME[1] == 3
    with pytest.raises(MalformedError, match="no token, or more"):
        decode_sparse(bytes([FRAME[0] + 8]) + size.to_bytes(2, "little") + FRAME[2:], 2, VOCAB)


def test_a_frame_of_more_tokens_than_any_may_have_is_refused_by_what_it_claims() -> None:
    """Rows of the same size, and rows that each say theirs; not one that has just as many."""
    width, rows = 3 << 3, 4
    most = MAX_TOKENS // rows
    for sizes, alike in (((most + 1,), 1), ((most, most, most, most + 1), 0), ((most,), 1)):
        listed = b"".join(size.to_bytes(3, "little") for size in sizes)
        claimed = rows * sizes[0] if alike else sum(sizes)
        with pytest.raises(MalformedError) as refused:
            decode_sparse(bytes([width | alike << 5]) + listed, rows, 2**20)
        info = f"claims {claimed} tokens; the limit is {MAX_TOKENS}" in str(refused.value)
        assert info == (claimed > MAX_TOKENS)


@pytest.mark.parametrize("filled", [0, 301])
def test_counts_of_no_token_or_of_too_many_are_refused(filled: int) -> None:
    with pytest.raises(MalformedError, match="it must have 1 to 300"):
        decode_counts(COUNTS_FRAME[:1] + filled.to_bytes(3, "little") + COUNTS_FRAME[4:], 300, 8)


@pytest.mark.parametrize("bits", [7, 9, 24])
def test_counts_with_another_sum_are_refused(bits: int) -> None:
    with pytest.raises(MalformedError, match="sum"):
        decode_counts(COUNTS_FRAME, 300, bits)


def test_a_count_of_too_many_bits_is_refused() -> None:
    values = np.array([1])
    frame = write_frame(bytes([0, 1, 0, 0]), np.array([1, 26]), values, BitSlots(values * 25))
    with pytest.raises(MalformedError, match="more than 24 bits"):
        decode_counts(frame, 1, 24)


def test_ids_far_beyond_the_vocabulary_are_refused() -> None:
    # K = 2 of 2²⁴ − 1 tokens at the steepest tilt: b is 22 − 4 and 22 + 3
    widths = np.array([18, 25])
    head = bytes([1 << 3 | 1 << 5 | 3 << 6, 2])
    for quotient, what in ((64, "beyond the vocabulary"), (2**21, "bytes, too many for 4 numbers")):
        lengths = np.array([quotient + 1, 1, 1, 1])
        frame = write_frame(head, lengths, np.zeros(2, np.int64), BitSlots(widths))
        with pytest.raises(MalformedError, match=what):
            decode_sparse(frame, 1, 2**24 - 1)
    good = write_frame(head, np.ones(4, np.int64), np.zeros(2, np.int64), BitSlots(widths))
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
    with bounded(200_000, cpu_s=0.5):
        with pytest.raises(MalformedError):
            decode_sparse(sparse, count, vocab)
        with pytest.raises(MalformedError):
            decode_counts(counts, vocab, 16)


@pytest.mark.parametrize("octet", [0x00, 0x01, 0x55, 0xFF])
def test_a_frame_of_rubbish_costs_little_however_long(octet: int) -> None:
    """Memory and time are bounded by what a frame may hold, not by what a message may."""
    rubbish = bytes([octet]) * 2**25
    for rows, size in ((64, 2**12), (64, 2**16 - 1), (1, 1)):
        head = bytes([2 | 2 << 3 | 1 << 5]) + size.to_bytes(2, "little")
        with bounded(2**27), pytest.raises(MalformedError):
            decode_sparse(head + rubbish, rows, 2**16)
