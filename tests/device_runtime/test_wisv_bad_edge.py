"""An edge that inquires or forgives as none may: the device ends with a typed error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pilotfish import Device, PilotfishError
from pilotfish.base.errors import EdgeLostError, MalformedError, UnknownSessionError
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.hidden import hidden_bytes
from tests.conftest import HIDDEN, Pair
from tests.device_runtime.test_bad_edge import TIMES, Answer, LyingEdge, failure, verdict
from tests.support.hostile import PROMPT

FULL, SELECTIVE = "wisv-full", "wisv-selective"
Script = Callable[[m.DeviceMessage], list[Answer]]
Liar = Callable[..., tuple[LyingEdge, Device]]


@pytest.fixture
def liar(pair: Pair) -> Iterator[Liar]:
    with ExitStack() as opened:

        def make(script: Script, **options: Any) -> tuple[LyingEdge, Device]:
            edge = LyingEdge(pair, script)
            edge.start()
            opened.callback(edge.stop)
            device = Device(pair.draft, edge.endpoint, threads=1, **options)
            return edge, opened.enter_context(device)

        yield make


def inquiry(about: m.Window | m.States, *frames: bytes, **changes: Any) -> Answer:
    values = {"session": about.session, "generation": about.generation, "start": about.start}
    return [m.StatesRequest(times=TIMES, **{**values, **changes}), *frames]


def scripted(window: list[Callable[[m.Window], Answer]], states: Any = ()) -> Script:
    """What is answered to windows, and to states."""

    def script(request: m.DeviceMessage) -> list[Answer]:
        if isinstance(request, m.Window):
            return [answer(request) for answer in window]
        return [answer(request) for answer in states] if isinstance(request, m.States) else []

    return script


def settled(about: m.Window | m.States, **changes: Any) -> Answer:
    return [verdict(about, **changes)]


# What no honest edge asks of a window of four tokens.
INQUIRIES: dict[str, list[bytes]] = {
    "for nothing": [b""],
    "without a frame": [],
    "two frames": [b"\0", b"\1"],
    "a token that was not sent": [b"\4"],
    "one that was not sent behind one that was": [b"\0\4"],
    "far behind": [b"\xff"],
    "the same token twice": [b"\1\1"],
    "not in order": [b"\2\1"],
    "all, and again": [b"\0\1\2\3\0\1\2\3"],
    "very many": [bytes(2**20)],
}


@pytest.mark.parametrize("frames", INQUIRIES.values(), ids=INQUIRIES.keys())
def test_inquiries_that_cannot_be(liar: Liar, frames: list[bytes]) -> None:
    edge, device = liar(scripted([lambda w: inquiry(w, *frames)]))
    began = time.process_time()
    with pytest.raises(MalformedError):
        device.generate(PROMPT, protocol=SELECTIVE, window=4, max_tokens=20)
    assert time.process_time() - began < 2
    assert not any(isinstance(request, m.States) for request in edge.requests)
    assert sum(isinstance(request, m.Window) for request in edge.requests) == 1


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("protocol", ["greedy", "dsd", "tree", "dssd", FULL])
def test_inquiries_under_protocols_without_states(liar: Liar, protocol: str, window: int) -> None:
    edge, device = liar(scripted([lambda w: inquiry(w, b"\0")]))
    temperature = 0.0 if protocol in ("greedy", FULL) else 1.0
    with pytest.raises(MalformedError):
        device.generate(PROMPT, protocol=protocol, window=window, temperature=temperature)
    assert not any(isinstance(request, m.States) for request in edge.requests)


@pytest.mark.parametrize("protocol", ["greedy", FULL, SELECTIVE])
@pytest.mark.parametrize(
    "changes",
    [
        {"accepted": 2, "notes": [3]},
        {"accepted": 0, "notes": [1]},
        {"accepted": 4, "notes": [2**31 - 1]},
        {"accepted": 5, "notes": [0]},
        {"accepted": 2, "token": None},
        {"accepted": 2, "token": 64},
    ],
)
def test_verdicts_that_cannot_be(liar: Liar, protocol: str, changes: dict[str, Any]) -> None:
    """At once, or after the states that were asked for."""
    _, device = liar(scripted([lambda w: settled(w, **changes)]))
    with pytest.raises(MalformedError):
        device.generate(PROMPT, protocol=protocol, window=4, max_tokens=20)
    if protocol == SELECTIVE:
        _, device = liar(
            scripted([lambda w: inquiry(w, b"\1\3")], [lambda s: settled(s, **changes)])
        )
        with pytest.raises(MalformedError):
            device.generate(PROMPT, protocol=protocol, window=4, max_tokens=20)


def test_everything_twice_and_things_of_other_rounds(liar: Liar) -> None:
    """Late and foreign inquiries and verdicts are passed over; another one does no harm."""
    script = scripted(
        [
            lambda w: inquiry(w, b"\7", start=w.start + 1),
            lambda w: inquiry(w, b"\7", generation=w.generation + 1),
            lambda w: inquiry(w, b"\7", session=b"x" * 16),
            lambda w: settled(w, start=w.start + 1),
            lambda w: inquiry(w, b"\0"),
            lambda w: inquiry(w, b"\7"),
        ],
        [
            lambda s: inquiry(s, b"\0"),
            lambda s: settled(s, start=s.start - 1),
            lambda s: settled(s, accepted=1, notes=[1]),
            lambda s: settled(s, accepted=0),
        ],
    )
    edge, device = liar(script)
    answer = device.generate(PROMPT, protocol=SELECTIVE, window=2, max_tokens=12)
    assert [(r.accepted, r.notes["forgiven"], r.inquired) for r in answer.rounds] == [(1, 1, 1)] * 6
    assert answer.tokens[1::2] == [1] * 6
    states = [request for request in edge.requests if isinstance(request, m.States)]
    assert [state.start for state in states] == [len(PROMPT) + 2 * i for i in range(6)]


def test_an_edge_that_never_stops_asking(liar: Liar) -> None:
    edge, device = liar(
        scripted([lambda w: inquiry(w, b"\0")], [lambda s: inquiry(s, b"\0")]),
        on_link_loss="wait",
        patience_s=1.0,
    )
    began = time.monotonic()
    with pytest.raises(EdgeLostError):
        device.generate(PROMPT, protocol=SELECTIVE, window=2, max_tokens=12)
    assert time.monotonic() - began < 5
    assert sum(isinstance(request, m.States) for request in edge.requests) == 1


@pytest.mark.parametrize(
    ("code", "error", "times"),
    [("malformed", MalformedError, 1), ("unknown-session", UnknownSessionError, 3)],
)
def test_an_edge_that_refuses_the_states(
    liar: Liar, code: str, error: type[PilotfishError], times: int
) -> None:
    script = scripted([lambda w: inquiry(w, b"\0")], [lambda s: [failure(s, code)]])
    edge, device = liar(script)
    with pytest.raises(error):
        device.generate(PROMPT, protocol=SELECTIVE, window=2, max_tokens=12)
    assert sum(isinstance(request, m.States) for request in edge.requests) == times


def test_states_are_sent_for_what_was_asked_and_once(liar: Liar) -> None:
    wanted = iter([b"\0\2\3"])
    edge, device = liar(
        scripted([lambda w: inquiry(w, f) if (f := next(wanted, b"")) else settled(w)], [settled])
    )
    answer = device.generate(PROMPT, protocol=SELECTIVE, window=4, max_tokens=8)
    assert [each.inquired for each in answer.rounds] == [3, *[0] * 7]
    begin, window, states, *others = [
        request for request in edge.requests if not isinstance(request, m.Hello | m.Ping | m.Train)
    ]
    assert isinstance(begin, m.Begin)
    assert begin.conditions is not None
    assert begin.conditions.hidden_size == HIDDEN
    assert isinstance(window, m.Window)
    assert isinstance(states, m.States)
    assert (window.start, window.generation) == (states.start, states.generation)
    assert {type(request) for request in others} == {m.Window}
    more = answer.rounds[0].uplink_bytes - answer.rounds[1].uplink_bytes
    assert more == 3 * hidden_bytes(HIDDEN, "int8") + len(m.encode(states))
