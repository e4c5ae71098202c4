"""Beyond the edge's limits: how long, how large, how many, how often."""

from __future__ import annotations

import time

from pilotfish import EdgeServer
from pilotfish.wire import messages as m
from pilotfish.wire.keys import DeviceKeys
from tests.conftest import CONTEXT
from tests.support.hostile import PROMPT, RawClient, RawSession, resident_mib, take_tokens
from tests.support.socketless import SocketlessEdge

MESSAGE_BYTES = 64 * 2**20
PING = m.Ping(nonce=1)


def test_overlong_prompt(client: RawClient, session: RawSession) -> None:
    for length in (CONTEXT, CONTEXT + 1, 1_000_000):
        client.send(*RawSession().begin([1] * length))
        client.fails("prompt-too-long")
    client.send(*RawSession().begin([]))
    client.fails("malformed")
    session.go_on(client, 2)


def test_a_context_that_is_full(client: RawClient, session: RawSession) -> None:
    client.send(*session.begin([1] * (CONTEXT - 1)))
    client.send(*session.window([1]))
    client.fails("too-large")
    client.send(*session.window([]))
    session.settle([], client.receive())
    client.send(*session.window([]))
    client.fails("too-large")
    client.send(*session.begin([1] * (CONTEXT - 1), "stream"))
    client.send(*session.pull(7))
    assert len(take_tokens(client, 1)) == 1


def test_a_window_beyond_the_limit(client: RawClient, session: RawSession) -> None:
    client.send(*session.window([1] * 65))
    client.fails("too-large")
    ids = [1] * 64
    client.send(*session.window(ids))
    session.settle(ids, client.receive())


def test_an_oversize_message_is_answered(client: RawClient, session: RawSession) -> None:
    half = b"\x00" * (MESSAGE_BYTES // 2)
    client.send(*session.window([], half, half))
    assert str(MESSAGE_BYTES) in client.fails("too-large").message
    session.go_on(client, 2)


def test_an_oversize_frame_costs_the_connection_and_no_more(
    locked_edge: EdgeServer, key_folders
) -> None:
    with RawClient(locked_edge.endpoint, DeviceKeys.load(key_folders["alice"])) as client:
        session = RawSession()
        client.send(*session.begin(PROMPT))
        before = session.go_on(client, 3)
        client.send(m.encode(PING), b"\x00" * (MESSAGE_BYTES + 1))
        time.sleep(0.3)  # ZeroMQ reconnects by itself
        client.send(*session.window())
        session.settle([], client.receive())  # the session is the key's, not the connection's
        assert session.committed.ids.tolist()[:-1] == before


def test_a_prompt_and_a_large_window_at_once(pair) -> None:
    """The prompt is still being read when the window comes, and pieces end at odd places."""
    with SocketlessEdge(pair.target, window=128) as edge:
        edge.start()
        for length in (1, 60, 64, 65, 100, 127, 128, 129, 192, 200):
            for width in (0, 1, 33, 63, 64, 120, 128):
                if length + width + 1 > CONTEXT:
                    continue
                prompt = [(7 * i) % 50 for i in range(length)]
                session = RawSession()
                edge.deliver(session.begin(prompt))
                ids = [(3 * i) % 50 for i in range(width)]
                edge.deliver(session.window(ids))
                session.settle(ids, edge.reply())
                edge.deliver([m.encode(m.Close(session=session.id))])


def test_too_many_sessions(pair, undisturbed) -> None:
    with (
        EdgeServer(pair.target, sessions=3, sessions_per_client=2, idle=0.5, threads=1) as edge,
        RawClient(edge.endpoint) as raw_client,
        RawClient(edge.endpoint) as two,
    ):
        a, b, c, d, e = (RawSession() for _ in range(5))
        raw_client.send(*a.begin(PROMPT))
        raw_client.send(*b.begin(PROMPT))
        raw_client.send(*c.begin(PROMPT))
        assert "limit" in raw_client.fails("too-many-sessions").message
        two.send(*d.begin(PROMPT))
        two.send(*e.begin(PROMPT))
        assert "All 3" in two.fails("too-many-sessions").message
        for client, session in ((raw_client, a), (raw_client, b), (two, d)):
            session.go_on(client, 2)
        time.sleep(0.6)
        for client, session in ((raw_client, b), (two, d)):
            session.go_on(client, 1)
        two.send(*e.begin(PROMPT))  # in the place of a, which was idle
        wanted = e.go_on(two, 3)
        raw_client.send(*a.window())
        raw_client.fails("unknown-session")
        assert b.go_on(raw_client, 0) == d.go_on(two, 0) == wanted


def test_a_stream_that_runs_is_not_idle(pair) -> None:
    with SocketlessEdge(pair.target, sessions=1, idle_s=0.2) as edge:
        busy = RawSession()
        edge.deliver(busy.begin(PROMPT, "stream"))
        edge.deliver(busy.pull(200))
        edge.start()
        deadline = time.monotonic() + 0.25
        while time.monotonic() < deadline:  # a slow target: one token at a time
            edge.replies.clear()
            time.sleep(0.02)
            edge.turn()
        edge.replies.clear()
        edge.deliver(RawSession().begin(PROMPT), client=b"another")
        assert any(
            isinstance(reply, m.Failure) and reply.code == "too-many-sessions"
            for _, reply, _ in edge.replies
        )


def test_thousands_of_sessions_opened_and_abandoned(pair) -> None:
    with EdgeServer(pair.target, sessions=4, idle=1, threads=1, rate=1e9) as edge:
        with RawClient(edge.endpoint) as client:
            before = resident_mib(edge.pid)
            refused = 0
            for _ in range(50):  # in bursts, or the edge drops unread replies
                for _ in range(20):
                    client.send(*RawSession().begin(PROMPT))
                failures = client.settle()
                assert {failure.code for failure in failures} <= {"too-many-sessions"}
                refused += len(failures)
            assert refused > 900
            for _ in range(50):
                for _ in range(10):
                    session = RawSession()
                    client.send(*session.begin(PROMPT))
                    client.say(m.Close(session=session.id))
                client.settle()
        for _ in range(20):  # each from a connection of its own
            with RawClient(edge.endpoint) as client:
                client.send(*RawSession().begin(PROMPT))
                assert {failure.code for failure in client.settle()} <= {"too-many-sessions"}
        time.sleep(1.1)  # what was abandoned yields now
        with RawClient(edge.endpoint) as client:
            session = RawSession()
            client.send(*session.begin(PROMPT))
            session.go_on(client, 3)
        assert resident_mib(edge.pid) - before < 20


def test_rate_limit(pair) -> None:
    with (
        EdgeServer(pair.target, rate=50, threads=1) as edge,
        RawClient(edge.endpoint) as greedy,
        RawClient(edge.endpoint) as modest,
    ):
        began = time.monotonic()
        replies: list[m.Reply] = []
        for _ in range(10):  # in bursts, or the edge drops unread replies
            for _ in range(30):
                greedy.say(PING)
            replies += [greedy.receive() for _ in range(30)]
        answered = [reply for reply in replies if isinstance(reply, m.Pong)]
        refused = [reply for reply in replies if isinstance(reply, m.Failure)]
        assert 50 <= len(answered) <= 51 + 50 * (time.monotonic() - began)
        assert len(refused) > 100
        assert {failure.code for failure in refused} == {"rate-limited"}
        modest.say(PING)
        assert isinstance(modest.receive(), m.Pong)
        time.sleep(0.3)
        greedy.say(PING)
        assert isinstance(greedy.receive(), m.Pong)
