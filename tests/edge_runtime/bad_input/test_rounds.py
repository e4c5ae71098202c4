"""Rounds at the wrong place: positions, hashes, generations, retries, and messages that cross."""

from __future__ import annotations

import time

import pytest

from pilotfish import EdgeServer
from pilotfish.wire import messages as m
from pilotfish.wire.committed_tokens import CommittedTokens
from tests.conftest import CONTEXT, VOCAB
from tests.support.hostile import PROMPT, RawClient, RawSession, take_tokens
from tests.support.socketless import SocketlessEdge


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 0},
        {"start": len(PROMPT) - 1},
        {"start": len(PROMPT) + 1},
        {"start": 2**31 - 1},
        {"hash": b"12345678"},
        {"hash": CommittedTokens().hash},
        {"generation": 1},
        {"generation": 2**31 - 1},
    ],
)
def test_wrong_start_hash_or_generation(
    client: RawClient, session: RawSession, changes: dict[str, object]
) -> None:
    client.send(*session.window([1], **changes))
    client.fails("diverged")
    session.go_on(client, 2)


@pytest.mark.parametrize("changes", [{"start": 6}, {"start": 2**31 - 1}, {"hash": b"12345678"}])
def test_wrong_start_or_hash_of_a_stream(client: RawClient, changes: dict[str, object]) -> None:
    session = RawSession()
    client.send(*session.begin(PROMPT, "stream"))
    client.send(*session.pull(3, **changes))
    client.fails("diverged")
    client.send(*session.pull(3))
    assert len(take_tokens(client, 3)) == 3


@pytest.mark.parametrize("keep", [1, len(PROMPT) + 1])
def test_keeping_tokens_that_the_edge_does_not_have(client: RawClient, keep: int) -> None:
    session = RawSession()
    client.send(*session.begin(PROMPT, keep=keep))
    client.fails("unknown-session")
    client.send(*session.begin(PROMPT))
    client.send(*session.begin(PROMPT, keep=keep))
    client.fails("diverged")
    client.send(*session.begin(PROMPT, keep=2**31 - 1))
    client.fails("prompt-too-long")
    session.generation -= 2  # the edge did not go along
    session.go_on(client, 2)


def test_a_generation_that_goes_backwards_or_comes_again(
    client: RawClient, session: RawSession
) -> None:
    first = session.begin(PROMPT)
    client.send(*first)
    client.send(*session.begin([9, 9]))
    client.send(*first)
    client.fails("diverged")
    client.send(*RawSession(session.id).begin([8]))
    client.fails("diverged")
    assert session.go_on(client, 2)[:2] == [9, 9]


def test_a_wrong_hash_of_nothing_opens_no_session(edge: EdgeServer, client: RawClient) -> None:
    for _ in range(20):  # more than this client may open
        client.send(*RawSession().begin(PROMPT, hash=b"12345678"))
        client.fails("diverged")
    session = RawSession()
    client.send(*session.begin(PROMPT))
    session.go_on(client, 1)


def test_a_window_again_gets_the_same_verdict(client: RawClient, session: RawSession) -> None:
    window = session.window([6, 7, 8])
    client.send(*window)
    verdict = client.receive()
    for _ in range(3):
        client.send(*window)
        assert client.receive() == verdict
    session.settle([6, 7, 8], verdict)
    session.go_on(client, 2)


@pytest.mark.parametrize("other", [[6, 7], [6, 7, 9], [6, 7, 8, 1], []])
def test_a_different_window_at_a_start_already_answered(
    client: RawClient, session: RawSession, other: list[int]
) -> None:
    ids = [6, 7, 8]
    changed = session.window(other)
    client.send(*session.window(ids))
    verdict = client.receive()
    client.send(*changed)
    client.fails("conflict")
    session.settle(ids, verdict)
    session.go_on(client, 2)


def test_the_same_window_on_another_past(client: RawClient, session: RawSession) -> None:
    ids = [6, 7, 8]
    changed = session.window(ids, hash=b"12345678")
    client.send(*session.window(ids))
    session.settle(ids, client.receive())
    client.send(*changed)
    client.fails("diverged")
    session.go_on(client, 2)


def test_windows_during_an_unfinished_window(pair, undisturbed) -> None:
    with SocketlessEdge(pair.target) as edge:
        session = RawSession()
        edge.deliver(session.begin(PROMPT))
        window = session.window([6, 7])
        edge.deliver(window)
        edge.deliver(session.window([6, 8]))
        edge.fails("conflict")
        edge.deliver(session.window([6], start=len(PROMPT) + 1))
        edge.fails("conflict")
        edge.deliver(window)  # a retry: it is answered when the first one is
        edge.start()
        session.settle([6, 7], edge.reply())
        edge.turn()
        assert not edge.replies
        edge.deliver(window)
        assert isinstance(edge.reply(), m.Verdict)


def test_windows_of_a_stream_and_pulls_of_a_speculation(client: RawClient) -> None:
    session = RawSession()
    client.send(*session.begin(PROMPT, "stream"))
    client.send(*session.window([1]))
    client.fails("malformed")
    client.send(*session.begin(PROMPT))
    client.send(*session.pull(5))
    client.fails("malformed")
    session.go_on(client, 2)


def test_begin_and_cancel_during_a_stream(client: RawClient) -> None:
    session = RawSession()
    client.send(*session.begin(PROMPT))
    wanted = session.go_on(client, 6)
    session = RawSession()
    for stop in ("begin", "cancel"):
        client.send(*session.begin(PROMPT, "stream"))
        client.send(*session.pull(2**31 - 1))
        take_tokens(client, 3)
        if stop == "cancel":
            client.say(m.Cancel(session=session.id, generation=session.generation))
        client.send(*session.begin(PROMPT))
        client.send(*session.window())
        replies = client.settle()
        while not (replies and isinstance(replies[-1], m.Verdict)):
            replies.append(client.receive())
        assert all(isinstance(r, m.Tokens) for r in replies[:-1])
        session.settle([], replies[-1])
        assert session.go_on(client, 5) == wanted


def test_a_pull_without_end_ends_with_the_context(client: RawClient) -> None:
    session = RawSession()
    client.send(*session.begin([4] * (CONTEXT - 20), "stream", temperature=0.0))
    client.send(*session.pull(2**31 - 1))
    tokens = take_tokens(client, 1)
    while tokens[-1] != VOCAB - 1 and len(tokens) < 20:
        tokens += take_tokens(client, 1)
    time.sleep(0.1)
    assert client.settle() == []


def test_a_pull_of_nothing_says_nothing(client: RawClient) -> None:
    session = RawSession()
    client.send(*session.begin(PROMPT, "stream"))
    client.send(*session.pull(0))
    assert client.settle() == []
    client.send(*session.pull(1))
    assert len(take_tokens(client, 1)) == 1
