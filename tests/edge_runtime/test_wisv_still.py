"""An open inquiry at an edge whose time stands still: what is counted, held and waited for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pilotfish.wire import messages as m
from tests.conftest import Pair
from tests.edge_runtime.bad_input.test_hidden_states import BAD, SELECTIVE, SHAPE
from tests.support.hostile import PROMPT, RawSession, drafted
from tests.support.judging import conditions_of
from tests.support.socketless import SocketlessEdge


@pytest.fixture
def still(pair: Pair, head: str) -> Iterator[SocketlessEdge]:
    with SocketlessEdge(pair.target, [head], sessions=1, idle_s=0.0) as edge:
        yield edge


def asked_of(edge: SocketlessEdge, session: RawSession, **options: float) -> list[bytes]:
    edge.deliver(session.begin(PROMPT, SELECTIVE, options=options))
    edge.deliver(session.propose(SELECTIVE, drafted(SELECTIVE, SHAPE)))
    edge.start()
    reply, frames = edge.reply_all()
    assert isinstance(reply, m.StatesRequest)
    return frames


def test_states_while_the_window_is_at_the_target(still: SocketlessEdge, pair: Pair) -> None:
    session = RawSession(conditions=conditions_of(pair))
    still.deliver(session.begin(PROMPT, SELECTIVE))
    still.deliver(session.propose(SELECTIVE, drafted(SELECTIVE, SHAPE)))
    still.deliver(session.supply(SELECTIVE, drafted(SELECTIVE, SHAPE), [b"\0\1"]))
    still.fails("malformed")
    still.start()
    assert isinstance(still.reply(), m.StatesRequest)


def test_refusals_and_forgiven_tokens_are_counted(still: SocketlessEdge, pair: Pair) -> None:
    session = RawSession(conditions=conditions_of(pair))
    wanted = asked_of(still, session, threshold=1 - 1e-12)
    states = session.supply(SELECTIVE, drafted(SELECTIVE, SHAPE), wanted)
    for bad in BAD.values():
        still.deliver([states[0], *bad(len(wanted[0]))])
    still.deliver(session.supply(SELECTIVE, drafted(SELECTIVE, SHAPE), wanted, generation=9))
    assert +still.metrics.refusals == {"malformed": len(BAD), "diverged": 1}
    still.replies.clear()
    still.deliver(states)
    verdict = still.reply()
    assert isinstance(verdict, m.Verdict)
    assert verdict.notes == [len(wanted[0])]
    assert still.metrics.notes == {("forgiven", SELECTIVE): len(wanted[0])}


def test_a_device_that_never_sends_its_states_holds_no_place(
    still: SocketlessEdge, pair: Pair
) -> None:
    session = RawSession(conditions=conditions_of(pair))
    wanted = asked_of(still, session)
    still.deliver(RawSession().begin(PROMPT), b"another")
    assert not still.replies
    still.deliver(session.supply(SELECTIVE, drafted(SELECTIVE, SHAPE), wanted))
    still.fails("unknown-session")


def test_an_edge_that_stops_waits_for_the_states(still: SocketlessEdge, pair: Pair) -> None:
    session = RawSession(conditions=conditions_of(pair))
    wanted = asked_of(still, session)
    still.service.drain()
    assert not still.service.drained
    still.deliver(session.supply(SELECTIVE, drafted(SELECTIVE, SHAPE), wanted))
    assert isinstance(still.reply(), m.Verdict)
    assert still.service.drained
