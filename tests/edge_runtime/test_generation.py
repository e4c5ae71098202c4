"""A `Begin` replaces the generation of its session whole: nothing of the last answer is left."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pilotfish.edge_runtime.generation import Generation
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.ids import decode_ids
from tests.conftest import Pair
from tests.support.hostile import WAIT_S, RawSession, drafted
from tests.support.socketless import SocketlessEdge
from tests.support.writing import PIECES, writers

assert writers  # a fixture

PROMPT = [3, 1, 4]
BIAS = m.LogitsOptionsMsg(since=len(PROMPT), logit_bias=[(7, 30.0)], frequency_penalty=1.5)
FIELDS = [field.name for field in dataclasses.fields(Generation)]


@pytest.fixture
def edge(writers: Pair) -> Iterator[SocketlessEdge]:
    with SocketlessEdge(writers.target) as opened:
        opened.start()
        yield opened


def find(edge: SocketlessEdge, session: RawSession) -> Generation | None:
    value = edge.service.sessions.get(session.id)
    assert value is not None
    return value.generation


def running(edge: SocketlessEdge, session: RawSession) -> Generation:
    generation = find(edge, session)
    assert generation is not None
    return generation


def values(generation: Generation) -> dict[str, Any]:
    """Return the values of all fields; a list is copied, since the next steps change it."""
    fields = {name: getattr(generation, name) for name in FIELDS}
    return {name: [*each] if isinstance(each, list) else each for name, each in fields.items()}


def turn_until(edge: SocketlessEdge, reached: Callable[[], object]) -> None:
    """Make passes until something is so."""
    deadline = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < deadline
        edge.turn()


def under_way(edge: SocketlessEdge, session: RawSession) -> None:
    """A stream with every option and a hint; its next token is being computed."""
    options = {"logprobs": 2, "prompt_logprobs": 2, "shape": BIAS, "min_p": 0.1, "seed": 77}
    edge.deliver(session.begin(PROMPT, "ahead", temperature=0.0, **options))
    edge.deliver(session.hint([5, 6]))
    edge.deliver(session.pull(9))


def at_its_end(edge: SocketlessEdge, session: RawSession) -> None:
    """A stream whose grammar has ended it."""
    shape = m.LogitsOptionsMsg(since=len(PROMPT), grammar="regex")
    edge.deliver([*session.begin(PROMPT, "ahead", temperature=0.0, shape=shape), b"ab"])
    edge.deliver(session.pull(9))
    turn_until(edge, lambda: (begun := find(edge, session)) is not None and begun.ended)


def before_a_pending_token(edge: SocketlessEdge, session: RawSession) -> None:
    """A stored verdict after which the device samples the next token."""
    drafts = (drafted("dssd", (1, 1, 1), seed) for seed in range(50))
    draft = next(draft for draft in drafts if max(draft.ids) < len(PIECES))
    for seed in range(50):
        edge.deliver(session.begin(PROMPT, "dssd", seed=seed, logprobs=2, shape=BIAS))
        edge.deliver(session.propose("dssd", draft))
        last = running(edge, session).window_state
        assert last is not None
        turn_until(edge, lambda last=last: last.verdict)
        if running(edge, session).awaits_pending:
            return
    pytest.fail("every window was accepted")


Before = Callable[[SocketlessEdge, RawSession], None]
BEFORE: list[Before] = [under_way, at_its_end, before_a_pending_token]


def begin_bare(edge: SocketlessEdge, session: RawSession) -> Generation:
    """Begin a stream without options."""
    edge.deliver(session.begin(PROMPT, "stream"))
    return running(edge, session)


def compare(value: Any, bare: Any) -> bool:
    """Return whether a value is that of a bare generation; jobs are only counted."""
    if isinstance(value, list) and isinstance(bare, list):
        return len(value) == len(bare)
    return bool(value == bare)


@pytest.mark.parametrize("before", BEFORE)
def test_no_field_survives_a_begin(edge: SocketlessEdge, before: Before) -> None:
    """The new generation is as bare as the first one of a new session."""
    bare = values(begin_bare(edge, RawSession()))
    session = RawSession()
    before(edge, session)
    previous = running(edge, session)
    old = values(previous)
    new = begin_bare(edge, session)
    assert new is not previous
    assert new.number == session.generation
    for name, value in values(new).items():
        assert name == "number" or compare(value, bare[name]), name
        if not compare(old[name], bare[name]):
            assert value is not old[name], name
    assert all(job.cancelled for job in old["jobs"])
    assert not previous.jobs


def test_every_field_had_another_value_before(edge: SocketlessEdge) -> None:
    """Else the test above would prove nothing of a field: a new one needs a place in a case."""
    bare = values(begin_bare(edge, RawSession()))
    differ = set()
    for before in BEFORE:
        session = RawSession()
        before(edge, session)
        old = values(running(edge, session))
        differ |= {name for name in FIELDS if not compare(old[name], bare[name])}
    # every generation has a number, and its own trace if the edge makes any
    assert differ | {"number", "trace"} == set(FIELDS)


@pytest.mark.parametrize("before", BEFORE)
def test_the_next_answer_is_that_of_a_new_session(edge: SocketlessEdge, before: Before) -> None:
    """To the token, and its replies have no frames that the last generation asked for."""
    answers = []
    session = RawSession()
    for start in (lambda *_: None, before):
        edge.replies.clear()
        session = RawSession()
        start(edge, session)
        begin_bare(edge, session)
        edge.replies.clear()
        edge.deliver(session.pull(12))
        answer: list[int] = []
        while len(answer) < 12 and not running(edge, session).ended:
            reply, frames = edge.reply_all()
            assert isinstance(reply, m.Tokens), reply
            assert (reply.generation, len(frames)) == (session.generation, 1)
            answer += decode_ids(frames[0], 2**16).tolist()
        answers.append(answer)
    assert answers[0] == answers[1]
    assert len(answers[0]) > 3


@pytest.mark.parametrize("before", BEFORE)
def test_a_late_message_of_the_last_generation_is_refused(
    edge: SocketlessEdge, before: Before
) -> None:
    session = RawSession()
    before(edge, session)
    late = [session.pull(3), session.window([1])]
    begin_bare(edge, session)
    edge.replies.clear()
    for message in late:
        edge.deliver(message)
        edge.fails("diverged")
