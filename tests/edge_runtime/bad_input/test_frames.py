"""Bytes that are no message: each is refused, and the connection goes on."""

from __future__ import annotations

import secrets

import pytest

from pilotfish.wire import messages as m
from pilotfish.wire.messages import HEADER_BYTES, MAX_FRAMES
from tests.support.hostile import PROMPT, RawClient, RawSession, fields, packed

HELLO = m.Hello(version=m.VERSION, tokenizer="?", vocab_size=1, padded_vocab_size=1, hidden_size=1)
PING = m.Ping(nonce=1)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x00"],
        [b"\xc1" * 40],  # a byte that msgpack never uses
        [b"GET / HTTP/1.1\r\n\r\n"],
        [secrets.token_bytes(64)],
        [packed({})],
        [packed([])],
        [packed(["window"])],
        [packed(None)],
        [packed(7)],
        [packed(["hello"] * 6)],
        [m.encode(PING) + b"\x00"],
        [m.encode(PING)[:-1]],
        [b"", b"", b""],
    ],
)
def test_garbage(client: RawClient, frames: list[bytes]) -> None:
    client.send(*frames)
    client.fails("malformed")
    client.say(PING)
    assert isinstance(client.receive(), m.Pong)


def test_every_truncation_of_every_message(client: RawClient, session: RawSession) -> None:
    messages = [
        session.begin(PROMPT, "dsd")[0],
        session.window([1])[0],
        session.pull(3)[0],
        m.encode(HELLO),
        m.encode(PING),
        m.encode(m.Cancel(session=session.id, generation=0)),
        m.encode(m.Close(session=session.id)),
    ]
    for message in messages:
        for at in range(len(message)):
            client.send(message[:at])
            client.fails("malformed")


def test_unknown_messages_and_messages_of_the_other_direction(client: RawClient) -> None:
    client.send(packed(["teleport", b"x" * 16]))
    client.fails("malformed")
    client.say(m.Pong(nonce=1, received_ns=1, sent_ns=1))
    client.fails("malformed")
    client.say(m.Failure(code="internal", message="boo"))
    client.fails("malformed")


def test_an_overlong_header(client: RawClient) -> None:
    client.send(packed(["hello", 1, "x" * HEADER_BYTES, 1, 1, 1]))
    client.fails("malformed")


@pytest.mark.parametrize(
    "opening", [b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\xdf\x00\x00\x00\x01\x01"]
)
def test_nesting_bombs(client: RawClient, opening: bytes) -> None:
    client.send(opening * (HEADER_BYTES // len(opening)))
    client.fails("malformed")
    client.send(packed(["ping"])[:-5] + b"\x92\xa4ping" + opening * 4000)
    client.fails("malformed")


@pytest.mark.parametrize("kind", [b"\xdd", b"\xdf", b"\xc6", b"\xdb"])  # array, map, bytes, text
def test_lengths_that_are_not_there(client: RawClient, kind: bytes) -> None:
    client.send(kind + b"\xff\xff\xff\xff" + b"\x01" * 100)
    client.fails("malformed")


def test_many_frames(client: RawClient, session: RawSession) -> None:
    client.send(*session.window([1], *[b""] * MAX_FRAMES))
    client.fails("malformed")
    client.send(m.encode(PING), *[b"x"] * 20_000)
    client.fails("malformed")
    session.go_on(client, 2)


@pytest.mark.parametrize("extra", [1, 2, MAX_FRAMES - 1])
def test_frames_that_do_not_belong(client: RawClient, session: RawSession, extra: int) -> None:
    client.send(*session.window([1], *[b"1234"] * extra))
    client.fails("malformed")
    session.go_on(client, 2)


def test_frames_that_are_missing(client: RawClient, session: RawSession) -> None:
    client.send(session.window([1])[0])
    client.fails("malformed")
    client.send(RawSession().begin(PROMPT)[0])
    client.fails("malformed")
    session.go_on(client, 2)


@pytest.mark.parametrize("size", [1, 3, 5, 255])
def test_truncated_ids(client: RawClient, session: RawSession, size: int) -> None:
    client.send(session.window()[0], b"\x00" * size)
    client.fails("malformed")
    session.go_on(client, 2)


@pytest.mark.parametrize("version", [0, 1, m.VERSION + 1, 2**31 - 1])
@pytest.mark.parametrize("more", [[], ["something", {"new": 1}]])
def test_wrong_version(client: RawClient, version: int, more: list[object]) -> None:
    hello = fields(HELLO)
    hello[1] = version
    client.send(packed([*hello, *more]))
    assert "version" in client.fails("version-mismatch").message


def test_another_vocabulary(client: RawClient) -> None:
    client.say(HELLO)
    assert "vocabulary" in client.fails("pair-mismatch").message
