"""Encode a worker's distributions in one frame: ids and probabilities of each row's top K tokens.

In:  `TopRows`, n rows of K tokens each, the vocabulary's size V, and a format of the values: "fp16"
     (default), "fp32" or "levels".
Out: a frame. Decoding returns `TopRows` with the same ids, and values as float32. The receiver
     asked for the rows, so it knows n, K and V; it refuses a frame with another K.

Ids and levels are coded as in `wire.codecs.rows`; "fp32" and "fp16" need no ids if K = V. "fp32"
sends the probabilities. The other formats send a weight for each token, and for each row ρ, the sum
of its probabilities, as float32. A decoded probability is the weight, divided by the sum of the
row's weights, times ρ. So ρ, the retained mass, is exact to float32. Let m be the row's largest
probability. Then a weight is

    fp16     p · 2¹⁵/m as IEEE half, so that tokens down to m · 2⁻²⁹ have all 11 bits
    levels   the nearest level below m, as in `sparse` (`speculation.truncation`)

**Error.** A row's shares are its probabilities divided by ρ. For K ≤ 2¹⁸, `MAX_ERROR` bounds the
total variation between the shares before and after; the error of the probabilities is ρ times this
bound. If each weight is wrong by a factor between 1/r and r, the shares' error is at most (r −
1)/(r + 1). r is 1 + 2⁻¹¹ for "fp16". It is 2^(1/2) for "levels", but only for tokens more than 12
octaves below m. `MAX_ERROR` is a little larger, since the lightest weights are coarser.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.ensemble import TopRows
from pilotfish.speculation.theory import Values
from pilotfish.speculation.truncation import LEVEL_WEIGHTS, nearest_levels
from pilotfish.wire.codecs.bits import Ints
from pilotfish.wire.codecs.rows import MAX_HEIGHT_PARAMETER, decode_rows, encode_rows
from pilotfish.wire.messages import Buffer

TOPK_FORMATS: Final = ("fp16", "fp32", "levels")  # default first; a format's index is its code
MAX_ERROR: Final = {"fp16": 2.45e-4, "fp32": 0.0, "levels": 0.1718}

_HEAD: Final = 4  # bytes: one for form, tilt and the heights' parameter; three for K
_LENGTH: Final = 4  # bytes of a row's length, if rows have different K
_PEAK: Final = 2.0**15  # the weight of m in "fp16"
_SUM_TOLERANCE: Final = 1e-3  # largest error of ρ, as in `dsd`; far above float32's rounding


def encode_topk(rows: TopRows, vocab_size: int, form: str) -> bytes:
    """Encode ``rows`` over ``vocab_size`` < 2²⁴ tokens in ``form``; no rows give an empty frame.

    Raises `ValueError` if a softmax cannot give the values: NaN, negative, a sum of 0 or above 1.
    """
    count, k = len(rows), rows.k
    if not count:
        return b""
    # a NaN fails this comparison
    masses = rows.retained_mass if float(rows.values.min()) >= 0.0 else np.zeros(count)
    if not _are_valid_masses(masses, whole=False):
        raise ValueError("A row of probabilities has a NaN, a negative number or a wrong sum.")
    plain = k.to_bytes(_HEAD - 1, "little") + _encode_plain(rows.values, masses, form)
    code = TOPK_FORMATS.index(form)
    if not _has_bits(form, k, vocab_size):
        return bytes((code,)) + plain
    return encode_rows(
        lambda c, tilt: bytes((code | tilt << 2 | c << 4,)) + plain,
        rows.ids.astype(np.int64).reshape(-1),
        _compute_levels(rows.values) if form == "levels" else None,
        _ends(count, k),
        vocab_size,
    )


def decode_topk(frame: Buffer, count: int, k: int, vocab_size: int) -> TopRows:
    """Decode the ``count`` rows of ``frame``, each of min(``k``, ``vocab_size``) tokens.

    Raises `MalformedError` for an invalid frame. Its length bounds the time and the memory.
    """
    k = min(k, vocab_size)
    if not count:
        if len(frame):
            raise MalformedError("There is a frame of top-K rows, but none are expected.")
        return TopRows(np.empty((0, k), np.uint32), np.empty((0, k), np.float32))
    form, tilt, c = _read_head(frame, k, vocab_size)
    total, whole = count * k, k == vocab_size
    weights_from = _HEAD + (0 if form == "fp32" else 4 * count)
    plain_to = weights_from + {"fp16": 2, "fp32": 4, "levels": 0}[form] * total
    bits = _has_bits(form, k, vocab_size)
    if len(frame) < plain_to or (len(frame) > plain_to and not bits):
        raise MalformedError(
            f"A frame of top-K rows has {len(frame)} bytes; {plain_to} are expected."
        )
    levels: Ints | None = None
    if bits:
        laid_as = (_ends(count, k), vocab_size, tilt)
        _, sorted_ids, levels = decode_rows(
            frame, plain_to, laid_as, c if form == "levels" else None
        )
        ids = sorted_ids.astype(np.uint32).reshape(count, k)
    else:
        ids = np.broadcast_to(np.arange(vocab_size, dtype=np.uint32), (count, k))
    if form == "fp32":
        values = np.frombuffer(frame, "<f4", total, _HEAD).reshape(count, k)
        _check(values, None, whole)
        return TopRows(ids, values)
    if levels is not None:
        weights = LEVEL_WEIGHTS[levels].reshape(count, k)
    else:
        halves = np.frombuffer(frame, "<f2", total, weights_from)
        weights = halves.astype(np.float64).reshape(count, k)
    masses = np.frombuffer(frame, "<f4", count, _HEAD).astype(np.float64)
    _check(weights, masses, whole)
    # f64 [n, 1]
    factors = (masses / weights.sum(axis=1))[:, None]
    return TopRows(ids, (weights * factors).astype(np.float32))


def encode_topk_each(rows: Sequence[TopRows], vocab_size: int, form: str) -> bytes:
    """Encode rows [1, K] that have different K: the length of each one's frame, u32, then these."""
    frames = [encode_topk(row, vocab_size, form) for row in rows]
    return np.array([len(frame) for frame in frames], "<u4").tobytes() + b"".join(frames)


def decode_topk_each(frame: Buffer, count: int, most: int, vocab_size: int) -> list[TopRows]:
    """Decode ``count`` rows [1, K], each with its own K of at most min(``most``, ``vocab_size``).

    Raises `MalformedError` for an invalid frame.
    """
    begin = _LENGTH * count
    if len(frame) < begin:
        raise MalformedError("A frame of top-K rows ends within the lengths of its rows.")
    lengths = np.frombuffer(frame, "<u4", count).tolist()
    if begin + sum(lengths) != len(frame):
        raise MalformedError("The lengths of top-K rows are not those of their frame.")
    rows, most = [], min(most, vocab_size)
    for length in lengths:
        row, begin = frame[begin : begin + length], begin + length
        k = _read_size(row) if length >= _HEAD else 0
        if not 0 < k <= most:
            raise MalformedError(f"A worker sent {k} tokens of a row; at most {most} are expected.")
        rows.append(decode_topk(row, 1, k, vocab_size))
    return rows


def _read_size(frame: Buffer) -> int:
    """Return K of a frame's rows."""
    return int.from_bytes(frame[1:_HEAD], "little")


def _has_bits(form: str, k: int, vocab_size: int) -> bool:
    """Return whether the frame has bit sections: some ids are missing, or levels are sent."""
    return k < vocab_size or form == "levels"


def _ends(count: int, k: int) -> tuple[int, ...]:
    return tuple(range(k, count * k + 1, k))


def _are_valid_masses(masses: NDArray[np.floating], *, whole: bool) -> bool:
    """Return whether each ρ [n] is above 0 and at most 1, or 1 with the ``whole`` vocabulary."""
    least, most = float(masses.min()), float(masses.max())
    return least > 0.0 and (1.0 - _SUM_TOLERANCE) * whole <= least and most <= 1.0 + _SUM_TOLERANCE


def _encode_plain(values: Floats, masses: Values, form: str) -> bytes:
    """Encode the part of whole bytes: probabilities, or each row's ρ and then "fp16" weights."""
    if form == "fp32":
        return values.astype("<f4").tobytes()
    plain = masses.astype("<f4").tobytes()
    if form == "fp16":
        peaks = values.max(axis=1, keepdims=True).astype(np.float64)
        plain += (values * (_PEAK / peaks)).astype("<f2").tobytes()
    return plain


def _compute_levels(values: Floats) -> Ints:
    """Return each token's level, i64 [N]."""
    peaks = values.max(axis=1, keepdims=True).astype(np.float64)
    with np.errstate(divide="ignore"):
        octaves = np.log2(peaks / values)
    return nearest_levels(octaves.reshape(-1)).astype(np.int64)


def _read_head(frame: Buffer, k: int, vocab_size: int) -> tuple[str, int, int]:
    """Return the format, the tilt and the heights' parameter."""
    if len(frame) < _HEAD:
        raise MalformedError("A frame of top-K rows ends within its head.")
    code, tilt, c = frame[0] & 3, frame[0] >> 2 & 3, frame[0] >> 4
    form = TOPK_FORMATS[code] if code < len(TOPK_FORMATS) else ""
    coded = _has_bits(form, k, vocab_size)
    if not form or c > (form == "levels") * MAX_HEIGHT_PARAMETER or (tilt and not coded):
        raise MalformedError("The first byte of a frame of top-K rows has no defined meaning.")
    sent = _read_size(frame)
    if sent != k:
        raise MalformedError(f"A worker sent {sent} tokens of each row; {k} are expected.")
    return form, tilt, c


def _check(weights: Floats, masses: Values | None, whole: bool) -> None:
    """Raise `MalformedError` unless weights [n, K] and ρ [n] make probabilities.

    Without ρ the weights are the probabilities themselves.
    """
    # a NaN fails the first comparison, an infinity the second
    fine = float(weights.min()) >= 0.0 and float(weights.max()) < np.inf
    sums = weights.sum(axis=1, dtype=np.float64) if fine else np.zeros(len(weights))
    if not (
        sums.min() > 0.0 and _are_valid_masses(sums if masses is None else masses, whole=whole)
    ):
        raise MalformedError("A row has a NaN, a negative number, or an impossible sum.")
