"""The link's state that a decision head is told while an answer goes on (wisv §III-A: c_k)."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import MalformedError
from pilotfish.device_runtime import link_renewal
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.line import Line
from pilotfish.device_runtime.link_renewal import LinkRenewal, channel_from
from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.engines.artifact import Artifact
from pilotfish.speculation.channel import Channel
from pilotfish.wire import messages as m
from pilotfish.wire.link.state import LinkState, Reading
from pilotfish.wire.protocols import PROTOCOL_REGISTRY
from pilotfish.wire.protocols.decision_head import JudgedDraft, JudgedProtocol
from tests.conftest import VOCAB, Pair
from tests.support.hostile import PROMPT, RawSession, drafted
from tests.support.judging import conditions_of, random_head, saved
from tests.support.relay import Relay
from tests.support.socketless import SocketlessEdge

PROTOCOLS = ("wisv-full", "wisv-selective")
GOOD = Channel(rtt_s=0.005, up_bps=500e6, down_bps=500e6, loss=0.0)
POOR = Channel(rtt_s=0.5, up_bps=1e6, down_bps=None, loss=0.2)


def state_of(channel: Channel) -> LinkState:
    """Return the measured state that a head is told as this channel."""
    fields = {"rtt_s": "rtt", "up_bps": "up", "down_bps": "down", "loss": "retransmitted"}
    known = {fields[name]: value for name, value in vars(channel).items() if value is not None}
    return LinkState(
        **{name: Reading(value=value, age_s=0.0, samples=1) for name, value in known.items()}
    )


def judged(protocol: str) -> JudgedProtocol:
    exchange = PROTOCOL_REGISTRY[protocol]
    assert isinstance(exchange, JudgedProtocol)
    return exchange


@pytest.fixture(scope="module")
def swayed(pair: Pair) -> DecisionHead:
    """A head whose decisions the link alone makes: it forgives all on a poor link."""
    head = random_head(*(Artifact.open(path).manifest for path in pair))
    tensors = {name: np.zeros_like(array) for name, array in head.tensors.items()}
    tensors["std"] += 1
    tensors["w1"][0, -1] = 1.0  # log10_rtt_s, standardised
    tensors["w2"][0], tensors["b2"][0] = -4.0, 1.0
    return DecisionHead(head.card, tensors)


@pytest.fixture(scope="module")
def swayed_path(swayed: DecisionHead, tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(swayed, tmp_path_factory.mktemp("swayed"))


# The frame


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("channel", [GOOD, POOR, Channel()])
def test_a_window_brings_the_link(swayed: DecisionHead, protocol: str, channel: Channel) -> None:
    exchange = judged(protocol).with_resource(swayed.judge(GOOD))
    draft = drafted(protocol, (1, 1, 1))
    assert isinstance(draft, JudgedDraft)
    plain = exchange.encode_draft(draft, np.empty(0, np.uint32), VOCAB)
    frames = exchange.encode_draft(
        exchange.attach_channel(draft, channel), np.empty(0, np.uint32), VOCAB
    )
    assert len(frames) == len(plain) + 1
    assert exchange.count_tokens(frames, VOCAB) == exchange.count_tokens(plain, VOCAB)
    assert exchange.decode_draft(frames, VOCAB).channel == channel
    assert exchange.decode_draft(plain, VOCAB).channel is None


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "frame",
    [b"", bytes(31), bytes(33), struct.pack("<4d", -1, 1, 1, 0), struct.pack("<4d", 1, 1, 1, 2),
     struct.pack("<4d", math.inf, 1, 1, 0)],
)  # fmt: skip
def test_a_link_that_cannot_be_is_malformed(
    swayed: DecisionHead, protocol: str, frame: bytes
) -> None:
    exchange = judged(protocol).with_resource(swayed.judge(GOOD))
    window = drafted(protocol, (1, 1))
    assert isinstance(window, JudgedDraft)
    frames = exchange.encode_draft(window, np.empty(0, np.uint32), VOCAB)

    def decode() -> None:
        exchange.count_tokens([*frames, frame], VOCAB)
        exchange.decode_draft([*frames, frame], VOCAB)

    with pytest.raises(MalformedError):
        decode()


# The edge


def verdict_of(edge: SocketlessEdge, session: RawSession, protocol: str, draft: Any) -> m.Verdict:
    """Send a window, and the states that the edge asks for; returns the verdict."""
    edge.deliver(session.propose(protocol, draft))
    reply, frames = edge.reply_all()
    if isinstance(reply, m.StatesRequest):
        edge.deliver(session.supply(protocol, draft, frames))
        reply = edge.reply()
    assert isinstance(reply, m.Verdict)
    return reply


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_newest_link_holds_from_its_window_on(
    pair: Pair, swayed_path: str, protocol: str
) -> None:
    draft = drafted(protocol, (1,) * 6)
    exchange = judged(protocol)
    with SocketlessEdge(pair.target, [swayed_path]) as edge:
        edge.start()

        def begun(channel: Channel) -> RawSession:
            session = RawSession(conditions=conditions_of(pair, **vars(channel)))
            edge.deliver(session.begin(PROMPT, protocol))
            return session

        def accepted(session: RawSession, sent: Any) -> int:
            verdict = verdict_of(edge, session, protocol, sent)
            again = verdict_of(edge, session, protocol, sent)  # the reply was lost
            assert (again.accepted, again.token) == (verdict.accepted, verdict.token)
            session.settle(draft.ids.tolist(), verdict)
            return verdict.accepted

        good, poor = begun(GOOD), begun(POOR)
        assert accepted(good, draft) < 6
        assert accepted(poor, draft) == 6
        renewed = begun(GOOD)
        assert isinstance(draft, JudgedDraft)
        assert accepted(renewed, exchange.attach_channel(draft, POOR)) == 6
        assert accepted(renewed, draft) == 6  # it still holds
        assert accepted(renewed, exchange.attach_channel(draft, GOOD)) < 6


# When the device tells it


def test_the_device_tells_changes_and_at_most_once_a_second() -> None:
    now_s = [100.0]
    renewal = LinkRenewal(lambda: now_s[0])
    renewal.start(GOOD)

    def renewed_after(seconds: float, **changes: float | None) -> Channel | None:
        now_s[0] += seconds
        return renewal.renewed(lambda: state_of(dataclasses.replace(GOOD, **changes)))

    assert renewed_after(0.5, rtt_s=0.5) is None
    assert renewed_after(0.6, rtt_s=0.0054, up_bps=470e6, loss=0.009) is None
    assert renewed_after(0.5, rtt_s=0.5) is None
    assert renewed_after(0.6, rtt_s=0.006) == dataclasses.replace(GOOD, rtt_s=0.006)
    assert renewed_after(1.1, rtt_s=0.006) is None
    assert renewed_after(1.1, rtt_s=0.006, loss=0.02) == dataclasses.replace(
        GOOD, rtt_s=0.006, loss=0.02
    )
    # what a new connection does not know yet keeps its value
    assert renewed_after(1.1, rtt_s=None, loss=0.02, up_bps=None, down_bps=None) is None


def test_the_head_gets_the_larger_loss() -> None:
    reading = [Reading(value=loss, age_s=0.0, samples=50) for loss in (0.01, 0.05)]
    for up, down, loss in ((0, 1, 0.05), (1, 0, 0.05)):
        state = LinkState(retransmitted=reading[up], retransmitted_down=reading[down])
        assert channel_from(state).loss == loss
    assert channel_from(LinkState(retransmitted_down=reading[0])).loss == 0.01


def test_a_state_becomes_a_channel() -> None:
    for channel in (GOOD, POOR, Channel()):
        assert channel_from(state_of(channel)) == channel
    assert channel_from(None) == Channel()


@pytest.fixture
def renewals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The link changes every third window; returns the number of windows so far."""
    states = [0]

    def state(link: EdgeLink) -> LinkState:
        states[0] += 1
        return state_of(POOR if states[0] // 3 % 2 else GOOD)

    monkeypatch.setattr(link_renewal, "_EVERY_S", 0.0)
    monkeypatch.setattr(EdgeLink, "state", state)
    return states


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("ends", ["connection", "edge"])
def test_a_lost_window_is_judged_by_the_same_link(
    pair: Pair,
    swayed_path: str,
    renewals: list[int],
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
    ends: str,
) -> None:
    """At some of an answer's windows the connection breaks, or another edge takes over."""
    options: dict[str, Any] = {"head": swayed_path, "threads": 1}
    wish: dict[str, Any] = {"threshold": 0.5, "window": 4, "max_tokens": 50}
    prompt = [*range(30, 60)]
    windows, at = [0], [0]
    send = Line.try_send
    act: list[Callable[[], None]] = []

    def sent(line: Line, message: m.DeviceMessage, *rest: Any) -> Any:
        if isinstance(message, m.Window):
            windows[0] += 1
            if windows[0] == at[0]:
                act[0]()
        return send(line, message, *rest)

    monkeypatch.setattr(Line, "try_send", sent)
    with (
        EdgeServer(pair.target, **options) as first,
        EdgeServer(pair.target, **options) as other,
    ):
        relay = Relay(first.endpoint)

        def lose() -> None:
            if ends == "edge":
                relay.turn_to(other.endpoint)
            relay.cut()

        act.append(lose)
        with Device(pair.draft, relay.endpoint, threads=1) as device:

            def answer(lost_at: int) -> tuple[list[int], list[Any]]:
                renewals[0], windows[0], at[0] = 0, 0, lost_at
                got = device.generate(prompt, protocol=protocol, **wish)
                relay.turn_to(first.endpoint)
                return got.tokens, [each.notes.get("forgiven", 0) for each in got.rounds]

            wanted = answer(0)
            assert sum(wanted[1]) > 0
            for lost_at in (2, 4):
                assert answer(lost_at) == wanted
        relay.close()


def test_the_head_is_told_a_changed_link(pair: Pair, swayed_path: str, renewals: list[int]) -> None:
    """Without a change all rounds of the answer would forgive, or none."""
    with (
        EdgeServer(pair.target, head=swayed_path, threads=1) as edge,
        Device(pair.draft, edge.endpoint, threads=1) as device,
    ):
        answer = device.generate(
            [*range(30, 60)], protocol="wisv-full", threshold=0.5, window=4, max_tokens=60
        )
    full = [round_.accepted == round_.window for round_ in answer.rounds]
    assert any(full)
    assert not all(full)
