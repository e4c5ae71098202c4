"""Hints of every wrong kind: none is answered, none touches a text, none stops the edge."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.ids import decode_ids
from tests.conftest import VOCAB, Pair
from tests.support.hostile import (
    PROMPT,
    RawClient,
    RawSession,
    await_idle,
    ids_bytes,
    packed,
    resident_mib,
    take_tokens,
)
from tests.support.socketless import SocketlessEdge


@pytest.fixture
def inside(pair: Pair) -> Iterator[SocketlessEdge]:
    with SocketlessEdge(pair.target) as edge:
        edge.start()
        yield edge


def text_of(edge: SocketlessEdge, protocol: str, count: int = 24) -> list[int]:
    """A generation that streams, of an honest client that sends no hints."""
    session = RawSession()
    edge.deliver(session.begin(PROMPT, protocol), b"honest")
    edge.deliver(session.pull(count), b"honest")
    return follow(edge, session, count, b"honest")


def follow(edge: SocketlessEdge, session: RawSession, count: int, client: bytes) -> list[int]:
    """Commit tokens as they come, up to an end token or this number of them."""
    while len(session.committed) < len(PROMPT) + count:
        reply, frames = edge.reply_all(client)
        assert isinstance(reply, m.Tokens), reply
        session.committed.extend(decode_ids(frames[0], VOCAB))
        if session.committed.ids[-1] == VOCAB - 1:
            break
    return session.committed.ids.tolist()


def wrong_hints(session: RawSession) -> dict[str, tuple[str, list[bytes]]]:
    """Of each kind what becomes of it, and its frames."""
    ids = [1, 2, 3]
    header, *frames = session.hint(ids)
    named = msgspec.msgpack.decode(header)
    length = len(session.committed)
    return {
        "no frames": ("malformed", [header]),
        "no odds": ("malformed", [header, frames[0]]),
        "three frames": ("malformed", [header, *frames, b""]),
        "too few odds": ("malformed", [header, frames[0], b"\xff"]),
        "half an id": ("malformed", [header, frames[0][:-1], b"\xff\xff\xff"]),
        "an id beyond the vocabulary": ("malformed", [header, ids_bytes([VOCAB] * 3), frames[1]]),
        "10,000 ids": ("malformed", session.hint([1] * 10_000)),
        "a field too few": ("refused", [packed(named[:-1]), *frames]),
        "a field too many": ("refused", [packed([*named, 1]), *frames]),
        "another type of field": ("refused", [packed([*named[:3], "x", named[4]]), *frames]),
        "a negative start": ("refused", [packed([*named[:3], -1, named[4]]), *frames]),
        "a short hash": ("refused", [packed([*named[:4], b"x"]), *frames]),
        "cut off": ("refused", [header[:-3], *frames]),
        "a forged hash": ("stale", session.hint(ids, hash=b"\0" * 8)),
        "far ahead": ("stale", session.hint(ids, start=2**31 - 1)),
        "behind what never came": ("stale", session.hint(ids, drafts_before=[7, 7])),
        "long ago": ("stale", session.hint(ids, start=0, hash=RawSession().committed.hash)),
        "other committed tokens": ("stale", session.hint([9, 9, 9], start=length - 1)),
        "nothing": ("stale", session.hint([])),
        "another generation": ("unknown", session.hint(ids, generation=session.generation + 1)),
        "an earlier one": ("unknown", session.hint(ids, generation=2**31 - 1)),
        "no such session": ("unknown", session.hint(ids, session=b"?" * 16)),
    }


KINDS = list(wrong_hints(RawSession()))


def test_every_wrong_hint_is_counted_and_never_answered(inside: SocketlessEdge) -> None:
    wanted = text_of(inside, "ahead")
    session = RawSession()
    inside.deliver(session.begin(PROMPT, "ahead"))
    inside.deliver(session.pull(24))
    for kind in KINDS:
        outcome, frames = wrong_hints(session)[kind]
        before = inside.metrics.hints.copy()
        inside.replies.clear()
        inside.deliver(frames)
        assert not inside.replies, kind
        assert inside.metrics.hints - before == {outcome: 1}, kind
    assert follow(inside, session, 24, b"me") == wanted
    assert inside.metrics.refusals.total() == 0


@pytest.mark.parametrize("protocol", ["stream", "greedy", "coupled"])
def test_generations_that_take_no_hints(inside: SocketlessEdge, protocol: str) -> None:
    session = RawSession()
    inside.deliver(session.begin(PROMPT, protocol))
    for _ in range(5):
        inside.deliver(session.hint([1, 2, 3]))
    inside.deliver(RawSession().hint([1], generation=0))  # without begin
    assert inside.metrics.hints == {"unknown": 6}
    assert not inside.replies
    if protocol == "stream":
        inside.deliver(session.pull(24))
        assert follow(inside, session, 24, b"me") == text_of(inside, "ahead")
    else:
        inside.deliver(session.window([1]))
        assert isinstance(inside.reply(), m.Verdict)


def test_a_session_of_another_takes_no_hints_from_me(inside: SocketlessEdge) -> None:
    session = RawSession()
    inside.deliver(session.begin(PROMPT, "ahead"), b"honest")
    inside.deliver(session.hint([1, 2, 3]), b"thief")
    assert inside.metrics.hints == {"unknown": 1}
    assert not inside.replies


def test_windows_to_a_generation_under_ahead_are_refused(inside: SocketlessEdge) -> None:
    session = RawSession()
    inside.deliver(session.begin(PROMPT, "ahead"))
    inside.deliver(session.window([1, 2]))
    inside.fails("malformed")


@pytest.mark.parametrize("protocol", ["stream", "ahead"])
@pytest.mark.parametrize("fewer", [0, 1, 3])
def test_a_pull_of_fewer_tokens_while_a_pass_is_made(
    inside: SocketlessEdge, protocol: str, fewer: int
) -> None:
    """What was asked for meanwhile is less than what is under way: the edge goes on."""
    wanted = text_of(inside, protocol)
    session = RawSession()
    inside.deliver(session.begin(PROMPT, protocol))
    inside.deliver(session.pull(24))
    inside.deliver(session.hint(wanted[len(PROMPT) :][:9]))
    for _ in range(4):
        inside.deliver(session.pull(fewer))
        inside.turn()
    inside.deliver(session.pull(24))
    text = session.committed
    while len(text) < len(wanted):
        reply, frames = inside.reply_all()
        assert isinstance(reply, m.Tokens), reply
        if reply.start <= len(text):
            ids = decode_ids(frames[0], VOCAB).tolist()
            text.extend(ids[len(text) - reply.start :])
    assert text.ids.tolist()[: len(wanted)] == wanted


def test_sure_and_always_wrong_hints_cost_a_purse(
    inside: SocketlessEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 ids of odds 255 a pass, none of them right: they ride a few times, then hardly ever."""
    wanted = text_of(inside, "ahead", 200)
    before = sum(inside.metrics.hint_drafts.values())
    price = inside.scheduler.draft_cost
    for width in (1, 16) * 200:  # a target whose positions cost something
        price.record_pass(width, 0.001 + 0.01 * width)
        price.record_tokens(1)
    monkeypatch.setattr(price, "record_pass", lambda *_: None)
    monkeypatch.setattr(price, "record_tokens", lambda *_: None)
    session = RawSession()
    inside.deliver(session.begin(PROMPT, "ahead", options={"hints": "device"}))
    inside.deliver(session.pull(200))
    passes = 0
    while len(session.committed) < len(wanted):
        right = wanted[len(session.committed)]
        inside.deliver(session.hint([(right + 1) % VOCAB] * 128))
        follow(inside, session, len(session.committed) - len(PROMPT) + 1, b"me")
        passes += 1
    assert session.committed.ids.tolist() == wanted
    assert inside.metrics.hints["kept"] == passes
    assert inside.metrics.hint_accepted["device"] == 0
    drafts = sum(inside.metrics.hint_drafts.values()) - before
    assert 0 < drafts * price.tokens_per_draft <= 4.0 + 0.01 * passes


def test_a_flood_at_a_real_edge(pair: Pair) -> None:
    """As fast as it can, beyond the rate, of every kind: others' texts stay, memory is bounded.

    A sender may be faster than the edge: then what waits counts, up to a message's size, which in
    small frames takes four times its bytes. None of it remains.
    """
    options = {"protocol": "ahead", "max_tokens": 60, "temperature": 1.0, "seed": 3}
    with (
        EdgeServer(pair.target, threads=1, rate=2000, message_mib=16) as edge,
        Device(pair.draft, edge.endpoint, threads=1) as device,
        RawClient(edge.endpoint) as hostile,
    ):
        wanted = device.generate(PROMPT, **options | {"protocol": "stream"}).tokens
        session = RawSession()
        hostile.send(*session.begin(PROMPT, "ahead", top_k=1))
        hostile.send(*session.pull(3))
        take_tokens(hostile, 3)
        kinds = [frames for _, frames in wrong_hints(session).values()]
        kinds += [session.hint([1] * 128), session.hint([2] * 128)] * 10
        before, end_s, sent = resident_mib(edge.pid), time.monotonic() + 1.5, 0
        while time.monotonic() < end_s:
            for frames in kinds:
                hostile.send(*frames)
            sent += len(kinds)
            if sent % (100 * len(kinds)) == 0:
                assert device.generate(PROMPT, **options).tokens == wanted
        assert sent > 3 * 2000
        assert device.generate(PROMPT, **options).tokens == wanted
        assert resident_mib(edge.pid) - before < 4 * 16
        await_idle(edge.pid)
        time.sleep(1.0)  # freed memory is returned by then, and the rate is there for requests
        assert resident_mib(edge.pid) - before < 16
        assert not hostile.settle()  # not one was answered
