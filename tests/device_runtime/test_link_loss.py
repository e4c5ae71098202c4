"""The edge is away: the device waits for it, goes on alone, or gives up, as it was told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import pytest

from pilotfish import Device, EdgeServer, Piece
from pilotfish.base.errors import (
    EdgeLostError,
    InterruptedGenerationError,
    TooManySessionsError,
)
from pilotfish.device_runtime.link.retry import backoff
from pilotfish.emulation.emulator import Emulator
from pilotfish.wire import messages as m
from tests.conftest import Pair
from tests.device_runtime.test_bad_edge import TIMES, LyingEdge
from tests.support.relay import Relay

PROMPT = [1, 3, 2, 7]
NOWHERE = "tcp://127.0.0.1:1"
SAMPLED = {"temperature": 1.0, "seed": 4, "max_tokens": 120}


@pytest.fixture(scope="module")
def server(long_pair: Pair) -> Iterator[EdgeServer]:
    with EdgeServer(long_pair.target, threads=1, sessions=60) as opened:
        yield opened


@pytest.fixture
def relay(server: EdgeServer) -> Iterator[Relay]:
    opened = Relay(server.endpoint)
    yield opened
    opened.close()


def opened(pair: Pair, endpoint: str, policy: str, **options: Any) -> Device:
    return Device(pair.draft, endpoint, threads=1, on_link_loss=policy, **options)


def lose(relay: Relay) -> None:
    relay.turn_to(NOWHERE)
    relay.cut()


def await_true(holds: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def noticed_while_it_is_away(
    device: Device, requests: Any, wish: dict[str, Any], relay: Relay, server: EdgeServer
) -> tuple[list[Piece], int]:
    """An answer whose edge goes after 10 pieces and is back after 5 of the drafter's own.

    Its pieces, and how many of them are the drafter's.
    """
    got: list[Piece] = []
    alone = 0
    for piece in device.stream(requests, **wish):
        got.append(piece)
        if len(got) == 10:
            lose(relay)
        if piece.origin == "local":
            alone += 1
            time.sleep(0.02)  # a slow drafter
            if alone == 5:
                relay.turn_to(server.endpoint)
    return got, alone


def tokens_of(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


# wait


def test_attempts_come_ever_later_but_never_later_than_four_seconds() -> None:
    """An edge that was away for a day is found as soon as one that was for a minute."""
    waits = [*islice(backoff(), 50)]
    assert waits[:6] == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0]
    assert set(waits[5:]) == {4.0}


def test_an_edge_that_comes_late_is_waited_for(long_pair: Pair, relay: Relay, server) -> None:
    relay.turn_to(NOWHERE)
    with opened(long_pair, relay.endpoint, "wait") as device:
        assert not device.link_up
        assert device.welcome is None
        coming = threading.Timer(0.7, relay.turn_to, [server.endpoint])
        coming.start()
        wish = {"protocol": "auto", **SAMPLED}  # nothing can be chosen before it is there
        late = device.generate(PROMPT, **wish)
        coming.join()
        assert device.link_up
        (recovery,) = late.recoveries
        assert recovery.at == len(PROMPT)
        assert recovery.lost_s > 0.5
        assert late.tokens == device.generate(PROMPT, **wish).tokens
        assert device.welcome is not None


def test_a_lost_edge_is_waited_for_so_long_and_no_longer(long_pair: Pair, relay: Relay) -> None:
    with opened(long_pair, relay.endpoint, "wait", patience_s=1.0) as device:
        pieces = device.stream(PROMPT, protocol="greedy", max_tokens=100)
        next(pieces)
        lose(relay)
        began = time.monotonic()
        with pytest.raises(EdgeLostError, match="within 1 s"):
            list(pieces)
        assert time.monotonic() - began > 0.9


def test_a_stall_of_four_seconds_is_lived_through(long_pair: Pair, server: EdgeServer) -> None:
    """As a cellular link has them; before, more than three ended an answer."""
    with (
        Emulator(server.endpoint) as link,
        opened(long_pair, link.endpoint, "wait") as device,
    ):
        wish = {**SAMPLED, "protocol": "dssd", "max_tokens": 400}
        wanted = device.generate(PROMPT, **wish)
        pieces = device.stream(PROMPT, **wish)
        got = [next(pieces)]
        link.set(up_bps=1.0, down_bps=1.0)
        healing = threading.Timer(4.0, link.set, kwargs={"up_bps": None, "down_bps": None})
        healing.start()
        got += pieces
        healing.join()
        assert tokens_of(got) == wanted.tokens == device.last.tokens
        (recovery,) = device.last.recoveries
        assert recovery.lost_s > 2.0
        assert recovery.local_tokens == 0
        assert len(PROMPT) < recovery.at <= len(PROMPT) + len(wanted.tokens)


def test_a_device_that_is_just_being_made_follows_the_others(
    long_pair: Pair, relay: Relay, server: EdgeServer
) -> None:
    with opened(long_pair, relay.endpoint, "fail", lanes=2) as device:
        lose(relay)
        moving = threading.Timer(0.5, device.redirect, [server.endpoint])
        moving.start()
        with device.beside() as other:
            assert other.generate(PROMPT, protocol="greedy", max_tokens=5).tokens
        moving.join()


def test_an_interrupt_ends_a_wait_at_once(long_pair: Pair, relay: Relay, server) -> None:
    with opened(long_pair, relay.endpoint, "wait") as device:
        wanted = device.generate(PROMPT, protocol="dsd", **SAMPLED).tokens
        pieces = device.stream(PROMPT, protocol="dsd", **SAMPLED)
        next(pieces)
        lose(relay)
        threading.Timer(0.5, device.interrupt).start()
        began = time.monotonic()
        with pytest.raises(InterruptedGenerationError):
            list(pieces)
        assert time.monotonic() - began < 5.0
        relay.turn_to(server.endpoint)
        assert device.generate(PROMPT, protocol="dsd", **SAMPLED).tokens == wanted


def test_an_interrupt_ends_an_answer_under_way(long_pair: Pair, server: EdgeServer) -> None:
    with opened(long_pair, server.endpoint, "fail") as device:
        for protocol in ("greedy", "stream", "local"):
            pieces = device.stream(PROMPT, protocol=protocol, max_tokens=1000)
            next(pieces)
            device.interrupt()
            with pytest.raises(InterruptedGenerationError):
                list(pieces)
            assert device.generate(PROMPT, protocol=protocol, max_tokens=5).tokens


# local


@pytest.mark.parametrize(
    ("protocol", "temperature"),
    [("greedy", 0.0), ("coupled", 1.0), ("dssd", 1.0), ("tree", 1.0), ("stream", 1.0)],
)
def test_the_drafter_goes_on_alone_until_the_edge_is_back(
    long_pair: Pair, relay: Relay, server: EdgeServer, protocol: str, temperature: float
) -> None:
    wish = {"protocol": protocol, "temperature": temperature, "seed": 4, "max_tokens": 300}
    with opened(long_pair, relay.endpoint, "local") as device:
        wanted = device.generate(PROMPT, **wish).tokens
        got, alone = noticed_while_it_is_away(device, PROMPT, wish, relay, server)
        assert device.last.tokens == tokens_of(got)
        assert device.last.text == "".join(piece.text for piece in got)
        assert len(got) < 300 or protocol == "stream"
        first = next(at for at, piece in enumerate(got) if piece.origin == "local")
        last = first + alone
        assert all(piece.origin == "local" for piece in got[first:last])
        assert all(piece.origin != "local" for piece in got[last:])
        assert last < len(got), "it never came back"
        before = tokens_of(got[:first])
        assert before == wanted[: len(before)]
        (recovery,) = device.last.recoveries
        assert recovery.local_tokens == alone
        assert recovery.at == len(PROMPT) + len(before)
        assert recovery.lost_s > 0.9
        if protocol in ("greedy", "coupled", "stream"):
            # what was verified afterwards is what the target says after those tokens
            known = tokens_of(got[:last])
            rest = {**wish, "max_tokens": 300 - len(known), "protocol": "stream"}
            again = device.generate([*PROMPT, *known], **rest)
            assert tokens_of(got[last:]) == again.tokens


def test_without_an_edge_from_the_start_all_is_the_drafters(long_pair: Pair, relay: Relay) -> None:
    relay.turn_to(NOWHERE)
    with opened(long_pair, relay.endpoint, "local") as device:
        wanted = device.generate(PROMPT, protocol="local", **SAMPLED)
        assert wanted.recoveries == []
        for protocol in ("dsd", "stream", "auto"):
            began = time.monotonic()
            got = device.generate(PROMPT, protocol=protocol, **SAMPLED)
            assert got.tokens == wanted.tokens
            assert {record.protocol for record in got.rounds} == {"local"}
            (recovery,) = got.recoveries
            assert (recovery.at, recovery.local_tokens) == (len(PROMPT), len(got.tokens))
        assert time.monotonic() - began < 1.0, "the grace is for a loss, not for each answer"


@pytest.mark.parametrize("policy", ["wait", "local", "fail"])
def test_an_edge_that_is_full(long_pair: Pair, policy: str) -> None:
    with EdgeServer(long_pair.target, threads=1, sessions=1) as full:
        holder = opened(long_pair, full.endpoint, "fail")
        holder.generate(PROMPT, protocol="greedy", max_tokens=5)
        with opened(long_pair, full.endpoint, policy) as device:
            if policy == "fail":
                with pytest.raises(TooManySessionsError):
                    device.generate(PROMPT, protocol="dsd", **SAMPLED)
            elif policy == "wait":
                leaving = threading.Timer(0.7, holder.close)
                leaving.start()
                waited = device.generate(PROMPT, protocol="dsd", **SAMPLED)
                leaving.join()
                (recovery,) = waited.recoveries
                assert recovery.at == len(PROMPT)
                assert waited.tokens == device.generate(PROMPT, protocol="dsd", **SAMPLED).tokens
            else:
                got = []
                for piece in device.stream(PROMPT, protocol="dsd", **SAMPLED):
                    got.append(piece.origin)
                    if len(got) == 3:
                        holder.close()
                    if piece.origin == "local":
                        time.sleep(0.02)
                assert got[0] == "local"
                assert got[-1] != "local"
        holder.close()


def test_a_session_lost_over_one_connection_after_another(long_pair: Pair) -> None:
    """Only an edge that never learns it is given up; behind each connection may be another."""
    forgotten: set[bytes] = set()

    def script(request: m.DeviceMessage) -> list[list[m.Reply | bytes]]:
        if not isinstance(request, m.Window):
            return []
        session, generation = request.session, request.generation
        options = {"session": session, "generation": generation}
        if session in forgotten:
            return [[m.Failure(code="unknown-session", message="No.", **options)]]
        if len(forgotten) < 4:  # it comes again, over another connection
            forgotten.add(session)
            relay.cut()
            return []
        return [[m.Verdict(**options, start=request.start, accepted=0, token=5, times=TIMES)]]

    edge = LyingEdge(long_pair, script)
    relay = Relay(edge.endpoint)
    edge.start()
    try:
        with opened(long_pair, relay.endpoint, "wait") as device:
            assert device.generate(PROMPT, protocol="greedy", max_tokens=1).tokens == [5]
    finally:
        relay.close()
        edge.stop()
    assert len(forgotten) == 4


def test_an_idle_device_sees_the_link_go_and_come(long_pair: Pair, relay: Relay, server) -> None:
    with opened(long_pair, relay.endpoint, "fail") as device:
        device.generate(PROMPT, protocol="greedy", max_tokens=5)
        assert device.link_up
        assert device.link_state().rtt is not None
        lose(relay)
        await_true(lambda: not device.link_up)
        relay.turn_to(server.endpoint)
        await_true(lambda: device.link_up)


def test_a_stream_is_asked_for_by_and_by(long_pair: Pair) -> None:
    """An edge keeps 64 messages for a slow reader: what does not fit would be missed, and
    asked for again after ten seconds only."""

    def script(request: m.DeviceMessage) -> list[list[m.Reply | bytes]]:
        if not isinstance(request, m.Pull):
            return []
        session, generation = request.session, request.generation
        return [
            [m.Tokens(session=session, generation=generation, start=at, times=TIMES), bytes([5, 0])]
            for at in range(request.start, request.start + request.count)
        ]

    edge = LyingEdge(long_pair, script)
    edge.start()
    try:
        with opened(long_pair, edge.endpoint, "fail") as device:
            answer = device.generate(PROMPT, protocol="stream", max_tokens=200)
    finally:
        edge.stop()
    assert answer.tokens == [5] * 200
    pulls = [request for request in edge.requests if isinstance(request, m.Pull)]
    assert max(pull.count for pull in pulls) == 48
    for before, after in pairwise(pulls):
        assert after.start < before.start + before.count, "the target would have had to wait"
    assert pulls[-1].start + pulls[-1].count == len(PROMPT) + 200
    assert sum(record.uplink_bytes > 0 for record in answer.rounds) == len(pulls)


REACHING = """
import os, signal, sys, threading
from pilotfish.device_runtime.link.edge_link import EdgeLink

link = EdgeLink(sys.argv[1], None)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
link.connect()
print("reached")
link.close()
"""


def test_an_edge_is_not_absent_because_the_device_stood_still(
    server: EdgeServer, relay: Relay
) -> None:
    lose(relay)
    command = [sys.executable, "-c", REACHING, relay.endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reaching:
        _, status = os.waitpid(reaching.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        relay.turn_to(server.endpoint)
        time.sleep(3.0)
        reaching.send_signal(signal.SIGCONT)
        info, _ = reaching.communicate(timeout=60)
    assert info == "reached\n"
