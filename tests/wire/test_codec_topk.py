"""Top-K rows as frames: ids as they were, values within the stated error."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from pilotfish.base.errors import MalformedError
from pilotfish.speculation.ensemble import TopRows, rebuild, top_rows
from pilotfish.wire.codecs import TOPK_FORMATS, decode_topk, encode_topk
from pilotfish.wire.codecs.topk import MAX_ERROR
from tests.support.examples import examples
from tests.support.topk_rows import FORMS, check, message_of, rows
from tests.wire.test_codecs_specification import Bits, rice_widths

ROUNDING = 2e-7  # of ρ and of values, to float32
VECTORS = json.loads((Path(__file__).parents[1] / "data" / "wire_vectors.json").read_text())

pytestmark = pytest.mark.filterwarnings("error")


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
