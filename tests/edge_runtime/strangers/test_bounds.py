"""Whatever a frame declares, decoding it takes memory by its own length and the sizes agreed on."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.base.errors import MalformedError, TokenOutOfRangeError
from pilotfish.wire.codecs import decode_counts, decode_ids, decode_sparse
from pilotfish.wire.messages import MAX_WINDOW, decode_device_message, decode_reply

VOCAB = 50_000
FIXED = 2_000_000  # arrays over the vocabulary, layouts that are kept, the interpreter's own

# Heads that mean something, so that what follows is read at all; then anything.
SPARSE_HEAD = st.builds(
    lambda c, width, alike, tilt: bytes([c | width << 3 | alike << 5 | tilt << 6]),
    st.integers(0, 5), st.integers(1, 3), st.integers(0, 1), st.integers(0, 3),
)  # fmt: skip
COUNTS_HEAD = st.builds(
    lambda tilt, filled: bytes([tilt]) + filled.to_bytes(3, "little"),
    st.integers(0, 3), st.one_of(st.integers(1, VOCAB), st.integers(0, 2**24 - 1)),
)  # fmt: skip
TAIL = st.one_of(
    st.binary(max_size=64),
    st.builds(bytes.__mul__, st.binary(min_size=1, max_size=4), st.integers(1, 20_000)),
)
PACKED = st.builds(
    lambda kind, count, rest: kind + count.to_bytes(4, "big") + rest,
    st.sampled_from([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9", b"\x9c\xa5hello\xdb"]),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=64),
)


def peak_of(decode: Callable[[], object]) -> int:
    """Bytes allocated at most while a frame is decoded or refused."""
    tracemalloc.start()
    try:
        decode()
    except (MalformedError, TokenOutOfRangeError):
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak


@settings(max_examples=150)
@given(head=SPARSE_HEAD, tail=TAIL, rows=st.integers(1, MAX_WINDOW))
def test_distributions(head: bytes, tail: bytes, rows: int) -> None:
    frame = head + tail
    assert peak_of(lambda: decode_sparse(frame, rows, VOCAB)) < FIXED + 600 * len(frame)


@settings(max_examples=150)
@given(head=COUNTS_HEAD, tail=TAIL)
def test_counts(head: bytes, tail: bytes) -> None:
    frame = head + tail
    assert peak_of(lambda: decode_counts(frame, VOCAB, 16)) < FIXED + 600 * len(frame)


@settings(max_examples=100)
@given(frame=TAIL, vocab=st.sampled_from([64, 65_536, 65_537, 2**24]))
def test_ids(frame: bytes, vocab: int) -> None:
    assert peak_of(lambda: decode_ids(frame, vocab)) < FIXED + 20 * len(frame)


@settings(max_examples=200)
@given(header=st.one_of(PACKED, st.binary(max_size=64)))
@pytest.mark.parametrize("decode", [decode_device_message, decode_reply])
def test_headers(decode: Callable[[bytes], object], header: bytes) -> None:
    assert peak_of(lambda: decode(header)) < 100_000
