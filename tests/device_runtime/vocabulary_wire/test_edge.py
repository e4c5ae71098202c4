"""An edge hands its vocabulary out, in parts."""

from __future__ import annotations

import hashlib
import zlib

from pilotfish import EdgeServer
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire import messages as m
from tests.conftest import Pair
from tests.device_runtime.vocabulary_wire.arriving import (
    PARTS,
    hello,
    welcomed,
)
from tests.support.hostile import RawClient, RawSession, fields, packed
from tests.support.socketless import SocketlessEdge

BEFORE_BRIDGES = -len(m.Hello.__struct_fields__) + m.Hello.__struct_fields__.index("bridges")


def test_a_device_that_cannot_bridge_is_refused_as_ever(pair: Pair, other_edge: EdgeServer) -> None:
    with RawClient(other_edge.endpoint) as client:
        client.send(packed(fields(hello(pair))[:BEFORE_BRIDGES]))  # as devices said it before
        message = client.fails("pair-mismatch").message
        assert "same family" in message
        assert "does not bridge vocabularies" in message
        client.say(hello(pair, bridges=False))
        client.fails("pair-mismatch")


def test_a_device_without_bridges_is_welcome_where_it_fits(
    foreign: Artifact, pair: Pair, other_edge: EdgeServer
) -> None:
    suits = hello(pair, tokenizer=foreign.manifest.tokenizer_fingerprint)
    with RawClient(other_edge.endpoint) as client:
        client.send(packed(fields(suits)[:BEFORE_BRIDGES]))
        assert isinstance(client.receive(), m.Welcome)


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
                reply, frames = client.receive_all()
                assert reply == m.Part(vocabulary=digest, part=number)
            (frame,) = frames
            blob += zlib.decompress(frame)
            assert number == PARTS - 1 or len(blob) == (number + 1) * m.PART_BYTES
    assert blob == wanted.encode()
    assert hashlib.sha256(blob).hexdigest() == digest
    assert Vocabulary.decode(blob, wanted.model) == wanted


def test_requests_for_missing_parts_fail(pair: Pair, other_edge: EdgeServer) -> None:
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
        session.settle([1, 2], neighbour.receive())
        client.say(m.Fetch(vocabulary=digest, part=0))
        assert isinstance(client.receive(), m.Part)


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
