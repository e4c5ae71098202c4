"""Edges that lie: a device takes no vocabulary but the one that was promised."""

from __future__ import annotations

import hashlib
import re
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import (
    EdgeLostError,
    MalformedError,
    PairMismatchError,
    PilotfishError,
    RateLimitedError,
)
from pilotfish.device_runtime.link.retry import RetryPolicy
from pilotfish.wire import messages as m
from tests.conftest import VOCAB, Pair
from tests.device_runtime.test_bad_edge import Answer
from tests.device_runtime.vocabulary_wire.arriving import (
    FAILS_SOON,
    GOOD,
    arrive,
    greeted,
    serving,
)
from tests.support.tiny_tokenizer import tiny_tokenizer


def test_the_liar_of_these_tests_can_be_honest(pair: Pair, liar, cache: Path) -> None:
    with greeted(pair, liar(serving(GOOD.encode())).endpoint) as link:
        assert arrive(link) == GOOD


FRAMES: dict[str, Callable[[bytes, int], list[bytes]]] = {
    "no frame": lambda frame, part: [],
    "two frames": lambda frame, part: [frame, b""],
    "an empty frame": lambda frame, part: [b""],
    "no stream": lambda frame, part: [b"\xff" * 100],
    "half a stream": lambda frame, part: [frame[: len(frame) // 2]],
    "no check sum": lambda frame, part: [frame[:-4]],
    "garbage after it": lambda frame, part: [frame + b"\0"],
    "a stream after it": lambda frame, part: [frame * 2],
    "a byte more in it": lambda frame, part: [zlib.compress(zlib.decompress(frame) + b"\0")],
    "a byte less in it": lambda frame, part: [zlib.compress(zlib.decompress(frame)[:-1])],
    "nothing in it": lambda frame, part: [zlib.compress(b"")],
    "a bomb": lambda frame, part: [zlib.compress(bytes(2**28))],
    "a frame beyond measure": lambda frame, part: [bytes(2**24)],
    "blocks without end": lambda frame, part: [b"\x78\x9c" + b"\x00\x00\x00\xff\xff" * 10**6],
    "other bytes": lambda frame, part: [zlib.compress(bytes(len(zlib.decompress(frame))))],
    "the last part spoilt": lambda frame, part: [frame if part < 2 else frame[:-1]],
}


@pytest.mark.parametrize("spoil", FRAMES.values(), ids=FRAMES.keys())
def test_frames_that_are_no_part(pair: Pair, liar, cache: Path, spoil: Callable) -> None:
    with greeted(pair, liar(serving(GOOD.encode(), spoil)).endpoint) as link:
        began = time.process_time()
        with pytest.raises(MalformedError, match="Export the target again"):
            arrive(link)
        assert time.process_time() - began < 5
    assert not cache.exists()


@given(st.binary(max_size=400), st.integers(0, 300), st.integers(0, 300))
def test_any_frame_is_the_part_or_malformed(noise: bytes, at: int, expected: int) -> None:
    from pilotfish.device_runtime.vocabulary_fetch import _unpack

    whole = zlib.compress(bytes(expected))
    assert _unpack(whole, expected) == bytes(expected)
    for frame in (noise, whole[:at] + noise, whole[:at] + noise + whole[at + len(noise) :]):
        try:
            result = _unpack(frame, expected)
        except MalformedError:
            continue
        assert result == zlib.decompress(frame)
        assert len(result) == expected


def test_no_more_is_made_of_a_frame_than_a_part_has() -> None:
    from pilotfish.device_runtime.vocabulary_fetch import _unpack

    bomb = zlib.compress(bytes(2**26))
    assert len(bomb) < m.PART_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(MalformedError, match="does not have"):
            _unpack(bomb, m.PART_BYTES)
        assert tracemalloc.get_traced_memory()[1] < 4 * m.PART_BYTES
        with pytest.raises(MalformedError, match="compressed bytes"):
            _unpack(bytes(2 * m.PART_BYTES), m.PART_BYTES)
    finally:
        tracemalloc.stop()


OFFERS: dict[str, tuple[type[PilotfishError], dict[str, Any]]] = {
    "none": (PairMismatchError, {"vocabulary": "", "vocabulary_bytes": 0}),
    "a path": (MalformedError, {"vocabulary": "../../" + "a" * 58}),
    "capitals": (MalformedError, {"vocabulary": "A" * 64}),
    "a short digest": (MalformedError, {"vocabulary": "a" * 63}),
    "another digest": (MalformedError, {"vocabulary": "a" * 64}),
    "no bytes": (MalformedError, {"vocabulary_bytes": 0}),
    "too many bytes": (MalformedError, {"vocabulary_bytes": m.MAX_VOCABULARY + 1}),
    "2 GiB": (MalformedError, {"vocabulary_bytes": 2**31 - 1}),
    "a byte more": (MalformedError, {"vocabulary_bytes": len(GOOD.encode()) + 1}),
    "a part less": (MalformedError, {"vocabulary_bytes": 2 * m.PART_BYTES}),
    "another fingerprint": (MalformedError, {"tokenizer": "ab" * 32}),
    "another size": (MalformedError, {"vocab_size": VOCAB + 1}),
    "other ends": (MalformedError, {"eos_ids": [3]}),
}


@pytest.mark.parametrize(("error", "changes"), OFFERS.values(), ids=OFFERS.keys())
def test_offers_that_do_not_hold(
    pair: Pair, liar, cache: Path, error: type[PilotfishError], changes: dict[str, Any]
) -> None:
    edge = liar(serving(GOOD.encode()), **changes)
    with greeted(pair, edge.endpoint) as link, pytest.raises(error):
        arrive(link)
    stems = [file.stem for file in cache.rglob("*.bin")]
    # only bytes that have their digest; what the edge says of them else may change
    true = {"vocabulary", "vocabulary_bytes"}.isdisjoint(changes)
    assert stems == ([hashlib.sha256(GOOD.encode()).hexdigest()] if true else [])
    digest, size = changes.get("vocabulary", "a" * 64), changes.get("vocabulary_bytes", 1)
    if re.fullmatch("[0-9a-f]{64}", digest) is None or not 0 < size <= m.MAX_VOCABULARY:
        assert not any(isinstance(request, m.Fetch) for request in edge.requests)


REPLACED: dict[str, dict[str, Any]] = {
    "no JSON": {"tokenizer_json": "{"},
    "deep JSON": {"tokenizer_json": "[" * 100_000},
    "a template beyond measure": {"chat_template": "{{a}}" * 110_000},
    "no tokens": {"tokenizer_json": tiny_tokenizer(VOCAB).replace('"vocab": {', '"vocab": [')},
    "more tokens than it says": {"tokenizer_json": tiny_tokenizer(VOCAB + 1)},
    "other tokens": {"tokenizer_json": tiny_tokenizer(VOCAB, None, "<other>")},
    "an end that is none": {"eos_ids": [VOCAB]},
    "a beginning that is none": {"bos_id": 2**31},
}


@pytest.mark.parametrize("changes", REPLACED.values(), ids=REPLACED.keys())
def test_vocabularies_that_cannot_be(pair: Pair, liar, cache: Path, changes: dict) -> None:
    """Their bytes are those that were promised; it is what they say that is wrong."""
    bad = msgspec.structs.replace(GOOD, **changes)
    edge = liar(serving(bad.encode()), bad)
    for _ in range(2):
        with greeted(pair, edge.endpoint) as link, pytest.raises(MalformedError):
            arrive(link)
    parts = sum(isinstance(request, m.Fetch) for request in edge.requests)
    assert parts <= 1 + len(bad.encode()) // m.PART_BYTES  # it need not come twice


def test_bytes_that_are_no_vocabulary(pair: Pair, liar, cache: Path) -> None:
    blob = b"\xc1" * 1000
    offer = {"vocabulary": hashlib.sha256(blob).hexdigest(), "vocabulary_bytes": len(blob)}
    edge = liar(serving(blob), **offer)
    with greeted(pair, edge.endpoint) as link, pytest.raises(MalformedError):
        arrive(link)


def test_an_edge_that_never_answers(pair: Pair, liar, cache: Path) -> None:
    blob = GOOD.encode()
    first = serving(blob)

    def script(request: m.DeviceMessage) -> list[Answer]:
        return first(request) if isinstance(request, m.Fetch) and request.part == 0 else []

    for silent in (lambda request: [], script):
        with greeted(pair, liar(silent).endpoint, FAILS_SOON) as link:
            began = time.monotonic()
            with pytest.raises(EdgeLostError):
                arrive(link)
            assert time.monotonic() - began < 2


def test_unrequested_parts_are_ignored(pair: Pair, liar, cache: Path) -> None:
    honest = serving(GOOD.encode())

    def script(request: m.DeviceMessage) -> list[Answer]:
        if not isinstance(request, m.Fetch):
            return []
        return [
            [m.Part(vocabulary="ab" * 32, part=request.part), b"x"],
            [m.Part(vocabulary=request.vocabulary, part=request.part + 1), b"x"],
            [m.Pong(nonce=1, received_ns=1, sent_ns=1)],
            *honest(request),
        ]

    with greeted(pair, liar(script).endpoint) as link:
        assert arrive(link) == GOOD


def test_a_busy_edge_is_waited_for_as_the_policy_says(pair: Pair, liar, cache: Path) -> None:
    honest = serving(GOOD.encode())
    refusals = iter(range(3))

    def script(request: m.DeviceMessage) -> list[Answer]:
        if isinstance(request, m.Fetch) and request.part == 1 and next(refusals, None) is not None:
            return [[m.Failure(code="rate-limited", message="Slow down.")]]
        return honest(request)

    edge = liar(script)
    with greeted(pair, edge.endpoint) as link, pytest.raises(RateLimitedError):
        arrive(link)
    with greeted(pair, edge.endpoint, RetryPolicy.from_policy("wait", 20.0)) as link:
        assert arrive(link) == GOOD
