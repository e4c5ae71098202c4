"""An edge that lies about large messages: every request ends, and little is sent in vain."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest

from pilotfish.base.errors import MalformedError, PilotfishError
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.retry import RetryPolicy
from pilotfish.wire import messages as m
from pilotfish.wire.transfer import pack
from tests.conftest import Pair
from tests.device_runtime.test_bad_edge import Answer, LyingEdge

HELLO = m.Hello(
    version=m.VERSION, tokenizer="", vocab_size=1, padded_vocab_size=1, hidden_size=1, bridges=True
)
PATIENCE = RetryPolicy("fail", absent_s=0.4, silent_s=0.5)
SIZE = 60_000
Script = Callable[[m.DeviceMessage], list[Answer]]


class ChunkingLiar(LyingEdge):
    """Answers chunks by its script."""

    assembles = False


@pytest.fixture
def linked(pair: Pair) -> Iterator[Callable[[Script], tuple[LyingEdge, EdgeLink]]]:
    opened: list[LyingEdge | EdgeLink] = []

    def make(script: Script) -> tuple[LyingEdge, EdgeLink]:
        edge = ChunkingLiar(pair, script)
        edge.start()
        link = EdgeLink(edge.endpoint, None, PATIENCE)
        opened.extend([edge, link])
        link.set_hello(HELLO)
        return edge, link

    yield make
    for each in reversed(opened):
        each.close() if isinstance(each, EdgeLink) else each.stop()


def ask(link: EdgeLink, size: int) -> None:
    link.request(m.Ping(nonce=1), [bytes(size)], lambda reply: isinstance(reply, m.Pong))


def ack(chunk: m.Chunk, offset: int) -> Answer:
    return [m.Ack(transfer=chunk.transfer, offset=offset)]


ticks = itertools.count()
ACKS: dict[str, Callable[[m.Chunk], list[Answer]]] = {
    "none": lambda c: [[m.Pong(nonce=9, received_ns=1, sent_ns=1)]],
    "beyond the message": lambda c: [ack(c, c.total + 1)],
    "of another message": lambda c: [[m.Ack(transfer=b"another1", offset=c.total)]],
    "of nothing": lambda c: [ack(c, 0)],
    "now more and now less": lambda c: [ack(c, (c.offset + 1) * (next(ticks) % 2))],
    "less and less": lambda c: [ack(c, max(0, 5000 - 50 * next(ticks)))],
}


@pytest.mark.parametrize("on_wait", ACKS.values(), ids=ACKS.keys())
def test_wrong_acknowledgements_end(
    linked: Callable[[Script], tuple[LyingEdge, EdgeLink]],
    on_wait: Callable[[m.Chunk], list[Answer]],
) -> None:
    edge, link = linked(lambda request: on_wait(request) if isinstance(request, m.Chunk) else [])
    began_s = time.monotonic()
    with pytest.raises(PilotfishError):
        ask(link, SIZE)
    assert time.monotonic() - began_s < 8.0
    assert len(edge.requests) < 100


REPLY = pack(m.encode(m.Pong(nonce=1, received_ns=1, sent_ns=1)), [bytes(SIZE)])


def slice_of(offset: int, size: int, transfer: bytes = b"a reply1", total: int = 0) -> Answer:
    header = m.Slice(transfer=transfer, offset=offset, total=total or len(REPLY))
    return [header, REPLY[offset : offset + size]]


def announced(transfer: bytes = b"a reply1") -> Answer:
    return slice_of(0, 1000, transfer)


def missing(more: m.More) -> Answer:
    return [m.Slice(transfer=more.transfer, offset=more.offset, total=0), b""]


SLICES: dict[str, Callable[[m.More], list[Answer]]] = {
    "nothing": lambda more: [[m.Ack(transfer=more.transfer, offset=0)]],
    "that it is gone": lambda more: [missing(more)],
    "the first again": lambda more: [announced()],
    "no bytes": lambda more: [slice_of(more.offset, 0)],
    "another reply": lambda more: [announced(next(ticks).to_bytes(8, "big"))],
    "a little, then that it is gone": lambda more: [slice_of(1000, 1000), missing(more)],
}


@pytest.mark.parametrize("on_wait", SLICES.values(), ids=SLICES.keys())
def test_a_reply_that_never_is_whole_ends(
    linked: Callable[[Script], tuple[LyingEdge, EdgeLink]],
    on_wait: Callable[[m.More], list[Answer]],
) -> None:
    def script(request: m.DeviceMessage) -> list[Answer]:
        if isinstance(request, m.More):
            return on_wait(request)
        return [announced()] if isinstance(request, m.Ping) else []

    edge, link = linked(script)
    began_s = time.monotonic()
    with pytest.raises(PilotfishError):
        ask(link, 100)
    assert time.monotonic() - began_s < 8.0
    assert len(edge.requests) < 100


@pytest.mark.parametrize(
    "bad",
    [
        slice_of(len(REPLY) - 10, 1000, total=len(REPLY) - 5),
        slice_of(1000, 1000, total=len(REPLY) + 1),
        [m.Slice(transfer=b"a reply1", offset=1000, total=1 << 30), b"x"],
        [m.Slice(transfer=b"a reply1", offset=1000, total=len(REPLY)), b"x", b"y"],
    ],
)
def test_slices_that_cannot_be_are_refused(
    linked: Callable[[Script], tuple[LyingEdge, EdgeLink]], bad: Answer
) -> None:
    def script(request: m.DeviceMessage) -> list[Answer]:
        if isinstance(request, m.More):
            return [bad]
        return [announced()] if isinstance(request, m.Ping) else []

    _, link = linked(script)
    with pytest.raises(MalformedError):
        ask(link, 100)
