"""Replies that come in slices are whole again, in their turn, whatever an edge sends."""

from __future__ import annotations

from typing import Any

import pytest

from pilotfish.base.errors import MalformedError
from pilotfish.device_runtime.link.flow import ChunkFlow
from pilotfish.device_runtime.link.line import Line
from pilotfish.device_runtime.link.reassembly import REPLY_BYTES, Reassembly, ReceivedReply
from pilotfish.device_runtime.link.retry import CancelToken
from pilotfish.wire import messages as m
from pilotfish.wire.transfer import pack
from tests.device_runtime.test_bad_edge import TIMES

ID = b"transfer"
SESSION = b"0123456789abcdef"


def tokens(start: int) -> m.Tokens:
    return m.Tokens(session=SESSION, generation=0, start=start, times=TIMES)


BODY = pack(m.encode(tokens(3)), [bytes(range(256)) * 40])


def part(offset: int, data: bytes, total: int = len(BODY), transfer: bytes = ID) -> ReceivedReply:
    reply = m.Slice(transfer=transfer, offset=offset, total=total)
    return ReceivedReply(reply, [data], len(data))


@pytest.fixture
def replies() -> Reassembly:
    return Reassembly(ChunkFlow())


def fetch(replies: Reassembly, **others: bytes) -> int:
    """Answer questions until there are none; returns the bytes that were sent."""
    sent, bodies = 0, {ID.decode(): BODY} | others
    while wanted := replies.chunk_requests():
        for more in wanted:
            body = bodies[more.transfer.decode()]
            data = body[more.offset : more.offset + more.bytes]
            sent += len(data)
            replies.take(part(more.offset, data, len(body), more.transfer))
    return sent


def test_a_large_reply_is_whole_in_the_end(replies: Reassembly) -> None:
    replies.take(part(0, BODY[:1000]))
    assert replies.next() is None
    assert fetch(replies) == len(BODY) - 1000
    first = replies.next()
    assert first is not None
    assert (first.reply, first.sliced, first.size) == (tokens(3), True, len(BODY))
    assert bytes(first.frames[0]) == bytes(range(256)) * 40
    assert not replies.is_incomplete


def test_what_comes_behind_it_keeps_its_turn(replies: Reassembly) -> None:
    other = pack(m.encode(tokens(5)), [bytes(3000)])
    welcome: Any = m.Failure(code="busy", message="of no session")
    replies.take(part(0, BODY[:1000]))
    for reply in (tokens(4), welcome):
        replies.take(ReceivedReply(reply, [], 10))
    replies.take(part(0, other[:100], len(other), b"another1"))
    replies.take(ReceivedReply(tokens(6), [], 10))
    first = replies.next()
    assert first is not None
    assert first.reply is welcome
    fetch(replies, another1=other)
    order = [replies.next() for _ in range(4)]
    assert [each and each.reply for each in order] == [tokens(start) for start in (3, 4, 5, 6)]


def test_after_a_break_only_what_is_missing_is_asked_for(replies: Reassembly) -> None:
    replies.take(part(0, BODY[:1000]))
    first = replies.chunk_requests()
    replies.take(part(1000, BODY[1000 : 1000 + first[0].bytes]))
    replies.resume()
    wanted = replies.chunk_requests()
    assert wanted[0].offset == 1000 + first[0].bytes
    replies.take(part(0, BODY[:1000]))  # late
    for more in wanted:
        replies.take(part(more.offset, BODY[more.offset : more.offset + more.bytes]))
    fetch(replies)
    assert replies.next() is not None


def test_a_reply_that_the_edge_has_not_any_more(replies: Reassembly) -> None:
    replies.take(part(0, BODY[:1000]))
    replies.take(ReceivedReply(tokens(4), [], 10))
    replies.take(part(1000, b"", total=0))
    assert replies.is_lost
    assert not replies.is_incomplete
    late = replies.next()
    assert late is not None
    replies.abandon()
    assert not replies.is_lost


@pytest.mark.parametrize(
    "arrival",
    [
        part(1000, bytes(len(BODY))),
        part(1000, b"1", total=len(BODY) + 1),
        ReceivedReply(m.Slice(transfer=ID, offset=1000, total=len(BODY)), [], 0),
        ReceivedReply(m.Slice(transfer=ID, offset=1000, total=len(BODY)), [b"1", b"2"], 0),
        part(1000, bytes(len(BODY) - 1000)),  # no message
        part(0, b"1", total=REPLY_BYTES * 2),
    ],
)
def test_an_edge_that_contradicts_itself(replies: Reassembly, arrival: ReceivedReply) -> None:
    replies.take(part(0, bytes(1000)))
    with pytest.raises(MalformedError):
        replies.take(arrival)
    assert not replies.is_incomplete


def test_a_reply_longer_than_any_is_not_begun(replies: Reassembly) -> None:
    """Nothing of it is fetched, however well its slices agree."""
    with pytest.raises(MalformedError):
        replies.take(part(0, b"1", total=REPLY_BYTES * 2))
    assert not replies.is_incomplete
    assert replies.chunk_requests() == []


def test_a_slice_inside_of_slices(replies: Reassembly) -> None:
    body = pack(m.encode(m.Slice(transfer=ID, offset=0, total=9)), [b"x"])
    with pytest.raises(MalformedError):
        replies.take(part(0, body, len(body)))


def test_replies_that_wait_take_bounded_memory(replies: Reassembly) -> None:
    replies.take(part(0, BODY[:1000]))
    for start in range(2000):
        replies.take(ReceivedReply(tokens(start), [], 100_000))
    fetch(replies)
    waited = 0
    while replies.next() is not None:
        waited += 1
    assert waited <= 1 + REPLY_BYTES // 100_000


def test_over_another_connection_nothing_is_asked_for_before_it_is_resumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two questions at once get two slices in one segment, which some paths lose for its size."""
    line = Line("tcp://127.0.0.1:1", None, CancelToken())
    requests: list[m.More] = []
    pong = ReceivedReply(m.Pong(nonce=1, received_ns=1, sent_ns=1), [], 10)
    arriving = [part(0, BODY[:1000]), pong]
    connection = 1
    monkeypatch.setattr(Line, "_receive_message", lambda self, timeout_s: arriving.pop(0))
    monkeypatch.setattr(Line, "connection", property(lambda self: connection))
    monkeypatch.setattr(line, "try_send", requests.append)
    try:
        assert line.receive(0.0) is None
        assert [more.offset for more in requests][:1] == [1000]
        connection = 2
        requests.clear()
        assert line.receive(0.0) == pong
        assert not requests
        line.resume()
        assert [more.offset for more in requests][:1] == [1000]
    finally:
        line.close()
