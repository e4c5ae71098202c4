"""Top-K rows as frames: ids as they were, values within the stated error; what lies is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import MalformedError
from pilotfish.speculation.ensemble import TopRows, rebuild, top_rows
from pilotfish.wire.codecs import TOPK_FORMATS, decode_topk, encode_topk
from pilotfish.wire.codecs.bits import BitSlots, write_frame
from pilotfish.wire.codecs.topk import MAX_ERROR
from tests.support.bounded import bounded
from tests.support.coded import VOCABS, damaged
from tests.support.examples import examples
from tests.wire.test_codecs_specification import Bits, rice_widths

FORMS = st.sampled_from(TOPK_FORMATS)
ROUNDING = 2e-7  # of ρ and of values, to float32
VECTORS = json.loads((Path(__file__).parents[1] / "data" / "wire_vectors.json").read_text())

pytestmark = pytest.mark.filterwarnings("error")


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


# Round trips


@given(rows(), FORMS)
@examples(300)
def test_rows_come_out_within_the_stated_error(case: tuple[TopRows, int], form: str) -> None:
    given_rows, vocab = case
    count, selection = given_rows.ids.shape
    frame = encode_topk(given_rows, vocab, form)
    for given_frame in (frame, memoryview(frame)):
        decoded = decode_topk(given_frame, count, selection, vocab)
        check(decoded, count, selection, vocab)
        assert np.array_equal(decoded.ids, given_rows.ids)
        if form == "fp32":
            assert decoded.values.tobytes() == given_rows.values.tobytes()
        rho = given_rows.retained_mass
        np.testing.assert_allclose(decoded.retained_mass, rho, rtol=ROUNDING)
        moved = np.abs(decoded.values.astype(float) - given_rows.values).sum(axis=1) / 2
        assert (moved <= (MAX_ERROR[form] + ROUNDING) * rho).all()


@pytest.mark.parametrize(
    ("form", "above", "below"),
    [
        # around the middle between two halves, and between two levels
        ("fp16", 2.0**-8 * (1.0 + 2.0**-11 + 2.0**-20), 2.0**-8 * (1.0 + 2.0**-11 - 2.0**-20)),
        ("levels", 2.0**-12.51, 2.0**-13.49),
    ],
)
def test_the_stated_error_is_no_larger_than_it_must_be(
    form: str, above: float, below: float
) -> None:
    """Half of the mass is rounded up as far as can be, the other half down."""
    count, vocab = 200_000, 300_000
    heavier = round(count * below**0.5 / (above**0.5 + below**0.5))
    weights = np.array([1.0, *[above] * heavier, *[below] * (count - heavier)])
    values = (weights / weights.sum())[None].astype(np.float32)
    given_rows = TopRows(np.arange(count + 1, dtype=np.uint32)[None], values)
    decoded = decode_topk(encode_topk(given_rows, vocab, form), 1, count + 1, vocab)
    moved = np.abs(decoded.values.astype(float) - values).sum() / 2
    assert 0.9 * MAX_ERROR[form] < moved <= MAX_ERROR[form]


def test_halves_keep_eleven_bits_far_down() -> None:
    """The plain half of 10⁻⁷ has one bit, and of 10⁻⁸ none."""
    values = np.array([[0.9, 1e-3, 1e-7, 3e-9]], np.float32)
    given_rows = TopRows(np.array([[1, 2, 3, 4]], np.uint32), values)
    decoded = decode_topk(encode_topk(given_rows, 10, "fp16"), 1, 4, 10)
    np.testing.assert_allclose(decoded.values, values, rtol=2.0**-10)


@pytest.mark.parametrize("form", TOPK_FORMATS)
@pytest.mark.parametrize("vocab", [1, 2, 300])
def test_a_whole_vocabulary_needs_no_ids(form: str, vocab: int) -> None:
    given_rows = message_of(0, 3, vocab, vocab)
    frame = encode_topk(given_rows, vocab, form)
    decoded = decode_topk(frame, 3, vocab + 5, vocab)
    assert np.array_equal(decoded.ids, given_rows.ids)
    if form == "fp32":
        assert len(frame) == 4 + 3 * 4 * vocab
        for scheme in ("renormalise", "spread"):
            assert rebuild(decoded, vocab, scheme).tobytes() == given_rows.values.tobytes()
    if form == "fp16":
        assert len(frame) == 4 + 3 * (4 + 2 * vocab)


@pytest.mark.parametrize("form", TOPK_FORMATS)
def test_no_rows_are_an_empty_frame(form: str) -> None:
    empty = TopRows(np.empty((0, 4), np.uint32), np.empty((0, 4), np.float32))
    assert encode_topk(empty, 100, form) == b""
    check(decode_topk(b"", 0, 4, 100), 0, 4, 100)
    with pytest.raises(MalformedError, match="none are expected"):
        decode_topk(b"\0", 0, 4, 100)


# What cannot be encoded


@pytest.mark.parametrize("form", TOPK_FORMATS)
@pytest.mark.parametrize(
    "values", [[np.nan, 0.1], [np.inf, 0.1], [-0.1, 0.5], [0.0, 0.0], [0.9, 0.2], [-np.inf, np.inf]]
)
def test_what_no_softmax_gives_is_not_encoded(form: str, values: list[float]) -> None:
    bad = TopRows(np.array([[1, 2], [3, 4]], np.uint32), np.array([[0.5, 0.2], values], np.float32))
    with pytest.raises(ValueError, match="A row of probabilities"):
        encode_topk(bad, 10, form)


# Hostile frames

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


# The specification, token by token


def level_depth(level: int) -> float:
    """Return the octaves of a level by the table of docs/wire.md."""
    table = ((0, 0, 1 / 8), (32, 4, 1 / 4), (48, 8, 1 / 2), (56, 12, 1))
    first, octaves, step = max(row for row in table if row[0] <= level)
    return octaves + step * (level - first)


def read_topk(
    frame: bytes, count: int, remaining: int, vocab: int
) -> list[list[tuple[int, float]]]:
    """Rows by docs/wire.md alone."""
    form, tilt, c = frame[0] % 4, frame[0] // 4 % 4, frame[0] // 16
    assert int.from_bytes(frame[1:4], "little") == remaining
    at, total = 4, count * remaining
    masses = [0.0] * count
    if form != 1:
        masses = list(struct.unpack_from(f"<{count}f", frame, at))
        at += 4 * count
    numbers: list[float] = [0.0] * total
    if form < 2:
        kind, size = ("e", 2) if form == 0 else ("f", 4)
        numbers = list(struct.unpack_from(f"<{total}{kind}", frame, at))
        at += size * total
    ids = [list(range(vocab))] * count
    heights = [[0] * remaining for _ in range(count)]
    if remaining < vocab or form == 2:
        bits = Bits(frame[at:])
        quotients = [[bits.unary() for _ in range(remaining)] for _ in range(count)]
        high = [[bits.unary() if form == 2 else 0 for _ in range(remaining)] for _ in range(count)]
        ids = []
        for row in range(count):
            last, result = -1, []
            for i, b in enumerate(rice_widths(remaining, vocab, tilt)):
                last += (quotients[row][i] << b) + bits.fixed(b) + 1
                result.append(last)
                heights[row][i] = (high[row][i] << c) + bits.fixed(c)
            ids.append(result)
        assert len(bits.bits) < 8
        assert "1" not in bits.bits
    else:
        assert len(frame) == at
    rows = []
    for row in range(count):
        weights = numbers[row * remaining : (row + 1) * remaining]
        if form == 2:
            top = max(heights[row])
            weights = [int(2**31 * 2.0 ** -level_depth(top - h) + 0.5) for h in heights[row]]
        factor = 1.0 if form == 1 else masses[row] / sum(weights)
        rows.append([(token, w * factor) for token, w in zip(ids[row], weights, strict=True)])
    return rows


@given(rows(), FORMS)
@examples(60)
def test_frames_are_what_the_specification_says(case: tuple[TopRows, int], form: str) -> None:
    given_rows, vocab = case
    count, selection = given_rows.ids.shape
    frame = encode_topk(given_rows, vocab, form)
    decoded = decode_topk(frame, count, selection, vocab)
    for row, ids, values in zip(
        read_topk(frame, count, selection, vocab), decoded.ids, decoded.values, strict=True
    ):
        assert [token for token, _ in row] == ids.tolist()
        np.testing.assert_allclose([p for _, p in row], values, rtol=1e-6, atol=1e-44)


@pytest.mark.parametrize("vector", VECTORS["topk"])
def test_vectors(vector: dict[str, Any]) -> None:
    ids, vocab, frame = vector["ids"], vector["vocab"], bytes.fromhex(vector["frame"])
    values = np.array(vector["values"], np.float32)
    given_rows = TopRows(np.array(ids, np.uint32), values)
    assert encode_topk(given_rows, vocab, vector["form"]) == frame
    decoded = decode_topk(frame, *values.shape, vocab)
    assert decoded.ids.tolist() == ids
    np.testing.assert_allclose(decoded.values, vector["decoded"], rtol=1e-6)


# Sizes


@pytest.mark.parametrize(
    ("form", "remaining", "bits"),
    [("fp16", 64, 26.7), ("fp32", 64, 42.2), ("levels", 64, 15.0), ("levels", 640, 11.0)],
)
def test_a_window_stays_small(form: str, remaining: int, bits: float) -> None:
    """Tokens as a tokenizer numbers them: the lower the id, the likelier."""
    rng = np.random.default_rng(0)
    z = rng.normal(0.0, 2.5, (9, 49_152)) - 1.2 * np.log(np.arange(49_152) + 300.0)
    frame = encode_topk(top_rows(z.astype(np.float32), 1.0, remaining), 49_152, form)
    assert len(frame) * 8 / (9 * remaining) <= bits
