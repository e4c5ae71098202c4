"""An edge hands its vocabulary out, and a device takes none but the one that was promised."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_runtime.bridge.arrival import target_vocabulary
from device_runtime.link.edge_link import EdgeLink
from device_runtime.link.loss import FAIL, Interrupt, Patience
from engines.artifact import Artifact
from engines.vocabulary import Vocabulary
from pilotfish import EdgeServer
from tests.conftest import PADDED_VOCAB, VOCAB, Pair
from tests.hostile import RawClient, RawSession, fields, packed
from tests.relay import Relay
from tests.socketless import SocketlessEdge
from tests.test_bad_edge import Answer, LyingEdge
from tests.tiny import tiny_artifact, tiny_tokenizer
from wire import messages as m
from wire.emulation.emulator import Conditions, Emulator
from wire.errors import (
    EdgeLostError,
    InterruptedGenerationError,
    MalformedError,
    PairMismatchError,
    PilotfishError,
    RateLimitedError,
)

PARTS = 5
FAILS_SOON = Patience(policy="fail", absent_s=2.2, silent_s=0.5)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A model of another vocabulary, with a chat template so long that there are several parts."""
    artifact = tiny_artifact(
        tmp_path_factory.mktemp("foreign") / "target", tokens=[*"abcdeĠ", "ab"], eos="<stop>"
    )
    path = artifact.path / "manifest.json"
    prose = random.Random(1).randbytes((PARTS - 1) * m.PART_BYTES // 2).hex()
    manifest = json.loads(path.read_text())
    manifest["chat_template"] = "{# " + prose + " #}" + manifest["chat_template"]
    path.write_text(json.dumps(manifest))
    return Artifact.open(artifact.path)


@pytest.fixture(scope="module")
def wanted(foreign: Artifact) -> Vocabulary:
    return Vocabulary.of(foreign)


@pytest.fixture(scope="module")
def other_edge(foreign: Artifact) -> Iterator[EdgeServer]:
    with EdgeServer(foreign.path, threads=1, sessions=4) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where vocabularies are kept; nothing is there yet."""
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vocabularies"


def hello(pair: Pair, **changes: Any) -> m.Hello:
    manifest = Artifact.open(pair.draft).manifest
    told = m.Hello(
        version=m.VERSION, tokenizer=manifest.tokenizer_fingerprint, vocab_size=VOCAB,
        padded_vocab_size=PADDED_VOCAB, hidden_size=64, bridges=True,
    )  # fmt: skip
    return msgspec.structs.replace(told, **changes)


def welcomed(client: RawClient, pair: Pair) -> m.Welcome:
    client.say(hello(pair))
    welcome = client.hear()
    assert isinstance(welcome, m.Welcome), welcome
    return welcome


@contextmanager
def greeted(pair: Pair, endpoint: str, patience: Patience = FAIL) -> Iterator[EdgeLink]:
    """A link of a device whose drafter has the tiny pair's vocabulary."""
    link = EdgeLink(endpoint, None, patience)
    try:
        link.presence.introduce(Artifact.open(pair.draft).manifest)
        link.greet()
        yield link
    finally:
        link.close()


def arrive(link: EdgeLink, **options: Any) -> Vocabulary:
    assert link.welcome is not None
    return target_vocabulary(link, link.welcome, **options)


# The edge


def test_a_device_that_cannot_bridge_is_refused_as_ever(pair: Pair, other_edge: EdgeServer) -> None:
    with RawClient(other_edge.endpoint) as client:
        client.send(packed(fields(hello(pair))[:-2]))  # as devices said it before
        told = client.fails("pair-mismatch").message
        assert "same family" in told
        assert "newer Pilotfish" in told
        client.say(hello(pair, bridges=False))
        client.fails("pair-mismatch")


def test_a_device_without_bridges_is_welcome_where_it_fits(
    foreign: Artifact, pair: Pair, other_edge: EdgeServer
) -> None:
    suits = hello(pair, tokenizer=foreign.manifest.tokenizer_fingerprint)
    with RawClient(other_edge.endpoint) as client:
        client.send(packed(fields(suits)[:-1]))
        assert isinstance(client.hear(), m.Welcome)


def test_a_device_with_bridges_is_told_which_vocabulary(
    foreign: Artifact, pair: Pair, other_edge: EdgeServer, wanted: Vocabulary
) -> None:
    with RawClient(other_edge.endpoint) as client:
        welcome = welcomed(client, pair)
        assert welcome.tokenizer == foreign.manifest.tokenizer_fingerprint == wanted.fingerprint
        assert welcome.vocabulary == wanted.digest
        assert welcome.vocabulary_bytes == len(wanted.encode())
        client.say(hello(pair, version=m.VERSION + 1))
        client.fails("version-mismatch")


def test_the_parts_are_the_blob(pair: Pair, other_edge: EdgeServer, wanted: Vocabulary) -> None:
    blob = b""
    with RawClient(other_edge.endpoint) as client:
        digest = welcomed(client, pair).vocabulary
        for number in range(PARTS):
            frames = []
            for _ in range(2):  # the second time it is kept
                client.say(m.Fetch(vocabulary=digest, part=number))
                reply, frames = client.hear_all()
                assert reply == m.Part(vocabulary=digest, part=number)
            (frame,) = frames
            blob += zlib.decompress(frame)
            assert number == PARTS - 1 or len(blob) == (number + 1) * m.PART_BYTES
    assert blob == wanted.encode()
    assert hashlib.sha256(blob).hexdigest() == digest
    assert Vocabulary.decode(blob, wanted.model) == wanted


def test_what_there_is_not_is_a_failure_for_who_asks(pair: Pair, other_edge: EdgeServer) -> None:
    with RawClient(other_edge.endpoint) as client, RawClient(other_edge.endpoint) as neighbour:
        digest = welcomed(client, pair).vocabulary
        session = RawSession()
        neighbour.send(*session.begin([1, 2, 3]))
        for strange in ("", "ab" * 32, digest.upper(), digest[:-1], "../" + digest[3:]):
            client.say(m.Fetch(vocabulary=strange, part=0))
            assert "connect again" in client.fails("pair-mismatch").message
        for number in (PARTS, PARTS + 1, 2**31 - 1):
            client.say(m.Fetch(vocabulary=digest, part=number))
            assert f"{PARTS} parts" in client.fails("malformed").message
        client.say(m.Fetch(vocabulary=digest, part=0), b"")
        client.fails("malformed")
        for values in (["fetch", digest], ["fetch", digest, -1], ["fetch", digest, 0, 0]):
            client.send(packed(values))
            client.fails("malformed")
        neighbour.send(*session.window([1, 2]))
        session.settle([1, 2], neighbour.hear())
        client.say(m.Fetch(vocabulary=digest, part=0))
        assert isinstance(client.hear(), m.Part)


def test_a_fetch_counts_like_any_message(foreign: Artifact, wanted: Vocabulary) -> None:
    fetch = [m.encode(m.Fetch(vocabulary=wanted.digest, part=0))]
    with SocketlessEdge(foreign.path, sessions=2, messages_per_s=0.1) as edge:
        edge.deliver(fetch)
        assert isinstance(edge.reply(), m.Part)
        edge.deliver(fetch)
        edge.fails("rate-limited")
        edge.deliver(fetch, b"somebody else")
        assert isinstance(edge.reply(b"somebody else"), m.Part)
        edge.service.drain()
        edge.deliver(fetch, b"a third one")
        assert isinstance(failure := edge.reply(b"a third one"), m.Failure)
        assert failure.code == "draining"


# The device


def test_a_vocabulary_arrives_and_is_kept(
    pair: Pair,
    other_edge: EdgeServer,
    wanted: Vocabulary,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    size = len(wanted.encode())
    heard: list[tuple[int, int]] = []
    caplog.set_level(logging.INFO, "pilotfish.device")
    with greeted(pair, other_edge.endpoint) as link:
        assert arrive(link, progress=lambda *at: heard.append(at)) == wanted
        assert heard == [(min(n * m.PART_BYTES, size), size) for n in range(1, PARTS + 1)]
        assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
        assert [file.name for file in cache.iterdir()] == [f"{wanted.digest}.bin"]
        heard.clear()
        assert arrive(link, progress=lambda *at: heard.append(at)) == wanted
        assert heard == []


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a byte": lambda path: path.write_bytes(b"\0" + path.read_bytes()[1:]),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
    "no file": lambda path: (path.unlink(), path.mkdir()),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_cache_is_fetched_anew(
    pair: Pair, other_edge: EdgeServer, wanted: Vocabulary, cache: Path, damage: Callable
) -> None:
    with greeted(pair, other_edge.endpoint) as link:
        arrive(link)
        damage(cache / f"{wanted.digest}.bin")
        for fetched in (PARTS, PARTS if damage is DAMAGES["no file"] else 0):
            heard: list[tuple[int, int]] = []
            assert arrive(link, progress=lambda *at, to=heard: to.append(at)) == wanted
            assert len(heard) == fetched


def test_without_a_cache_it_goes_on_all_the_same(
    pair: Pair, other_edge: EdgeServer, wanted: Vocabulary, cache: Path
) -> None:
    cache.parent.write_bytes(b"a file where the folder would be")
    with greeted(pair, other_edge.endpoint) as link:
        assert arrive(link) == wanted
        assert arrive(link) == wanted


def test_the_cache_does_not_grow_for_ever(
    pair: Pair, other_edge: EdgeServer, wanted: Vocabulary, cache: Path
) -> None:
    cache.mkdir(parents=True)
    for number in range(30):
        (cache / f"{number:064x}.bin").write_bytes(b"old")
    with greeted(pair, other_edge.endpoint) as link:
        arrive(link)
    kept = list(cache.iterdir())
    assert len(kept) == 16
    assert cache / f"{wanted.digest}.bin" in kept


def test_a_link_that_breaks_in_the_middle_goes_on(
    pair: Pair, other_edge: EdgeServer, wanted: Vocabulary, cache: Path
) -> None:
    relay = Relay(other_edge.endpoint)
    heard: list[int] = []

    def progress(done: int, _: int) -> None:
        heard.append(done)
        if len(heard) in (2, 3):
            relay.cut()

    with greeted(pair, relay.endpoint) as link:
        assert arrive(link, progress=progress) == wanted
    relay.close()
    assert len(heard) == PARTS
    assert heard == sorted(set(heard))
    assert relay.connections == 3


def test_another_edge_in_the_middle_is_noticed(
    pair: Pair, edge: EdgeServer, other_edge: EdgeServer, cache: Path
) -> None:
    relay = Relay(other_edge.endpoint)

    def progress(done: int, _: int) -> None:
        if done == 2 * m.PART_BYTES:
            relay.turn_to(edge.endpoint)
            relay.cut()

    with greeted(pair, relay.endpoint) as link, pytest.raises(PairMismatchError):
        arrive(link, progress=progress)
    relay.close()
    assert not cache.exists()


def test_on_a_slow_link_no_part_holds_up_the_heartbeats(
    pair: Pair, other_edge: EdgeServer, wanted: Vocabulary, cache: Path
) -> None:
    slow = Conditions(rtt_s=0.05, down_bps=1e6, up_bps=1e6)
    with Emulator(other_edge.endpoint, slow) as emulator, greeted(pair, emulator.endpoint) as link:
        assert arrive(link) == wanted
        traffic = emulator.traffic()
    assert traffic.connections == 1
    assert traffic.down_bytes < 1.02 * len(zlib.compress(wanted.encode())) + 4096


def test_a_wait_for_a_part_can_be_interrupted(pair: Pair, liar, cache: Path) -> None:
    edge = liar(lambda request: [])
    interrupt = Interrupt()
    link = EdgeLink(edge.endpoint, None, FAIL, interrupt)
    try:
        link.presence.introduce(Artifact.open(pair.draft).manifest)
        link.greet()
        threading.Timer(0.2, interrupt.strike).start()
        with pytest.raises(InterruptedGenerationError):
            arrive(link)
    finally:
        link.close()


# An edge that lies

GOOD = Vocabulary(
    model="liar",
    tokenizer_json=tiny_tokenizer(VOCAB),
    vocab_size=VOCAB,
    bos_id=None,
    eos_ids=[VOCAB - 1],
    chat_template="{# " + random.Random(2).randbytes(m.PART_BYTES).hex() + " #}",
)
Script = Callable[[m.Request], list[Answer]]


@pytest.fixture
def liar(pair: Pair) -> Iterator[Callable[..., LyingEdge]]:
    """Edges that offer a vocabulary, and answer a fetch by a script."""
    opened: list[LyingEdge] = []

    def make(script: Script, held: Vocabulary = GOOD, **changes: Any) -> LyingEdge:
        def answer(request: m.Request) -> list[Answer]:
            return [[welcome]] if isinstance(request, m.Hello) else script(request)

        edge = LyingEdge(pair, answer)
        blob = held.encode()
        offer = {
            "tokenizer": GOOD.fingerprint,
            "vocabulary": hashlib.sha256(blob).hexdigest(),
            "vocabulary_bytes": len(blob),
        }
        welcome = msgspec.structs.replace(edge.welcome(), **{**offer, **changes})
        edge.start()
        opened.append(edge)
        return edge

    yield make
    for each in opened:
        each.stop()


def serving(blob: bytes, spoil: Callable[[bytes, int], list[bytes]] | None = None) -> Script:
    """The script of an edge that gives these bytes, and whose frames are spoilt by part number."""

    def script(request: m.Request) -> list[Answer]:
        if not isinstance(request, m.Fetch):
            return []
        at = request.part * m.PART_BYTES
        frame = zlib.compress(blob[at : at + m.PART_BYTES])
        frames = [frame] if spoil is None else spoil(frame, request.part)
        return [[m.Part(vocabulary=request.vocabulary, part=request.part), *frames]]

    return script


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
        began = time.monotonic()
        with pytest.raises(MalformedError, match="Export the target again"):
            arrive(link)
        assert time.monotonic() - began < 5
    assert not cache.exists()


@given(st.binary(max_size=400), st.integers(0, 300), st.integers(0, 300))
def test_any_frame_is_the_part_or_malformed(noise: bytes, at: int, expected: int) -> None:
    from device_runtime.bridge.arrival import _unpacked

    whole = zlib.compress(bytes(expected))
    assert _unpacked(whole, expected) == bytes(expected)
    for frame in (noise, whole[:at] + noise, whole[:at] + noise + whole[at + len(noise) :]):
        try:
            found = _unpacked(frame, expected)
        except MalformedError:
            continue
        assert found == zlib.decompress(frame)
        assert len(found) == expected


def test_no_more_is_made_of_a_frame_than_a_part_has() -> None:
    from device_runtime.bridge.arrival import _unpacked

    bomb = zlib.compress(bytes(2**26))
    assert len(bomb) < m.PART_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(MalformedError, match="does not hold"):
            _unpacked(bomb, m.PART_BYTES)
        assert tracemalloc.get_traced_memory()[1] < 4 * m.PART_BYTES
        with pytest.raises(MalformedError, match="came as"):
            _unpacked(bytes(2 * m.PART_BYTES), m.PART_BYTES)
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
    kept = [file.stem for file in cache.rglob("*.bin")]
    # only bytes that have their digest; what the edge says of them else may change
    true = {"vocabulary", "vocabulary_bytes"}.isdisjoint(changes)
    assert kept == ([hashlib.sha256(GOOD.encode()).hexdigest()] if true else [])
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

    def script(request: m.Request) -> list[Answer]:
        return first(request) if isinstance(request, m.Fetch) and request.part == 0 else []

    for silent in (lambda request: [], script):
        with greeted(pair, liar(silent).endpoint, FAILS_SOON) as link:
            began = time.monotonic()
            with pytest.raises(EdgeLostError):
                arrive(link)
            assert time.monotonic() - began < 2


def test_parts_that_nobody_asked_for_are_passed_over(pair: Pair, liar, cache: Path) -> None:
    honest = serving(GOOD.encode())

    def script(request: m.Request) -> list[Answer]:
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

    def script(request: m.Request) -> list[Answer]:
        if isinstance(request, m.Fetch) and request.part == 1 and next(refusals, None) is not None:
            return [[m.Failure(code="rate-limited", message="Slow down.")]]
        return honest(request)

    edge = liar(script)
    with greeted(pair, edge.endpoint) as link, pytest.raises(RateLimitedError):
        arrive(link)
    with greeted(pair, edge.endpoint, Patience.under("wait", 20.0)) as link:
        assert arrive(link) == GOOD
