"""wisv where a reviewer found fault: times, states that do not fit, and what an edge may say."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import MalformedError, TooLargeError, UnsupportedError
from pilotfish.device_runtime.edge_session import EdgeSession
from pilotfish.device_runtime.plan import Auto
from pilotfish.device_runtime.record import Round
from pilotfish.device_runtime.session import Session
from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.wire import messages as m
from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.link.meter import LinkMeter
from pilotfish.wire.link.tcp import Segments
from tests.conftest import Pair
from tests.device_runtime.test_bad_edge import verdict
from tests.device_runtime.test_wisv_bad_edge import Liar, liar, scripted
from tests.support.hostile import PROMPT

__all__ = ["liar"]  # a fixture

FULL, SELECTIVE = "wisv-full", "wisv-selective"
LONG = [*range(30, 60)]  # on which drafter and target often differ
WISH: dict[str, Any] = {"threshold": 0.5, "window": 4, "max_tokens": 30}
SLOW_S = 0.05


# Times


@pytest.fixture
def slow(pair: Pair, edge: EdgeServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device that is slower to read a window's last token than the edge is to answer."""
    read_last = ModelDrafter.decode_last

    def slowly(drafter: ModelDrafter) -> None:
        time.sleep(SLOW_S)
        read_last(drafter)

    monkeypatch.setattr(ModelDrafter, "decode_last", slowly)
    with Device(pair.draft, edge.endpoint, threads=1) as device:
        yield device


@pytest.mark.timing
def test_a_reply_that_waits_for_the_drafter_says_nothing_of_the_link(slow: Device) -> None:
    answer = slow.generate(LONG, protocol=SELECTIVE, **WISH)
    assert len(answer.rounds) > 4
    link = slow.link_state()
    assert link is not None
    assert link.rtt is not None
    assert link.rtt.value < SLOW_S / 2


@pytest.mark.timing
def test_what_the_drafter_does_meanwhile_is_drafting(slow: Device) -> None:
    answer = slow.generate(LONG, protocol=SELECTIVE, **WISH)
    for each in answer.rounds[1:]:
        assert each.timings.draft > SLOW_S / 2
        assert each.timings.downlink < SLOW_S / 2


@pytest.mark.timing
@pytest.mark.timing
@pytest.mark.parametrize("protocol", ["greedy", FULL, SELECTIVE])
def test_no_stage_counts_twice(
    pair: Pair, edge: EdgeServer, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Between a reply and the next thing there is a while, here a long one."""
    exchange, speculate = LinkMeter.record_exchange, Session.speculate
    took: list[tuple[float, float]] = []

    def slowly(meter: LinkMeter, **values: Any) -> Any:
        time.sleep(0.02)
        return exchange(meter, **values)

    def timed(session: Session, *rest: Any) -> Round:
        since_s = time.monotonic()
        record = speculate(session, *rest)
        took.append((record.timings.total, time.monotonic() - since_s))
        return record

    monkeypatch.setattr(LinkMeter, "record_exchange", slowly)
    monkeypatch.setattr(Session, "speculate", timed)
    with Device(pair.draft, edge.endpoint, threads=1) as device:
        device.generate(LONG, protocol=protocol, window=4, max_tokens=20)
    assert took
    for total_s, wall_s in took:
        assert 0.9 * wall_s - 0.005 < total_s <= wall_s


# Beyond what a format, a message or a head takes


@pytest.mark.parametrize("protocol", [FULL, SELECTIVE])
@pytest.mark.parametrize(
    ("factor", "form", "text"),
    [(1e5, "fp16", "int8"), (np.nan, "fp16", "int8"), (np.nan, "int8", "greedy")],
)
def test_states_that_the_format_cannot_hold(
    pair: Pair,
    edge: EdgeServer,
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
    factor: float,
    form: str,
    text: str,
) -> None:
    states = ModelDrafter.hidden_states
    with Device(pair.draft, edge.endpoint, threads=1) as device:
        with monkeypatch.context() as patched:

            def huge(drafter: ModelDrafter, at: NDArray[np.int64]) -> NDArray[np.float32]:
                return states(drafter, at) * np.float32(factor)

            patched.setattr(ModelDrafter, "hidden_states", huge)
            with pytest.raises(UnsupportedError, match=f"{form} cannot hold.*{text}"):
                device.generate(LONG, protocol=protocol, hidden=form, **WISH)
        assert device.generate(LONG, protocol=protocol, hidden=form, **WISH).tokens


def test_states_that_the_edge_would_not_read(
    pair: Pair, edge: EdgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window itself is small."""
    whole = EdgeSession.limits.fget
    assert whole is not None

    def small(session: EdgeSession) -> m.Limits:
        return msgspec.structs.replace(whole(session), message_bytes=m.HEADER_BYTES + 40)

    with Device(pair.draft, edge.endpoint, threads=1) as device:
        monkeypatch.setattr(EdgeSession, "limits", property(small))
        assert device.generate(LONG, protocol="greedy", window=4, max_tokens=8).tokens
        with pytest.raises(TooLargeError, match="smaller"):
            device.generate(LONG, protocol=SELECTIVE, **WISH)


@pytest.mark.parametrize("protocol", ["greedy", FULL, SELECTIVE])
def test_a_link_that_took_many_attempts_to_connect(
    device: Device, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """What the kernel sends again includes SYNs, which it does not count as sent."""
    monkeypatch.setattr(EdgeChannel, "segments", lambda channel: Segments(sent=2, retransmitted=7))
    assert device.generate(PROMPT, protocol=protocol, max_tokens=4).tokens


# What an edge may say, and what a caller


def test_forgiven_tokens_under_protocols_without_a_head(liar: Liar) -> None:
    """The only note that they have is a federation's omitted mass, at most 1 for each position."""
    for notes in ([1, 1], [0, 1], [4]):
        _, device = liar(scripted([lambda w, notes=notes: [verdict(w, accepted=2, notes=notes)]]))
        with pytest.raises(MalformedError):
            device.generate(PROMPT, protocol="greedy", window=4, max_tokens=3)


def test_a_note_of_a_protocol_without_a_head_forgives_nothing(liar: Liar) -> None:
    _, device = liar(scripted([lambda w: [verdict(w, accepted=2, notes=[1])]]))
    answer = device.generate(PROMPT, protocol="greedy", window=4, max_tokens=3)
    assert not answer.notes.get("forgiven")


@pytest.mark.parametrize("protocol", ["auto", "greedy", "stream", Auto(lossy=True), FULL])
def test_a_format_that_there_is_not(device: Device, protocol: Any) -> None:
    """Under ``auto`` too, where it would only make the judged protocols disappear."""
    with pytest.raises(UnsupportedError, match="int8, fp16, int4"):
        device.generate(PROMPT, protocol=protocol, hidden="int2", max_tokens=4)
