"""Only what was spent on the link counts as its RTT: not what either end did in the meantime."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from pilotfish import Device, EdgeServer
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.link_group import connect
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.engines.constraint import GrammarConstraint
from pilotfish.engines.grammar import Grammars
from pilotfish.wire import messages as m
from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.connections import Bounds
from pilotfish.wire.transport import Listener
from tests.conftest import Pair
from tests.support.calling import callers, tool

assert callers  # a fixture

RTT_S = 0.05
BUSY_S = 0.2
FEW = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PROTOCOLS: list[tuple[str, dict[str, Any]]] = [
    ("stream", {}), ("greedy", {}), ("ahead", {}), ("coupled", {"temperature": 1.0}),
    ("tslt", {"temperature": 1.0}), ("dssd", {"temperature": 1.0}), ("auto", {}),
    ("tree", {"temperature": 1.0, "expansion": (2, 2)}),
]  # fmt: skip


@pytest.fixture(scope="module")
def road(edge: EdgeServer) -> Iterator[Emulator]:
    with Emulator(edge.endpoint, Conditions(rtt_s=RTT_S)) as opened:
        yield opened


@pytest.fixture
def link(road: Emulator) -> Iterator[EdgeLink]:
    opened = connect(road.endpoint, None)
    try:
        yield opened
    finally:
        opened.close()


def ping(link: EdgeLink, between: Callable[[], object], **how: Any) -> float:
    """Send a ping, do something, and wait for the pong; returns the RTT that was learnt, or 0."""
    nonce = secrets.randbits(60)
    sent = link.send(m.Ping(nonce=nonce))
    between()
    answer = link.wait(sent, lambda reply: isinstance(reply, m.Pong), **how)
    assert isinstance(answer.reply, m.Pong)
    pong = answer.reply
    link.estimator.on_ping(answer, pong)
    state = link.state()
    return 0.0 if state.rtt is None else state.rtt.value


def nothing() -> None:
    """Do nothing."""


def once(work: Callable[[], object]) -> Callable[[], bool]:
    """Do this once, and then there is nothing more to do."""
    left = [work]

    def step() -> bool:
        if left:
            left.pop()()
        return False

    return step


def hold_the_interpreter() -> None:
    """Let another thread hold it soon: no Python runs meanwhile."""
    sleep_us = ctypes.PyDLL(None).usleep  # `PyDLL` keeps the lock

    def hold() -> None:
        time.sleep(RTT_S / 5)
        sleep_us(int(BUSY_S * 1e6))

    threading.Thread(target=hold, daemon=True).start()


@pytest.mark.timing
def test_an_undisturbed_ping_tells_the_rtt(link: EdgeLink) -> None:
    for work in (None, once(nothing)):
        # some of several: where this machine is busy with other things, one may be of no use
        told_s = max(ping(link, nothing, on_idle=work) for _ in range(5))
        assert told_s == pytest.approx(RTT_S, rel=0.2)


def test_what_this_end_does_meanwhile_is_no_rtt(link: EdgeLink) -> None:
    busy = partial(time.sleep, BUSY_S)
    assert ping(link, busy) == 0.0
    assert ping(link, nothing, on_idle=once(busy)) == 0.0
    assert ping(link, hold_the_interpreter) == 0.0


def test_a_thread_that_holds_the_interpreter_is_no_rtt(
    link: EdgeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel does not tell how long a reply was here if more bytes came after it."""
    monkeypatch.setattr(link.channel, "queued_s", lambda: 0.0)
    assert ping(link, hold_the_interpreter) == 0.0


def test_what_keeps_a_request_from_leaving_is_no_rtt(
    link: EdgeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = link.try_send

    def slowly(*message: Any) -> int | None:
        time.sleep(BUSY_S)
        return really(*message)

    with monkeypatch.context() as patched:
        patched.setattr(link, "try_send", slowly)
        assert ping(link, nothing) == 0.0


def test_what_was_abandoned_is_in_the_way_of_the_next(edge: EdgeServer) -> None:
    """Its request on the way there, its reply on the way back: 12 kB at 1 Mbit/s are 0.1 s."""
    for rates in ({"up_bps": 1e6}, {"down_bps": 1e6}):
        with Emulator(edge.endpoint, Conditions(rtt_s=RTT_S, **rates)) as slow:
            link = connect(slow.endpoint, None)
            try:
                link.send(m.Ping(nonce=1), (bytes(12_000),))
                nonce = secrets.randbits(60) + 2
                answer = link.request(
                    m.Ping(nonce=nonce),
                    (),
                    lambda reply, nonce=nonce: isinstance(reply, m.Pong) and reply.nonce == nonce,
                )
                assert isinstance(answer.reply, m.Pong)
                pong = answer.reply
                link.estimator.on_ping(answer, pong)
                assert link.state().rtt is None
            finally:
                link.close()


def test_what_lies_at_the_edge_is_no_rtt() -> None:
    """A message counts as held from the moment at which it came."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = Listener(context, "tcp://127.0.0.1:0", None, Bounds(10, 10, 2**20))
    channel = EdgeChannel(listener.endpoint, None, 2**20)
    try:
        lay_s = []
        for busy_s in (0.0, 0.0, BUSY_S):
            while not channel.connected:
                channel.receive_raw(0.1)
            assert not listener.has_message
            channel.send(m.Ping(nonce=1))
            time.sleep(busy_s)
            while (envelope := listener.receive()) is None:
                assert not listener.has_message or not busy_s
            lay_s.append(envelope.queued_ns() * 1e-9)
        assert max(lay_s[:2]) < BUSY_S / 4
        assert lay_s[2] == pytest.approx(BUSY_S, abs=0.05)
    finally:
        channel.close()
        listener.close()
        context.term()


def test_what_keeps_the_edge_is_no_rtt(edge: EdgeServer, link: EdgeLink) -> None:
    """It is another process, and stands still while a ping arrives; a pong of it is learnt from."""
    for _ in range(3):
        os.kill(edge.pid, signal.SIGSTOP)
        going_on = threading.Timer(RTT_S / 2 + BUSY_S, os.kill, (edge.pid, signal.SIGCONT))
        going_on.start()
        told_s = ping(link, nothing)
        going_on.join()
        assert 0.0 < told_s < RTT_S + BUSY_S / 2


def test_grammars_and_tools_are_no_rtt(callers: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parser takes long here, as a costly one would: far longer than a busy machine adds."""
    really = Grammars.constraint

    def slowly(*how: Any, **options: Any) -> GrammarConstraint:
        time.sleep(BUSY_S)
        return really(*how, **options)

    monkeypatch.setattr(Grammars, "constraint", slowly)
    requests: list[dict[str, Any]] = [
        {"schema": FEW},
        {"tools": [tool("move", to=FEW)], "tool_choice": "required"},
    ]
    with (
        EdgeServer(callers.target, threads=1) as edge,
        Emulator(edge.endpoint, Conditions(rtt_s=RTT_S)) as road,
    ):
        for protocol, options in PROTOCOLS:
            for told_s in read(
                callers.draft, road.endpoint, requests, protocol=protocol, **options
            ):
                assert RTT_S * 0.98 < told_s < RTT_S + BUSY_S / 2, protocol


def read(draft: Path, edge: str, items: list[dict[str, Any]], **options: Any) -> list[float]:
    """Return the RTT that a new device reads after each of these answers, where it reads any."""
    readings = []
    with Device(draft, edge, threads=1) as device:
        for more in items:
            device.generate("ab", max_tokens=8, **options, **more)
            state = device.link_state()
            assert state is not None
            readings += [] if state.rtt is None else [state.rtt.value]
    return readings
