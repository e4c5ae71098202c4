"""Hidden states that cannot be: refused in words and counted; the right ones are still welcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from pilotfish import EdgeServer
from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.hidden import encode_hidden, hidden_bytes
from tests.conftest import HIDDEN, Pair
from tests.support.hostile import PROMPT, RawClient, RawSession, drafted
from tests.support.judging import conditions_of

FULL, SELECTIVE = "wisv-full", "wisv-selective"
SHAPE = (1,) * 6
STATE = hidden_bytes(HIDDEN, "int8")


@pytest.fixture(scope="module")
def generation() -> dict[str, Any]:
    return {"protocol": SELECTIVE, "threshold": 0.5, "window": 6, "max_tokens": 40}


@pytest.fixture
def session(client: RawClient, pair: Pair) -> Iterator[RawSession]:
    """A generation under `wisv-selective`, begun."""
    opened = RawSession(conditions=conditions_of(pair))
    client.send(*opened.begin(PROMPT, SELECTIVE))
    yield opened
    client.say(m.Close(session=opened.id))
    client.settle()


def inquired(client: RawClient, session: RawSession) -> list[bytes]:
    """Of a window that was sent, what the edge asks for."""
    client.send(*session.propose(SELECTIVE, drafted(SELECTIVE, SHAPE)))
    reply, frames = client.receive_all()
    assert isinstance(reply, m.StatesRequest), reply
    assert reply.start == len(session.committed)
    (wanted,) = frames
    assert 0 < len(wanted) <= len(SHAPE)
    return frames


def decided(client: RawClient, session: RawSession, items: list[bytes]) -> m.Verdict:
    """By the right states; the session goes on with what the edge says."""
    draft = drafted(SELECTIVE, SHAPE)
    client.send(*session.supply(SELECTIVE, draft, items))
    verdict = client.receive()
    session.follow(draft, verdict)
    assert isinstance(verdict, m.Verdict)
    return verdict


def decision(verdict: m.Verdict) -> tuple[int, int | None, int]:
    return verdict.accepted, verdict.token, (*verdict.notes, 0)[0]


@pytest.fixture
def honest(client: RawClient, pair: Pair) -> tuple[int, int | None, int]:
    """The edge's decision on honest states."""
    session = RawSession(conditions=conditions_of(pair))
    client.send(*session.begin(PROMPT, SELECTIVE))
    result = decision(decided(client, session, inquired(client, session)))
    client.say(m.Close(session=session.id))
    return result


def coded(form: str, count: int, at: int = 0, poison: bytes = b"") -> bytes:
    """So many states; at byte ``at`` stands the poison."""
    frame = encode_hidden(np.ones((count, HIDDEN), np.float32), form)
    return frame[:at] + poison + frame[at + len(poison) :]


def half(value: float) -> bytes:
    return np.float16(value).tobytes()


def step(value: float) -> bytes:
    """A bfloat16."""
    return np.float32(value).tobytes()[2:]


# Frames in the place of those with n states.
BAD: dict[str, Callable[[int], list[bytes]]] = {
    "a number that is none": lambda n: [coded("fp16", n, 10, half(np.nan))],
    "the last number is none": lambda n: [coded("fp16", n, 2 * HIDDEN * n - 2, half(np.nan))],
    "an infinity": lambda n: [coded("fp16", n, 0, half(np.inf))],
    "a negative infinity": lambda n: [coded("fp16", n, 0, half(-np.inf))],
    "a step that is no number": lambda n: [coded("int8", n, 2, step(np.nan))],
    "an infinite step": lambda n: [coded("int8", n, 0, step(np.inf))],
    "a negative step": lambda n: [coded("int8", n, 0, step(-1.0))],
    "a step whose products overflow": lambda n: [coded("int8", n, 0, step(2.0**121))],
    "an infinite step in int4": lambda n: [coded("int4", n, 0, step(np.inf))],
    "nothing but ones": lambda n: [b"\xff" * STATE * n],
    "one state too many": lambda n: [coded("int8", n + 1)],
    "one state too few": lambda n: [coded("int8", n - 1)],
    "half a state too many": lambda n: [coded("int8", n) + b"\0" * (STATE // 2)],
    "a byte too few": lambda n: [coded("int8", n)[:-1]],
    "of half the width": lambda n: [encode_hidden(np.ones((n, HIDDEN // 2), "f4"), "fp16")],
    "of twice the width": lambda n: [encode_hidden(np.ones((n, 2 * HIDDEN), "f4"), "int8")],
    "very many": lambda n: [bytes(2**22)],
    "an empty frame": lambda n: [b""],
    "no frame": lambda n: [],
    "two frames": lambda n: [coded("int8", n), coded("int8", n)],
    "as 64-bit numbers": lambda n: [np.ones((n, HIDDEN), "<f8").tobytes()],
    "of fp32 that is not finite": lambda n: [np.full((n, HIDDEN), np.inf, "<f4").tobytes()],
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_states_that_cannot_be(
    client: RawClient,
    session: RawSession,
    honest: tuple[int, int | None, int],
    bad: Callable[[int], list[bytes]],
) -> None:
    wanted = inquired(client, session)
    header = session.supply(SELECTIVE, drafted(SELECTIVE, SHAPE), wanted)[0]
    for _ in range(2):
        client.send(header, *bad(len(wanted[0])))
        failure = client.fails("malformed")
        assert (failure.session, failure.start) == (session.id, len(PROMPT))
    assert decision(decided(client, session, wanted)) == honest
    inquired(client, session)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_windows_with_states_that_cannot_be(
    client: RawClient,
    pair: Pair,
    honest: tuple[int, int | None, int],
    bad: Callable[[int], list[bytes]],
) -> None:
    session, draft = RawSession(conditions=conditions_of(pair)), drafted(FULL, SHAPE)
    client.send(*session.begin(PROMPT, FULL))
    header, ids, states = session.propose(FULL, draft)
    client.send(header, ids, *bad(len(SHAPE)))
    client.fails("malformed")
    client.send(header, ids, states)
    verdict = client.receive()
    assert isinstance(verdict, m.Verdict)
    assert decision(verdict) == honest
    client.say(m.Close(session=session.id))


def test_states_too_large_to_be_judged_forgive_nothing(
    client: RawClient, session: RawSession, head: str
) -> None:
    """They are finite, so they are taken, but the head's sums over them are not."""
    wanted = inquired(client, session)
    count = len(wanted[0])
    weights = DecisionHead.load(head).tensors["w1"][0, :HIDDEN]
    quanta = (127 * np.sign(weights)).astype(np.int8).tobytes()
    frame = step(2.0**120) * (HIDDEN // 32 * count) + quanta * count
    client.send(session.supply(SELECTIVE, drafted(SELECTIVE, SHAPE), wanted)[0], frame)
    verdict = client.receive()
    assert isinstance(verdict, m.Verdict), verdict
    assert (verdict.accepted, (*verdict.notes, 0)[0]) == (wanted[0][0], 0)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"start": 0}, "diverged"),
        ({"start": len(PROMPT) + 1}, "diverged"),
        ({"start": 2**31 - 1}, "diverged"),
        ({"generation": 1}, "diverged"),
        ({"generation": 2**31 - 1}, "diverged"),
        ({"session": b"x" * 16}, "unknown-session"),
        ({"session": b"x"}, "malformed"),
    ],
)
def test_states_for_another_round(
    client: RawClient,
    session: RawSession,
    honest: tuple[int, int | None, int],
    changes: dict[str, Any],
    code: str,
) -> None:
    wanted = inquired(client, session)
    client.send(*session.supply(SELECTIVE, drafted(SELECTIVE, SHAPE), wanted, **changes))
    client.fails(code)
    assert decision(decided(client, session, wanted)) == honest


def test_states_of_another_owner(
    edge: EdgeServer,
    client: RawClient,
    session: RawSession,
    honest: tuple[int, int | None, int],
) -> None:
    wanted = inquired(client, session)
    with RawClient(edge.endpoint) as eve:
        eve.send(*session.supply(SELECTIVE, drafted(SELECTIVE, SHAPE), wanted))
        eve.fails("unknown-session")
    assert decision(decided(client, session, wanted)) == honest


def test_states_again_get_the_same_verdict(client: RawClient, session: RawSession) -> None:
    draft, wanted = drafted(SELECTIVE, SHAPE), inquired(client, session)
    states = session.supply(SELECTIVE, draft, wanted)
    client.send(*states)
    verdict = client.receive()
    for again in (states, [states[0], b"rubbish"], [states[0]]):
        client.send(*again)
        assert client.receive() == verdict
    session.follow(draft, verdict)
    client.send(*states)  # of the last round still, as long as no other window came
    assert client.receive() == verdict
    inquired(client, session)
    client.send(*states)
    client.fails("diverged")


def test_a_window_again_while_the_edge_waits_for_states(
    client: RawClient, session: RawSession, honest: tuple[int, int | None, int]
) -> None:
    wanted = inquired(client, session)
    assert inquired(client, session) == wanted
    client.send(*session.window([1, 2]))
    client.fails("conflict")
    client.send(*session.window([1, 2], start=len(PROMPT) + 1))
    client.fails("conflict")
    client.send(*session.propose(SELECTIVE, drafted(SELECTIVE, SHAPE), hash=b"12345678"))
    client.fails("diverged")
    assert decision(decided(client, session, wanted)) == honest


def test_unrequested_states(client: RawClient, pair: Pair) -> None:
    for protocol in (SELECTIVE, FULL, "greedy"):
        session, draft = RawSession(conditions=conditions_of(pair)), drafted(protocol, SHAPE)
        client.send(*session.begin(PROMPT, protocol))
        states = session.supply(SELECTIVE, drafted(SELECTIVE, SHAPE), [b"\0"])
        client.send(*states)
        client.fails("diverged")  # of a window that there is not
        if protocol != SELECTIVE:
            client.send(*session.propose(protocol, draft))
            verdict = client.receive()
            client.send(*states)
            client.fails("malformed")
            session.follow(draft, verdict)
        client.say(m.Close(session=session.id))
        client.send(*states)
        client.fails("unknown-session")


def test_states_after_cancel(
    client: RawClient, session: RawSession, honest: tuple[int, int | None, int]
) -> None:
    wanted = inquired(client, session)
    client.say(m.Cancel(session=session.id, generation=session.generation))
    client.send(*session.supply(SELECTIVE, drafted(SELECTIVE, SHAPE), wanted))
    client.fails("diverged")
    assert inquired(client, session) == wanted
    assert decision(decided(client, session, wanted)) == honest


def test_a_generation_begun_while_the_edge_waits_for_states(
    client: RawClient, session: RawSession, honest: tuple[int, int | None, int]
) -> None:
    old = session.supply(SELECTIVE, drafted(SELECTIVE, SHAPE), inquired(client, session))
    client.send(*session.begin(PROMPT, SELECTIVE))
    client.send(*old)
    client.fails("diverged")
    assert decision(decided(client, session, inquired(client, session))) == honest


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        *(({name: value}, "malformed") for name in ("rtt_s", "up_bps", "down_bps", "loss")
          for value in (float("nan"), float("inf"), -float("inf"), -1e-9, "0.1", [])),
        *(({name: 0.0}, "malformed") for name in ("rtt_s", "up_bps", "down_bps")),
        ({"loss": 1.01}, "malformed"),
        *(({"hidden_size": n}, "malformed") for n in (0, 2, -1, 65537, 2**31, 2**63, 0.5, None)),
        *(({"hidden_size": size}, "unsupported") for size in (3, HIDDEN - 1, 65536)),
        *(({"drafter": name}, "unsupported") for name in ("", "0" * 16, "x" * 64)),
        *(({"drafter": name}, "malformed") for name in ("x" * 65, b"x", 7, None)),
    ],
)  # fmt: skip
def test_beginnings_that_cannot_be(
    client: RawClient,
    session: RawSession,
    pair: Pair,
    honest: tuple[int, int | None, int],
    changes: dict[str, Any],
    code: str,
) -> None:
    """What was begun before goes on."""
    wanted = inquired(client, session)
    for protocol in (FULL, SELECTIVE):
        client.send(*session.begin(PROMPT, protocol, conditions=conditions_of(pair, **changes)))
        client.fails(code)
        session.generation -= 1
    assert decision(decided(client, session, wanted)) == honest


@pytest.mark.parametrize("conditions", [None, [], ["x"], [None] * 7, "x", True])
def test_beginnings_that_do_not_name_the_drafter(
    client: RawClient, session: RawSession, conditions: object
) -> None:
    for protocol in (FULL, SELECTIVE):
        client.send(*session.begin(PROMPT, protocol, conditions=conditions))
        client.fails("malformed")
        session.generation -= 1
    decided(client, session, inquired(client, session))


def test_hidden_sizes_do_not_cost_memory(pair: Pair, client: RawClient) -> None:
    hello = m.Hello(
        version=m.VERSION, tokenizer="x", vocab_size=9, padded_vocab_size=9, hidden_size=2**31 - 1,
        bridges=True, drafter=conditions_of(pair).drafter,
    )  # fmt: skip
    client.say(hello)
    welcome = client.receive()
    assert isinstance(welcome, m.Welcome)
    assert FULL not in welcome.protocols
    client.say(msgspec.structs.replace(hello, hidden_size=HIDDEN))
    welcome = client.receive()
    assert isinstance(welcome, m.Welcome)
    assert {FULL, SELECTIVE} <= {*welcome.protocols}
