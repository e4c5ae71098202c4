"""Codecs: a decoder written from docs/wire.md, token by token, and the vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

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
    rows_of,
    same_rows,
    sparse_rows,
    whole_counts,
)
from tests.support.examples import examples

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "wire_vectors.json").read_text())


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
@examples(50)
def test_frames_of_rows_are_what_the_specification_says(case: tuple[SparseRows, int]) -> None:
    rows, vocab = case
    split = [
        np.split(part, rows.ends[:-1]) if len(rows) else [] for part in (rows.ids, rows.levels)
    ]
    literal = [np.transpose(pair).tolist() for pair in zip(*split, strict=True)]
    assert read_sparse(encode_sparse(rows, vocab), len(rows), vocab) == literal


@given(whole_counts())
@examples(30)
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
