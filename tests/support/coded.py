"""Distributions for the tests of the codecs, and ways to damage their frames."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from pilotfish.speculation.truncation import MAX_LEVEL, SparseRows

VOCABS = st.one_of(st.integers(1, 40), st.integers(1, 200_000), st.sampled_from([65_536, 65_537]))


def rows_of(*rows: dict[int, int]) -> SparseRows:
    """Make rows from {id: level}."""
    return SparseRows(
        np.array([token for row in rows for token in row], np.uint32),
        np.array([level for row in rows for level in row.values()], np.uint8),
        np.cumsum([len(row) for row in rows], dtype=np.int64),
    )


def random_rows(seed: int, vocab: int, sizes: list[int], skew: float = 0.0) -> SparseRows:
    """Make rows of these sizes; with a skew, low ids are likelier, as in real vocabularies."""
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


def same_rows(rows: SparseRows, other: SparseRows) -> bool:
    return all(
        np.array_equal(getattr(rows, name), getattr(other, name))
        for name in ("ids", "levels", "ends")
    )


def check_rows(rows: SparseRows, count: int, vocab: int) -> None:
    """Assert the invariants of `SparseRows`."""
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
    """Round shares [V] to integers that sum to 2^bits, with one uniform for all."""
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
    """Flip a few bits of a frame, or remove or add bytes."""
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
