"""Hidden states as frames: near to what went in, by the stated bound; damage is refused."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pilotfish.base.errors import MalformedError
from pilotfish.wire.codecs.hidden import (
    BLOCK,
    HIDDEN_FORMATS,
    LARGEST,
    decode_hidden,
    encode_hidden,
    hidden_bytes,
)
from tests.support.coded import damaged
from tests.support.examples import examples

FORMS = st.sampled_from(HIDDEN_FORMATS)
LEVELS = {"int8": 127, "int4": 7}
BLOCKWISE = sorted(LEVELS)
LOSSY = [form for form in HIDDEN_FORMATS if form != "fp32"]
FLOAT32_MAX = float(np.finfo(np.float32).max)

pytestmark = pytest.mark.filterwarnings("error")  # an overflow that numpy only warns of


@st.composite
def states(draw: st.DrawFn, largest: float) -> np.ndarray:
    """States f32 [n, d] of any numbers that a format takes: subnormal, huge, of one size or not."""
    shape = (draw(st.integers(0, 4)), draw(st.integers(1, 3 * BLOCK + 3)))
    if draw(st.booleans()):
        numbers = st.floats(-largest, largest, width=32)
        return draw(hnp.arrays(np.float32, shape, elements=numbers))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    top = int(np.frexp(largest)[1]) - 1
    low = draw(st.integers(-149, top))
    powers = rng.integers(low, draw(st.integers(low, top)), shape, endpoint=True)
    drawn = np.ldexp(rng.uniform(-1.0, 1.0, shape), powers).astype(np.float32)
    drawn[rng.random(shape) < draw(st.sampled_from([0.0, 0.1, 0.9]))] = 0.0
    return drawn


def cases() -> st.SearchStrategy[tuple[np.ndarray, str]]:
    return FORMS.flatmap(lambda form: st.tuples(states(LARGEST[form]), st.just(form)))


def bound(given_states: np.ndarray, form: str) -> np.ndarray:
    """The codec's stated error of each number, f64 [n, d]."""
    sizes = np.abs(given_states).astype(np.float64)
    if form == "fp32":
        return np.zeros_like(sizes)
    if form == "fp16":
        return np.maximum(sizes * 2.0**-11, 2.0**-25)
    allowed = np.empty_like(sizes)
    for start in range(0, sizes.shape[1], 32):
        block = np.s_[:, start : start + 32]
        peaks = sizes[block].max(axis=1, keepdims=True)
        allowed[block] = 0.504 * np.maximum(peaks / LEVELS[form], 2.0**-126)
    return allowed


def error(given_states: np.ndarray, form: str) -> np.ndarray:
    """What a round trip moves each number by, f64 [n, d]."""
    decoded = decode_hidden(encode_hidden(given_states, form), *given_states.shape, form)
    return np.abs(decoded.astype(np.float64) - given_states)


def ordinary(count: int, width: int, seed: int = 0) -> np.ndarray:
    """States like a drafter's: Gaussian channels, a few of which are twenty times the others."""
    rng = np.random.default_rng(seed)
    channels = np.where(rng.random(width) < 0.01, 20.0, 1.0)
    return (rng.standard_normal((count, width)) * channels).astype(np.float32)


# Round trips


@given(cases())
@examples(300)
def test_states_come_out_within_the_stated_error(case: tuple[np.ndarray, str]) -> None:
    given_states, form = case
    count, width = given_states.shape
    frame = encode_hidden(given_states, form)
    assert len(frame) == count * hidden_bytes(width, form)
    for given_frame in (frame, memoryview(frame)):
        decoded = decode_hidden(given_frame, count, width, form)
        assert decoded.dtype == np.float32
        assert decoded.shape == (count, width)
        assert np.isfinite(decoded).all()
        assert (
            np.abs(decoded.astype(np.float64) - given_states) <= bound(given_states, form)
        ).all()
        assert not decoded[given_states == 0.0].any()


@given(states(LARGEST["fp32"]))
def test_fp32_is_the_same_bit_for_bit(given_states: np.ndarray) -> None:
    frame = encode_hidden(given_states, "fp32")
    decoded = decode_hidden(frame, *given_states.shape, "fp32")
    assert decoded.tobytes() == given_states.tobytes()
    decoded[...] = 0.0  # it is the reader's own
    assert frame == given_states.tobytes()


def test_a_frames_length_tells_its_format() -> None:
    for width in range(3, 70_000):
        assert len({hidden_bytes(width, form) for form in HIDDEN_FORMATS}) == len(HIDDEN_FORMATS)


@pytest.mark.parametrize("form", LOSSY)
def test_the_stated_error_is_no_larger_than_it_must_be(form: str) -> None:
    given_states = ordinary(200, 576)
    share = error(given_states, form) / bound(given_states, form)
    assert 0.99 < share.max() <= 1.0


@given(cases(), st.integers(0, 2**32))
def test_a_state_decodes_to_the_same_whatever_else_is_in_its_frame(
    case: tuple[np.ndarray, str], seed: int
) -> None:
    given_states, form = case
    count, width = given_states.shape
    wanted = np.flatnonzero(np.random.default_rng(seed).random(count) < 0.5)
    whole = decode_hidden(encode_hidden(given_states, form), count, width, form)
    some = decode_hidden(encode_hidden(given_states[wanted], form), len(wanted), width, form)
    assert some.tobytes() == whole[wanted].tobytes()


@pytest.mark.parametrize("form", HIDDEN_FORMATS)
def test_columns_and_rows_of_a_larger_array_are_states_too(form: str) -> None:
    larger = ordinary(20, 100)
    for part in (larger[::2], larger[:, 3:50], larger[::-1, ::2], larger.T):
        assert encode_hidden(part, form) == encode_hidden(np.ascontiguousarray(part), form)


@pytest.mark.parametrize("form", BLOCKWISE)
@pytest.mark.parametrize("size", [2.0**-149, 2.0**-130, 2.0**-127])
def test_subnormal_numbers_become_zero(form: str, size: float) -> None:
    given_states = np.full((2, 40), size, np.float32)
    assert not decode_hidden(encode_hidden(given_states, form), 2, 40, form).any()


@pytest.mark.parametrize("form", BLOCKWISE)
def test_a_block_does_not_suffer_from_the_next(form: str) -> None:
    given_states = ordinary(5, 3 * BLOCK)
    alone = decode_hidden(encode_hidden(given_states, form), 5, 3 * BLOCK, form)
    given_states[:, BLOCK : 2 * BLOCK] *= 2.0**100
    hidden = decode_hidden(encode_hidden(given_states, form), 5, 3 * BLOCK, form)
    for block in (np.s_[:, :BLOCK], np.s_[:, 2 * BLOCK :]):
        assert np.array_equal(hidden[block], alone[block])


# What cannot be encoded


@pytest.mark.parametrize("form", HIDDEN_FORMATS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_magnitude_is_encoded_and_a_larger_one_is_refused(
    form: str, sign: float
) -> None:
    given_states = np.zeros((3, 45), np.float32)
    given_states[1, 44] = sign * LARGEST[form]
    assert (error(given_states, form) <= bound(given_states, form)).all()
    with np.errstate(over="ignore"):  # beyond fp32's range lies infinity alone
        above = float(np.nextafter(np.float32(LARGEST[form]), np.float32(np.inf)))
    for beyond in {above, FLOAT32_MAX} - {LARGEST[form]}:
        given_states[1, 44] = sign * beyond
        with pytest.raises(ValueError, match=f"beyond .* {form} cannot hold"):
            encode_hidden(given_states, form)


@pytest.mark.parametrize("form", HIDDEN_FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (1, 31), (2, 44)])
def test_what_is_not_finite_is_not_encoded(form: str, bad: float, place: tuple[int, int]) -> None:
    given_states = ordinary(3, 45)
    given_states[place] = bad
    with pytest.raises(ValueError, match="not finite"):
        encode_hidden(given_states, form)


# Hostile frames

WIDTH = 37
GOOD = {form: encode_hidden(ordinary(2, WIDTH), form) for form in HIDDEN_FORMATS}


def with_step(form: str, bits: int, frame: bytes | None = None) -> bytes:
    """A good frame whose third block has this step."""
    good = GOOD[form] if frame is None else frame
    return good[:4] + struct.pack("<H", bits) + good[6:]


@pytest.mark.parametrize("form", HIDDEN_FORMATS)
def test_any_other_length_is_refused(form: str) -> None:
    frame = GOOD[form]
    assert decode_hidden(frame, 2, WIDTH, form).shape == (2, WIDTH)
    for bad in [frame[:length] for length in range(len(frame))] + [frame + b"\0", frame * 2]:
        with pytest.raises(MalformedError, match="are expected"):
            decode_hidden(bad, 2, WIDTH, form)
    with pytest.raises(MalformedError, match="are expected"):
        decode_hidden(b"\0", 0, WIDTH, form)


@pytest.mark.parametrize("form", HIDDEN_FORMATS)
@pytest.mark.parametrize(("count", "width"), [(0, 37), (1, 37), (3, 37), (2, 36), (2, 39), (4, 18)])
def test_another_number_of_states_or_width_is_refused(form: str, count: int, width: int) -> None:
    with pytest.raises(MalformedError, match="are expected"):
        decode_hidden(GOOD[form], count, width, form)


def test_another_format_is_refused() -> None:
    for form in HIDDEN_FORMATS:
        for other in set(HIDDEN_FORMATS) - {form}:
            with pytest.raises(MalformedError, match="are expected"):
                decode_hidden(GOOD[form], 2, WIDTH, other)


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF])
@pytest.mark.parametrize("place", [0, WIDTH, 2 * WIDTH - 1])
def test_halves_that_are_not_finite_are_refused(bits: int, place: int) -> None:
    good = GOOD["fp16"]
    bad = good[: 2 * place] + struct.pack("<H", bits) + good[2 * place + 2 :]
    with pytest.raises(MalformedError, match="not finite"):
        decode_hidden(bad, 2, WIDTH, "fp16")


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF])
@pytest.mark.parametrize("place", [0, WIDTH, 2 * WIDTH - 1])
def test_singles_that_are_not_finite_are_refused(bits: int, place: int) -> None:
    good = GOOD["fp32"]
    bad = good[: 4 * place] + struct.pack("<I", bits) + good[4 * place + 4 :]
    with pytest.raises(MalformedError, match="not finite"):
        decode_hidden(bad, 2, WIDTH, "fp32")


@pytest.mark.parametrize("form", BLOCKWISE)
@pytest.mark.parametrize("bits", [0x7F80, 0x7FC0, 0x7F81, 0xFF80, 0xFFC0, 0x7F7F, 0xBF80, 0x8000])
def test_steps_that_are_not_finite_or_negative_or_huge_are_refused(form: str, bits: int) -> None:
    with pytest.raises(MalformedError, match="step"):
        decode_hidden(with_step(form, bits), 2, WIDTH, form)


@pytest.mark.parametrize(("form", "exponent"), [("int8", 121), ("int4", 125)])
def test_the_greatest_step_overflows_with_no_number(form: str, exponent: int) -> None:
    refused = struct.unpack("<I", struct.pack("<f", 2.0**exponent))[0] >> 16
    # q of −128, or of −8 twice in a byte; the last byte's upper half is padding
    low = {"int8": b"\x80" * WIDTH, "int4": b"\x88" * (WIDTH // 2) + b"\x08"}[form] * 2
    lowest = GOOD[form][:8] + low
    decoded = decode_hidden(with_step(form, refused - 1, lowest), 2, WIDTH, form)
    assert np.isfinite(decoded).all()
    assert np.abs(decoded).max() > FLOAT32_MAX * 0.99
    with pytest.raises(MalformedError, match="step"):
        decode_hidden(with_step(form, refused, lowest), 2, WIDTH, form)


@pytest.mark.parametrize("state", [0, 1])
def test_padding_that_is_not_zero_is_refused(state: int) -> None:
    frame = bytearray(GOOD["int4"])
    frame[8 + 19 * state + 18] |= 0x10
    with pytest.raises(MalformedError, match="padding"):
        decode_hidden(bytes(frame), 2, WIDTH, "int4")


@given(cases(), st.integers(0, 2**32))
@examples(300)
def test_a_damaged_frame_is_refused_or_finite(case: tuple[np.ndarray, str], seed: int) -> None:
    given_states, form = case
    frame = damaged(encode_hidden(given_states, form), seed)
    try:
        decoded = decode_hidden(frame, *given_states.shape, form)
    except MalformedError:
        return
    assert decoded.shape == given_states.shape
    assert np.isfinite(decoded).all()


@given(st.data(), FORMS, st.integers(0, 3), st.integers(1, 40))
@examples(300)
def test_random_bytes_are_refused_or_finite(
    data: st.DataObject, form: str, count: int, width: int
) -> None:
    length = count * hidden_bytes(width, form)
    frame = data.draw(st.binary(min_size=length, max_size=length))
    try:
        decoded = decode_hidden(frame, count, width, form)
    except MalformedError:
        return
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("form", HIDDEN_FORMATS)
def test_a_short_frame_takes_no_memory(form: str) -> None:
    tracemalloc.start()
    for count, width in ((2**20, 2**20), (2**62, 1), (1, 2**62)):
        with pytest.raises(MalformedError, match="are expected"):
            decode_hidden(bytes(2**10), count, width, form)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000


@pytest.mark.parametrize("form", HIDDEN_FORMATS)
def test_decoding_takes_its_result_and_less_than_that_again(form: str) -> None:
    count, width = 128, 2049
    frame = encode_hidden(ordinary(count, width), form)
    tracemalloc.start()
    decoded = decode_hidden(frame, count, width, form)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * decoded.nbytes


# The specification, number by number


def read_hidden(frame: bytes, count: int, width: int, form: str) -> list[list[float]]:
    """States by docs/wire.md alone."""
    if form in {"fp16", "fp32"}:
        numbers = struct.unpack(f"<{count * width}{'e' if form == 'fp16' else 'f'}", frame)
        return [list(numbers[i * width : (i + 1) * width]) for i in range(count)]
    blocks = (width + 31) // 32
    row = width if form == "int8" else (width + 1) // 2
    out = []
    for i in range(count):
        places = range(2 * i * blocks, 2 * (i + 1) * blocks, 2)
        # bfloat16 is the upper half of a single
        steps = [struct.unpack("<f", b"\0\0" + frame[at : at + 2])[0] for at in places]
        body = frame[2 * count * blocks + i * row :][:row]
        if form == "int8":
            quanta = [byte - 256 * (byte > 127) for byte in body]
        else:
            halves = [half for byte in body for half in (byte & 15, byte >> 4)]
            quanta = [half - 16 * (half > 7) for half in halves][:width]
        out.append([q * steps[k // 32] for k, q in enumerate(quanta)])
    return out


@given(cases())
@examples(100)
def test_frames_are_what_the_specification_says(case: tuple[np.ndarray, str]) -> None:
    given_states, form = case
    frame = encode_hidden(given_states, form)
    read = read_hidden(frame, *given_states.shape, form)
    assert decode_hidden(frame, *given_states.shape, form).tolist() == read


@pytest.mark.parametrize(
    ("form", "numbers", "frame", "out"),
    [
        ("fp16", [1.0, -0.1], "003c66ae", [1.0, -0.0999755859375]),
        ("fp32", [1.0, -0.15625], "0000803f000020be", [1.0, -0.15625]),
        # the next step above 1 is 1 + 2⁻⁷
        ("int8", [127.0, -64.0, 0.4], "813f7ec000", [126.984375, -64.5, 0.0]),
        ("int4", [7.0, -3.0, 0.4], "813fd700", [7.0546875, -3.0234375, 0.0]),
        ("int8", [0.0, 0.0], "81000000", [0.0, 0.0]),
    ],
)
def test_vectors(form: str, numbers: list[float], frame: str, out: list[float]) -> None:
    given_states = np.array([numbers], np.float32)
    assert encode_hidden(given_states, form).hex() == frame
    assert decode_hidden(bytes.fromhex(frame), 1, len(numbers), form).tolist() == [out]


# Sizes


@pytest.mark.parametrize(
    ("form", "width", "size"),
    [
        ("int8", 576, 612), ("int4", 576, 324), ("fp16", 576, 1152),
        ("fp32", 576, 2304),
        ("int8", 1536, 1632), ("int4", 1536, 864), ("fp16", 1536, 3072),
        ("int8", 1, 3), ("int4", 1, 3), ("int8", 33, 37), ("int4", 33, 21),
    ],
)  # fmt: skip
def test_bytes_of_a_state(form: str, width: int, size: int) -> None:
    assert hidden_bytes(width, form) == size


@pytest.mark.parametrize(
    ("form", "limit"), [("int8", 0.014), ("int4", 0.2), ("fp16", 0.0004), ("fp32", 0.0)]
)
def test_states_like_a_drafters_lose_little(form: str, limit: float) -> None:
    given_states = ordinary(100, 576)
    norms = np.linalg.norm(given_states, axis=1)
    assert (np.linalg.norm(error(given_states, form), axis=1) <= limit * norms).all()
