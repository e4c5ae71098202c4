"""What the target works on, and what it does not: batches, abandoned work, prompts read once."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pilotfish.edge_runtime.scheduler import Job
from pilotfish.engines.engine import CHUNK
from pilotfish.engines.engine_errors import ProviderError
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.logprobs import decode_logprobs
from pilotfish.wire.protocols import Decision
from tests.conftest import VOCAB
from tests.support.hostile import RawSession
from tests.support.passes import collect, run
from tests.support.socketless import SocketlessEdge

LONG = [(7 * i) % 50 for i in range(200)]


def greedy_text(edge: SocketlessEdge, prompt: list[int], client: bytes = b"me") -> list[int]:
    session = RawSession()
    edge.deliver(session.begin(prompt), client)
    for _ in range(4):
        edge.deliver(session.window(), client)
        session.settle([], edge.reply(client))
    return session.committed.ids.tolist()


def test_work_of_closed_sessions_is_dropped(pair) -> None:
    with SocketlessEdge(pair.target, sessions=2) as edge:
        for _ in range(200):
            session = RawSession()
            edge.deliver(session.begin(LONG))
            edge.deliver(session.window([1, 2]))
            edge.deliver([m.encode(m.Close(session=session.id))])
        edge.start()
        greedy_text(edge, [1, 2, 3], b"another")
        assert edge.scheduler.passes <= 5


def test_work_of_abandoned_generations_is_dropped(pair) -> None:
    with SocketlessEdge(pair.target, sessions=2) as edge:
        session = RawSession()
        for i in range(200):
            edge.deliver(session.begin([i % 50, *LONG]))
            edge.deliver(session.window([1, 2]))
        edge.start()
        session.settle([1, 2], edge.reply())
        assert edge.scheduler.passes <= 4


def test_a_prompt_is_read_once_though_the_window_comes_early(pair) -> None:
    with SocketlessEdge(pair.target) as edge:
        session = RawSession()
        edge.deliver(session.begin(LONG))
        edge.deliver(session.window([1, 2]))
        edge.start()
        session.settle([1, 2], edge.reply())
        assert edge.scheduler.passes == -(-len(LONG) // CHUNK) + 1


def test_a_session_goes_on_from_what_its_slot_holds(pair) -> None:
    with SocketlessEdge(pair.target) as edge:
        edge.start()
        session = RawSession()
        edge.deliver(session.begin(LONG))
        edge.deliver(session.window([1, 2]))
        session.settle([1, 2], edge.reply())
        before = edge.scheduler.passes
        selection, rest = session.committed.ids.tolist(), [5, 6, 7]
        digest = session.committed.hash
        frames = session.begin(rest, keep=len(selection), hash=digest)
        session.committed.truncate(0)
        session.committed.extend([*selection, *rest])
        edge.deliver(frames)
        edge.deliver(session.window())
        session.settle([], edge.reply())
        assert edge.scheduler.passes - before == 2
        got = session.committed.ids.tolist()
        assert got == greedy_text(edge, [*selection, *rest])[: len(got)]


def test_a_slot_keeps_nothing_of_another_session(pair) -> None:
    """Not even what both have in common: how fast a prompt is read would tell."""
    with SocketlessEdge(pair.target, sessions=1) as edge:
        edge.start()
        costs = []
        for _ in range(2):
            before = edge.scheduler.passes
            session = RawSession()
            edge.deliver(session.begin(LONG))
            edge.deliver(session.window())
            session.settle([], edge.reply())
            edge.deliver([m.encode(m.Close(session=session.id))])
            costs.append(edge.scheduler.passes - before)
        assert costs[0] == costs[1] == 3


def test_a_rule_that_fails_fails_its_own_round_only(pair) -> None:
    def broken(logits: object, hidden: object) -> Decision:
        raise ArithmeticError("on purpose")

    with SocketlessEdge(pair.target) as edge:
        rules = [lambda logits, hidden: Decision(0, int(logits[0].argmax())), broken]
        jobs = [
            Job(bytes([i]) * 16, i, np.array([1, 2, 3]), rows=1, verify=rule)
            for i, rule in enumerate(rules)
        ]
        for job in jobs:
            edge.scheduler.submit(job)
        done = run(edge.scheduler)
        assert edge.scheduler.passes == 1
        assert done[0].error is None
        assert done[0].decision is not None
        assert isinstance(done[1].error, ArithmeticError)


@pytest.mark.parametrize("mode", ["next generation", "same id"])
def test_work_for_an_earlier_text_does_not_reach_the_next(pair, mode: str) -> None:
    """Old work ends after the session has been begun anew: its keys and values mean nothing now."""
    a, b = LONG, [9, *LONG[:120]]
    with SocketlessEdge(pair.target, sessions=1) as edge:
        edge.start()
        wanted = greedy_text(edge, b)
        edge.close()
    with SocketlessEdge(pair.target, sessions=1) as edge:
        edge.start()
        for _ in range(5):
            session = RawSession()
            edge.deliver(session.begin(a))
            edge.deliver(session.window([1]))
            if mode == "same id":
                edge.deliver([m.encode(m.Close(session=session.id))])
                session = RawSession(session.id)
            edge.deliver(session.begin(b))
            edge.turn()
            keep = session.committed.hash_at(len(b) - 1)
            frames = session.begin(b[-1:], keep=len(b) - 1, hash=keep)
            session.committed.truncate(0)
            session.committed.extend(b)
            edge.deliver(frames)
            for _ in range(4):
                edge.deliver(session.window())
                session.settle([], edge.reply())
            assert session.committed.ids.tolist() == wanted
            edge.deliver([m.encode(m.Close(session=session.id))])


def test_the_same_place_is_decided_anew_in_each_generation(pair) -> None:
    """An answer that is asked for again is no retry, also where its first window is the same."""
    with SocketlessEdge(pair.target) as edge:
        edge.start()
        session = RawSession()
        for drafts in ([4], [5], [5]):
            edge.deliver(session.begin([1, 2, 3]))
            edge.deliver(session.window(drafts))
            verdict = edge.reply()
            assert isinstance(verdict, m.Verdict), verdict
            assert (verdict.generation, verdict.start) == (session.generation, 3)


def test_a_prompt_is_read_after_a_longer_pass(pair) -> None:
    """Where no row is wanted the graph takes any; not one that only the last pass had."""
    decoder = Decoder(pair.target)
    tokens = np.array(LONG[:60])
    decoder.forward([Pass(0, tokens, rows=1)])
    decoder.rollback(0, 0)
    decoder.forward([Pass(0, tokens[:20], rows=0)])
    assert decoder.length(0) == 20


@pytest.mark.timing  # shares go by the time that passes take
def test_a_flood_waits_behind_itself(pair) -> None:
    """Prompts and wide windows of one key: a neighbour waits for one pass of them at a time."""
    with SocketlessEdge(pair.target, sessions=10, context=256) as edge:
        flood = [RawSession() for _ in range(8)]
        for i, session in enumerate(flood):
            edge.deliver(session.begin([i + 1] * 180), b"flood")
            edge.deliver(session.window([1] * 40), b"flood")
        edge.start()
        edge.turn()
        for _ in range(4):
            session = RawSession()
            edge.deliver(session.begin([1, 2, 3]), b"neighbour")
            edge.deliver(session.window([4]), b"neighbour")
            before = edge.scheduler.passes
            session.settle([4], edge.reply(b"neighbour"))
            # its prompt and its window, and before each at most one pass of the flood
            assert edge.scheduler.passes - before <= 4
            edge.deliver([m.encode(m.Close(session=session.id))], b"neighbour")
        for session in flood:  # and no session is forgotten
            edge.deliver(session.window([1] * 40), b"flood")  # a retry, if it has been answered
        assert isinstance(edge.reply(b"flood"), m.Verdict)


def test_a_session_whose_turn_has_not_come_is_not_idle(pair) -> None:
    """A prompt before it took longer than sessions may idle: it keeps its place."""
    with SocketlessEdge(pair.target, sessions=1, idle_s=0.05) as edge:
        session = RawSession()
        edge.deliver(session.begin(LONG))
        edge.deliver(session.window([1, 2]))
        time.sleep(0.1)
        edge.deliver(RawSession().begin([1, 2]), b"another")
        ((to, reply, _),) = edge.replies
        assert isinstance(reply, m.Failure)
        assert (to, reply.code) == (b"another", "too-many-sessions")
        edge.start()
        session.settle([1, 2], edge.reply())
        time.sleep(0.1)
        greedy_text(edge, [1, 2, 3], b"another")


def test_what_is_cancelled_during_its_pass_has_no_verdict(pair) -> None:
    """And the same window may come again, as to any round that was cut off."""
    with SocketlessEdge(pair.target) as edge:
        session = RawSession()
        edge.deliver(session.begin([1]))
        edge.deliver(session.window([2]))
        batch = edge.scheduler.next_batch()
        assert batch is not None
        edge.deliver([m.encode(m.Cancel(session=session.id, generation=session.generation))])
        number, jobs = batch
        edge.scheduler.target.start(number, [job.work for job in jobs])
        for job in collect(edge.scheduler):
            edge.service.finish_job(job)
        assert edge.replies == []
        edge.start()
        edge.deliver(session.window([2]))
        session.settle([2], edge.reply())


def test_a_round_whose_prompt_could_not_be_read_is_decided_once(pair, monkeypatch) -> None:
    """The window behind it goes down with it, and comes again: not twice."""
    with SocketlessEdge(pair.target) as edge:
        session = RawSession()
        edge.deliver(session.begin(LONG))
        edge.deliver(session.window([1, 2]))
        edge.start()
        with monkeypatch.context() as broken:
            broken.setattr(Decoder, "forward", lambda *_: 1 / 0)
            edge.turn()
        edge.fails("internal")
        edge.deliver(session.window([1, 2]))
        session.settle([1, 2], edge.reply())
        for _ in range(6):
            edge.turn()
        assert not edge.replies
        edge.deliver(session.window())
        session.settle([], edge.reply())


@pytest.mark.parametrize("streams", [False, True])
def test_what_waited_behind_a_prompt_that_could_not_be_read_is_dropped(
    pair, monkeypatch, streams: bool
) -> None:
    """The device is told once, and no verdict or token comes that it has not asked for again."""
    with SocketlessEdge(pair.target) as edge:
        session = RawSession()
        edge.deliver(session.begin(LONG, "stream" if streams else "greedy"))
        edge.deliver(session.pull(4) if streams else session.window([1, 2]))
        edge.start()
        with monkeypatch.context() as broken:
            broken.setattr(Decoder, "forward", lambda *_: 1 / 0)
            edge.turn()
        edge.fails("internal")
        before = edge.scheduler.passes
        for _ in range(6):
            edge.turn()
        assert edge.replies == []
        assert edge.scheduler.passes == before
        assert not any(held.is_waiting for held in edge.service.sessions)


def test_a_prompt_that_could_not_be_scored_is_scored_with_the_window_that_comes_again(
    pair, monkeypatch
) -> None:
    with SocketlessEdge(pair.target) as edge:
        session = RawSession()
        edge.deliver(session.begin(LONG[:100], prompt_logprobs=1))
        edge.deliver(session.window([1, 2]))
        edge.start()
        edge.turn()  # one part of it is read, the next is not
        with monkeypatch.context() as broken:
            broken.setattr(Decoder, "forward", lambda *_: 1 / 0)
            edge.turn()
        edge.fails("internal")
        edge.deliver(session.window([1, 2]))
        verdict, frames = edge.reply_all()
        assert isinstance(verdict, m.Verdict)
        assert None not in decode_logprobs(frames[-1], 1, VOCAB, (99,))


def test_no_client_reads_what_an_engine_says_of_the_edges_machine(pair, monkeypatch) -> None:
    """Its errors name files and devices; they are for the edge's log."""

    def fails(*_: object) -> None:
        raise ProviderError("/srv/models/target needs the GPU 3")

    with SocketlessEdge(pair.target) as edge:
        session = RawSession()
        edge.deliver(session.begin([1, 2, 3]))
        edge.deliver(session.window([1]))
        edge.start()
        monkeypatch.setattr(Decoder, "forward", fails)
        assert "GPU" not in edge.fails("internal").message
