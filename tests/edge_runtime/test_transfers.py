"""Large messages in chunks and slices: each arrives as it was, once, and costs bounded memory."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import BusyError, MalformedError, PilotfishError, TooLargeError
from pilotfish.edge_runtime import transfers
from pilotfish.edge_runtime.replies import Downloads
from pilotfish.edge_runtime.transfers import Uploads
from pilotfish.wire import messages as m
from pilotfish.wire.transfer import pack, unpack
from pilotfish.wire.transport import Envelope
from tests.conftest import Pair
from tests.support.examples import examples
from tests.support.hostile import PROMPT, RawSession, drafted
from tests.support.socketless import SocketlessEdge

ID = b"transfer"
MOST = 100_000


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def uploads(clock: Clock) -> Uploads:
    return Uploads(MOST, clock)


def chunk(offset: int, total: int, transfer: bytes = ID) -> m.Chunk:
    return m.Chunk(transfer=transfer, offset=offset, total=total)


def put(uploads: Uploads, body: bytes, offset: int, size: int, owner: bytes = b"me") -> Any:
    return uploads.receive_chunk(owner, chunk(offset, len(body)), body[offset : offset + size])


@given(
    st.binary(min_size=1, max_size=200),
    st.lists(st.tuples(st.integers(0, 199), st.integers(0, 80)), max_size=30),
    st.randoms(use_true_random=False),
)
@examples(200)
def test_chunks_in_any_order_make_the_message_once(
    body: bytes, tries: list[tuple[int, int]], random: Any
) -> None:
    """Cut anywhere, repeated, out of order, with holes; whoever goes on where the edge is, ends."""
    uploads, made, here = Uploads(MOST), [], 0
    for offset, size in tries:
        if 0 < size <= len(body) - offset:
            here, message = put(uploads, body, offset, size)
            made += [] if message is None else [bytes(message)]
    while here < len(body):
        here, message = put(uploads, body, here, random.randint(1, 50))
        made += [] if message is None else [bytes(message)]
        repeated = random.randint(0, max(0, here - 1))
        assert put(uploads, body, repeated, random.randint(1, max(1, here - repeated)))[1] is None
    assert made == [body]


def test_whoever_asks_after_the_end_misses_the_reply(uploads: Uploads) -> None:
    body = b"a message"
    assert put(uploads, body, 0, 9).message == body
    assert put(uploads, body, 5, 4) == (9, None)  # a last chunk that was sent twice
    assert put(uploads, body, 0, 0).message == body
    uploads.mark_served(b"me", ID, keep=False)
    assert put(uploads, body, 0, 0) == (9, None)
    assert uploads.total_bytes == 0


def test_nobody_goes_on_with_the_message_of_another(uploads: Uploads) -> None:
    body = b"a message"
    put(uploads, body, 0, 5, owner=b"alice")
    assert put(uploads, body, 5, 4, owner=b"bob") == (0, None)
    assert put(uploads, body, 0, 0, owner=b"bob") == (0, None)
    assert len(uploads) == 1


@pytest.mark.parametrize(
    ("offset", "total", "size", "error"),
    [
        (0, MOST + 1000, 1, TooLargeError),
        (0, 2**31 - 1, 1, TooLargeError),
        (0, 10, 11, MalformedError),
        (10, 10, 1, MalformedError),
        (0, 0, 0, MalformedError),
        (5, 9, 1, MalformedError),  # another total than before
    ],
)
def test_what_cannot_be_is_refused(
    uploads: Uploads, offset: int, total: int, size: int, error: type[PilotfishError]
) -> None:
    put(uploads, bytes(20), 0, 5)
    with pytest.raises(error):
        uploads.receive_chunk(b"me", chunk(offset, total), bytes(size))
    assert uploads.total_bytes == 5


def test_a_chunk_that_is_too_long_is_refused(clock: Clock) -> None:
    with pytest.raises(MalformedError):
        Uploads(1 << 22, clock).receive_chunk(b"me", chunk(0, 1 << 21), bytes(m.MAX_CHUNK + 1))


def test_thousands_of_transfers_take_no_more_memory(uploads: Uploads, clock: Clock) -> None:
    busy = 0
    for number in range(5000):
        clock.now_s += 0.01
        try:
            uploads.receive_chunk(b"me", chunk(0, 50_000, number.to_bytes(8, "big")), bytes(40_000))
        except BusyError:
            busy += 1
        assert uploads.total_bytes <= MOST + 100
        assert len(uploads) <= 8
    assert busy > 4000  # what is in use is not dropped for what comes


def test_each_lane_of_a_service_has_room(uploads: Uploads) -> None:
    """A service has 64 at most, and all of them may wait for a slow link."""
    body = bytes(1500)
    for at in (0, 750):
        for lane in range(64):
            uploads.receive_chunk(
                b"me", chunk(at, 1500, lane.to_bytes(8, "big")), body[at : at + 750]
            )
    assert len(uploads) == 64
    assert uploads.total_bytes == 64 * 1500


def test_a_few_keys_do_not_keep_all_others_out(uploads: Uploads, clock: Clock) -> None:
    """Their messages go on and on: who holds most makes room."""
    holders = [bytes([owner]) for owner in range(4)]
    for holder in holders:
        for number in range(8):
            uploads.receive_chunk(holder, chunk(0, 13_000, bytes([number] * 8)), bytes(12_000))
    for _ in range(20):
        clock.now_s += 1.0
        body = bytes(20_000)
        assert put(uploads, body, 0, 10_000, owner=b"honest").offset == 10_000
        assert put(uploads, body, 10_000, 10_000, owner=b"honest").message == body
        for holder in holders:
            with suppress(BusyError):
                number = secrets.token_bytes(8)
                uploads.receive_chunk(holder, chunk(0, 13_000, number), bytes(12_000))
    assert uploads.total_bytes <= 4 * (MOST + 100)


def test_so_few_bytes_in_so_many_transfers_keep_nobody_out(clock: Clock) -> None:
    uploads = Uploads(MOST, clock)
    for number in range(1024):
        owner = (number // 64).to_bytes(2, "big")
        uploads.receive_chunk(owner, chunk(0, 100, number.to_bytes(8, "big")), b"a")
    body = bytes(20_000)
    assert put(uploads, body, 0, 20_000, owner=b"honest").message == body
    assert len(uploads) <= 1024


def test_all_clients_together_are_bounded_and_idle_ones_give_way(
    uploads: Uploads, clock: Clock
) -> None:
    def begin(owner: int) -> None:
        uploads.receive_chunk(owner.to_bytes(8, "big"), chunk(0, 60_000), bytes(50_000))

    for owner in range(8):
        begin(owner)
    with pytest.raises(BusyError):
        begin(9)
    clock.now_s += 6.0
    begin(9)
    assert uploads.total_bytes <= 4 * (MOST + 100)
    clock.now_s += 61.0
    uploads.expire()
    assert (len(uploads), uploads.total_bytes) == (0, 0)


def test_a_served_message_gives_way_first(uploads: Uploads) -> None:
    put(uploads, bytes(60_000), 0, 60_000)
    uploads.receive_chunk(b"me", chunk(0, 90_000, b"another1"), bytes(90_000))
    assert uploads.total_bytes == 90_000


# Replies

HELLO: dict[str, Any] = {
    "version": m.VERSION,
    "tokenizer": "",
    "vocab_size": 1,
    "padded_vocab_size": 1,
    "hidden_size": 1,
    "bridges": True,
}


class Outbox:
    """What was sent, and whether it is taken."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, m.Reply, list[bytes]]] = []
        self.takes = True

    def __call__(self, client: bytes, reply: m.Reply, frames: Any) -> bool:
        if self.takes:
            self.sent.append((client, reply, list(map(bytes, frames))))
        return self.takes


def test_a_large_reply_is_fetched_and_repeats_are_counted(clock: Clock) -> None:
    outbox = Outbox()
    downloads = Downloads(outbox, clock)
    downloads.set_slice_limit(b"first", b"me", 1000)
    pong = m.Pong(nonce=1, received_ns=2, sent_ns=3)
    frame = secrets.token_bytes(5000)
    assert downloads.send(b"first", pong, (frame,))
    assert downloads.send(b"first", pong, (frame[:1000],))
    assert downloads.send(b"other", pong, (frame,))
    (_, announced, (body,)), *whole = outbox.sent
    assert isinstance(announced, m.Slice)
    assert [reply for _, reply, _ in whole] == [pong, pong]
    assert len(body) == 1000
    got = bytearray(body)
    while len(got) < announced.total:
        more = m.More(transfer=announced.transfer, offset=len(got), bytes=700)
        assert downloads.more(b"second", b"me", more) == 0
        got += outbox.sent[-1][2][0]
    header, frames = unpack(got)
    assert m.decode_reply(header) == pong
    assert list(map(bytes, frames)) == [frame]
    again = m.More(transfer=announced.transfer, offset=0, bytes=700)
    assert downloads.more(b"second", b"me", again) == 700
    downloads.more(b"third", b"another", again)
    assert outbox.sent[-1][1] == m.Slice(transfer=announced.transfer, offset=0, total=0)


def test_replies_that_nobody_fetches_are_bounded(clock: Clock) -> None:
    outbox = Outbox()
    downloads = Downloads(outbox, clock)
    downloads.set_slice_limit(b"me", b"me", 1)
    pong = m.Pong(nonce=1, received_ns=2, sent_ns=3)
    for _ in range(20):
        downloads.send(b"me", pong, (bytes(1 << 20),))
        assert len(downloads) <= 15
    whole = [reply for _, reply, _ in outbox.sent if reply == pong]
    assert len(whole) == 5  # as ever, where there is no room
    clock.now_s += 61.0
    downloads.expire()
    assert len(downloads) == 0
    outbox.takes = False
    assert not downloads.send(b"me", pong, (bytes(1000),))
    assert len(downloads) == 0


def test_connections_without_end_are_not_all_remembered(clock: Clock) -> None:
    """The edge remembers the latest connections; it sends whole replies to all older ones."""
    outbox = Outbox()
    downloads = Downloads(outbox, clock)
    for client in range(4097):
        downloads.set_slice_limit(b"%d" % client, b"me", 1000)
    for client in (b"0", b"4096"):
        downloads.send(client, m.Pong(nonce=1, received_ns=2, sent_ns=3), (bytes(5000),))
    assert [type(reply) for _, reply, _ in outbox.sent] == [m.Pong, m.Slice]


# The edge's service


@pytest.fixture
def edge(pair: Pair) -> Iterator[SocketlessEdge]:
    with SocketlessEdge(pair.target, message_mib=1) as edge:
        edge.start()
        yield edge


def deliver(edge: SocketlessEdge, parts: list[bytes], client: bytes, owner: bytes = b"key") -> None:
    header, *rest = parts
    edge.service.handle(Envelope(client, owner, header, rest, sum(map(len, parts))))


def chunks(parts: list[bytes], size: int, transfer: bytes = ID) -> list[list[bytes]]:
    body = pack(parts[0], parts[1:])
    return [
        [m.encode(chunk(at, len(body), transfer)), body[at : at + size]]
        for at in range(0, len(body), size)
    ]


def test_a_window_in_chunks_is_answered_once_and_again_elsewhere(edge: SocketlessEdge) -> None:
    session = RawSession()
    for part in chunks(session.begin(PROMPT, "dsd"), 50):
        deliver(edge, part, b"one")
        assert isinstance(edge.reply(b"one"), m.Ack)
    window = chunks(session.propose("dsd", drafted("dsd", (1, 1))), 200, b"window00")
    for number, part in enumerate(window):
        client = b"two" if number else b"one"
        deliver(edge, part, client)
        assert isinstance(edge.reply(client), m.Ack)
    verdict = edge.reply(b"two")
    assert isinstance(verdict, m.Verdict)
    deliver(edge, window[-1], b"two")
    assert isinstance(edge.reply(b"two"), m.Ack)
    first = m.decode_device_message(window[0][0])
    assert isinstance(first, m.Chunk)
    deliver(edge, [m.encode(chunk(0, first.total, b"window00")), b""], b"three")
    assert isinstance(edge.reply(b"three"), m.Ack)
    assert edge.reply(b"three") == verdict
    assert not edge.replies
    assert edge.metrics.refusals.total() == 0


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([m.encode(chunk(0, 5, b"another1")), b"again"], "malformed"),
        ([b"nonsense"], "malformed"),
        ([m.encode(m.Fetch(vocabulary="none", part=0))], "pair-mismatch"),
        ([m.encode(m.Ping(nonce=1)), *[b""] * 8, b"too many"], "malformed"),
    ],
)
def test_a_message_in_chunks_is_refused_as_if_it_came_whole(
    edge: SocketlessEdge, parts: list[bytes], code: str
) -> None:
    body = b"\xdc" + len(parts).to_bytes(2, "big") + pack(parts[0], parts[1:9])[1:]
    if len(parts) <= 9:
        body = pack(parts[0], parts[1:])
    deliver(edge, [m.encode(chunk(0, len(body))), body], b"one")
    assert isinstance(edge.reply(b"one"), m.Ack)
    failure = edge.reply(b"one")
    assert isinstance(failure, m.Failure)
    assert failure.code == code


def test_transfers_that_nobody_goes_on_with_are_dropped_in_time(
    edge: SocketlessEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver(edge, [m.encode(m.Hello(**HELLO, reply_bytes=1000))], b"one")
    edge.reply(b"one")
    ping = [m.encode(m.Ping(nonce=1)), bytes(5000)]
    deliver(edge, ping, b"one")
    pong = edge.reply(b"one")
    assert isinstance(pong, m.Slice)
    total = len(pack(ping[0], ping[1:]))
    deliver(edge, chunks(ping, 100)[0], b"one")
    assert edge.reply(b"one") == m.Ack(transfer=ID, offset=100)
    for limit_s, there in ((60.0, True), (0.0, False)):
        monkeypatch.setattr(transfers, "_EXPIRE_S", limit_s)
        edge.service.expire()
        deliver(edge, [m.encode(chunk(0, total)), b""], b"one")
        assert edge.reply(b"one") == m.Ack(transfer=ID, offset=100 * there)
        deliver(edge, [m.encode(m.More(transfer=pong.transfer, offset=0, bytes=100))], b"one")
        part = edge.reply(b"one")
        assert isinstance(part, m.Slice)
        assert part.total == pong.total * there


def test_questions_for_a_large_reply_are_paid_for(edge: SocketlessEdge) -> None:
    """Whoever asks with a few bytes is not sent a large reply as often as he likes."""
    ping = [m.encode(m.Ping(nonce=1)), bytes(200_000)]
    parts = chunks(ping, 200_000)
    for part in parts:
        deliver(edge, part, b"one")
    total = len(pack(ping[0], ping[1:]))
    for _ in range(500):
        deliver(edge, [m.encode(chunk(0, total)), b""], b"one")
    pongs = [reply for _, reply, _ in edge.replies if isinstance(reply, m.Pong)]
    assert len(pongs) < 150
