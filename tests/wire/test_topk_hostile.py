"""Frames of the codec `topk` that lie: each is refused, and costs neither time nor memory."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import MalformedError
from pilotfish.speculation.ensemble import TopRows
from pilotfish.wire.codecs import TOPK_FORMATS, decode_topk, encode_topk
from pilotfish.wire.codecs.bits import BitSlots, write_frame
from tests.support.bounded import bounded
from tests.support.coded import VOCABS, damaged
from tests.support.examples import examples
from tests.support.topk_rows import FORMS, check, message_of, rows

pytestmark = pytest.mark.filterwarnings("error")

VOCAB, KEPT, COUNT = 1000, 6, 3
GOOD = {form: encode_topk(message_of(1, COUNT, KEPT, VOCAB), VOCAB, form) for form in TOPK_FORMATS}
WHOLE = {form: encode_topk(message_of(1, COUNT, 40, 40), 40, form) for form in TOPK_FORMATS}


@pytest.mark.parametrize("form", TOPK_FORMATS)
def test_a_truncated_frame_or_a_longer_one_is_refused(form: str) -> None:
    for frame, selection, vocab in ((GOOD[form], KEPT, VOCAB), (WHOLE[form], 40, 40)):
        check(decode_topk(frame, COUNT, selection, vocab), COUNT, selection, vocab)
        for bad in [frame[:length] for length in range(len(frame))]:
            with pytest.raises(MalformedError):
                decode_topk(bad, COUNT, selection, vocab)
        for surplus in (b"\0", b"\1", bytes(50)):
            with pytest.raises(MalformedError, match="are expected"):
                decode_topk(frame + surplus, COUNT, selection, vocab)


@pytest.mark.parametrize("form", TOPK_FORMATS)
@pytest.mark.parametrize("count", [0, 1, 2, 4, 2**20])
def test_another_number_of_rows_is_refused(form: str, count: int) -> None:
    for frame, selection, vocab in ((GOOD[form], KEPT, VOCAB), (WHOLE[form], 40, 40)):
        with pytest.raises(MalformedError):
            decode_topk(frame, count, selection, vocab)


@pytest.mark.parametrize("form", TOPK_FORMATS)
@pytest.mark.parametrize("remaining", [1, 5, 7, 64, VOCAB, 2 * VOCAB])
def test_another_k_is_refused_and_named(form: str, remaining: int) -> None:
    with pytest.raises(MalformedError, match=rf"sent 6 .* {min(remaining, VOCAB)} are expected"):
        decode_topk(GOOD[form], COUNT, remaining, VOCAB)
    with pytest.raises(MalformedError, match=r"sent 40 .* 6 are expected"):
        decode_topk(WHOLE[form], COUNT, 6, VOCAB)


@pytest.mark.parametrize("form", TOPK_FORMATS)
def test_a_token_of_a_larger_vocabulary_is_refused(form: str) -> None:
    # V/K and so the widths are the same for both vocabularies
    for tokens in ([0, 7, 1000], [1000, 1001, 1002]):
        ids = np.array([[0, 1, 2], tokens], np.uint32)
        frame = encode_topk(TopRows(ids, np.full((2, 3), 0.2, np.float32)), 1003, form)
        assert decode_topk(frame, 2, 3, 1003).ids.tolist() == ids.tolist()
        with pytest.raises(MalformedError, match="beyond the vocabulary"):
            decode_topk(frame, 2, 3, 1000)


@pytest.mark.parametrize("first", [0x03, 0x80, 0x60, 0x62, 0x11, 0x10, 0xFF])
def test_a_first_byte_without_a_meaning_is_refused(first: int) -> None:
    for frame, selection, vocab in ((GOOD["fp16"], KEPT, VOCAB), (WHOLE["fp32"], 40, 40)):
        with pytest.raises(MalformedError, match="first byte"):
            decode_topk(bytes([first]) + frame[1:], COUNT, selection, vocab)
    with pytest.raises(MalformedError, match="first byte"):  # a tilt, and no ids
        decode_topk(bytes([WHOLE["fp32"][0] | 4]) + WHOLE["fp32"][1:], COUNT, 40, 40)


@pytest.mark.parametrize("form", TOPK_FORMATS)
def test_padding_that_is_not_zero_is_refused(form: str) -> None:
    frame = GOOD[form]
    with pytest.raises(MalformedError, match="padding"):
        decode_topk(frame[:-1] + bytes([frame[-1] | 1]), COUNT, KEPT, VOCAB)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -0.001, 0.9, 3e38])
@pytest.mark.parametrize("place", [0, KEPT * COUNT - 1])
def test_values_that_are_no_probabilities_are_refused(bad: float, place: int) -> None:
    lie = struct.pack("<f", bad)
    for frame, selection, vocab in ((GOOD["fp32"], KEPT, VOCAB), (WHOLE["fp32"], 40, 40)):
        at = 4 + 4 * place
        with pytest.raises(MalformedError, match="NaN, a negative"):
            decode_topk(frame[:at] + lie + frame[at + 4 :], COUNT, selection, vocab)


@pytest.mark.parametrize("form", ["fp16", "levels"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -0.5, 0.0, 1.01, 3e38])
@pytest.mark.parametrize("row", [0, COUNT - 1])
def test_masses_that_cannot_be_are_refused(form: str, bad: float, row: int) -> None:
    lie, at = struct.pack("<f", bad), 4 + 4 * row
    for frame, selection, vocab in ((GOOD[form], KEPT, VOCAB), (WHOLE[form], 40, 40)):
        with pytest.raises(MalformedError, match="NaN, a negative"):
            decode_topk(frame[:at] + lie + frame[at + 4 :], COUNT, selection, vocab)


@pytest.mark.parametrize("form", TOPK_FORMATS)
def test_a_row_of_all_tokens_sums_to_1(form: str) -> None:
    less = TopRows(np.arange(40, dtype=np.uint32)[None], np.full((1, 40), 0.02, np.float32))
    with pytest.raises(MalformedError, match="NaN, a negative"):
        decode_topk(encode_topk(less, 40, form), 1, 40, 40)
    assert decode_topk(encode_topk(less, 41, form), 1, 40, 41).retained_mass[0] == pytest.approx(
        0.8
    )


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0x8001, 0xBC00])
@pytest.mark.parametrize("place", [0, KEPT * COUNT - 1])
def test_halves_that_are_no_weights_are_refused(bits: int, place: int) -> None:
    for frame, selection, vocab in ((GOOD["fp16"], KEPT, VOCAB), (WHOLE["fp16"], 40, 40)):
        at = 4 + 4 * COUNT + 2 * place
        with pytest.raises(MalformedError, match="NaN, a negative"):
            decode_topk(
                frame[:at] + struct.pack("<H", bits) + frame[at + 2 :], COUNT, selection, vocab
            )


@pytest.mark.parametrize("form", ["fp32", "fp16"])
def test_a_row_without_any_weight_is_refused(form: str) -> None:
    size = 4 if form == "fp32" else 2
    at = 4 + (0 if form == "fp32" else 4 * COUNT) + size * KEPT
    frame = GOOD[form]
    with pytest.raises(MalformedError, match="NaN, a negative"):
        decode_topk(frame[:at] + bytes(size * KEPT) + frame[at + size * KEPT :], COUNT, KEPT, VOCAB)


def test_a_level_beyond_the_last_is_refused() -> None:
    # K = 2 of 4 tokens: b is 1 each; heights in unary alone, c = 0
    head = bytes([2, 2, 0, 0]) + struct.pack("<f", 0.5)
    for height in (75, 76):
        lengths, fixed = np.array([1, 1, height + 1, 1]), np.zeros(2, np.int64)
        frame = write_frame(head, lengths, fixed, BitSlots(np.ones(2, np.int64)))
        if height == 75:
            decoded = decode_topk(frame, 1, 2, 4)
            np.testing.assert_allclose(decoded.values, [[0.5, 0.5 * 2.0**-31]])
            continue
        with pytest.raises(MalformedError, match="levels below"):
            decode_topk(frame, 1, 2, 4)


@given(rows(), FORMS, st.integers(0, 2**32))
@examples(300)
def test_a_damaged_frame_is_refused_or_valid(
    case: tuple[TopRows, int], form: str, seed: int
) -> None:
    given_rows, vocab = case
    count, selection = given_rows.ids.shape
    frame = damaged(encode_topk(given_rows, vocab, form), seed)
    try:
        decoded = decode_topk(frame, count, selection, vocab)
    except MalformedError:
        return
    check(decoded, count, selection, vocab)
    again = decode_topk(encode_topk(decoded, vocab, "fp32"), count, selection, vocab)
    assert again.values.tobytes() == decoded.values.tobytes()


@given(st.binary(max_size=80), st.integers(0, 5), st.integers(1, 12), VOCABS)
@examples(300)
def test_random_bytes_are_refused_or_valid(
    body: bytes, count: int, remaining: int, vocab: int
) -> None:
    true_k = min(remaining, vocab).to_bytes(3, "little")
    for frame in (body, body[:1] + true_k + body[4:]):
        try:
            decoded = decode_topk(frame, count, remaining, vocab)
        except MalformedError:
            continue
        check(decoded, count, remaining, vocab)


@pytest.mark.parametrize("form", range(3))
@pytest.mark.parametrize(("count", "remaining"), [(1, 1), (9, 64), (65, 2**17), (2**20, 2**23)])
def test_a_bomb_costs_neither_time_nor_memory(form: int, count: int, remaining: int) -> None:
    vocab = 2**24 - 1
    for body in (b"\xff" * 200, bytes(200), b"\x00\x3c" * 100):
        frame = bytes([form]) + remaining.to_bytes(3, "little") + body
        with bounded(200_000, cpu_s=0.5), pytest.raises(MalformedError):
            decode_topk(frame, count, remaining, vocab)


@pytest.mark.parametrize("octet", [0x00, 0x01, 0x55, 0xFF])
def test_a_frame_of_rubbish_costs_little_however_long(octet: int) -> None:
    rubbish = bytes([octet]) * 2**25
    for form in range(3):
        frame = bytes([form]) + (64).to_bytes(3, "little") + rubbish
        with bounded(2**20), pytest.raises(MalformedError):
            decode_topk(frame, 9, 64, 49_152)
