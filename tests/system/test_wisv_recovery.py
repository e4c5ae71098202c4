"""wisv's two exchanges, with an edge that dies and replies that are lost between them.

The text is the same as without. The heads do not look at the link: what they are told of it is
measured anew for every request.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime import link_renewal
from pilotfish.device_runtime.link import pending
from pilotfish.device_runtime.link.line import Line
from pilotfish.engines.artifact import Artifact
from pilotfish.wire import messages as m
from tests.conftest import Pair
from tests.support.judging import random_head, saved
from tests.support.relay import Relay

PROTOCOLS = ("wisv-full", "wisv-selective")
PROMPT = [*range(30, 60)]  # on which drafter and target often differ
WISH: dict[str, Any] = {"threshold": 0.5, "window": 4, "max_tokens": 60}


@pytest.fixture(
    params=[
        pytest.param(True, id="keys"),
        pytest.param(False, id="no-keys", marks=pytest.mark.slow),
    ]
)
def folders(request: pytest.FixtureRequest, key_folders: dict[str, Path]) -> dict[str, Any]:
    """Where the keys of edge and device are; None: there are none."""
    return {end: key_folders[end] if request.param else None for end in ("edge", "alice")}


class Journal:
    """The messages of a device as they are sent, and what is to happen at them."""

    def __init__(self) -> None:
        self.messages: list[m.DeviceMessage] = []
        self.before: Callable[[m.DeviceMessage], None] = lambda message: None
        self.lose: Callable[[m.Reply], bool] = lambda reply: False

    def of(self, kind: type[m.DeviceMessage]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Journal:
    selection = Journal()
    send, receive = Line.try_send, Line.receive

    def sent(line: Line, message: m.DeviceMessage, *rest: Any) -> Any:
        selection.before(message)
        selection.messages.append(message)
        return send(line, message, *rest)

    def received(line: Line, *rest: Any) -> Any:
        arrived = receive(line, *rest)
        lost = arrived is not None and selection.lose(arrived[0])
        return None if lost else arrived

    monkeypatch.setattr(Line, "try_send", sent)
    monkeypatch.setattr(Line, "receive", received)
    return selection


def nth(number: int, kind: type, act: Callable[[], None]) -> Callable[[Any], bool]:
    """At the so manyth message of this kind; True for that one."""
    left = [number]

    def look(message: Any) -> bool:
        left[0] -= isinstance(message, kind)
        if left[0] or not isinstance(message, kind):
            return False
        act()
        return True

    return look


@pytest.fixture
def mortal(
    pair: Pair, head: str, folders: dict[str, Any], journal: Journal
) -> Iterator[tuple[Device, Callable[..., None]]]:
    """A device, and how to replace its edge by one that has never heard of it."""
    options: dict[str, Any] = {"keys": folders["edge"], "threads": 1}
    edges = [EdgeServer(pair.target, head=head, **options).start()]

    def replace(**others: Any) -> None:
        os.kill(edges[-1].pid, signal.SIGKILL)
        edges[-1].stop()
        heads = {"head": head} if not others.pop("headless", False) else {}
        edges.append(EdgeServer(pair.target, edges[0].endpoint, **options, **heads).start())

    try:
        with Device(pair.draft, edges[0].endpoint, folders["alice"], threads=1) as device:
            yield device, replace
    finally:
        for server in edges:
            server.stop()


@pytest.mark.parametrize(
    ("protocol", "kind"),
    [("wisv-full", m.Window), ("wisv-selective", m.Window), ("wisv-selective", m.States)],
)
def test_an_edge_killed_and_restarted_before_a_message(
    mortal: tuple[Device, Callable[..., None]],
    journal: Journal,
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
    kind: type[m.DeviceMessage],
) -> None:
    """With ``States``: between a window and the states that the edge asked for."""
    monkeypatch.setattr(link_renewal, "_EVERY_S", math.inf)  # `test_wisv_link.py` tests renewals
    device, replace = mortal
    wanted = device.generate(PROMPT, protocol=protocol, **WISH)
    assert len(wanted.rounds) > 5
    journal.messages.clear()
    journal.before = nth(2, kind, replace)
    got = device.generate(PROMPT, protocol=protocol, **WISH)
    assert got.tokens == wanted.tokens
    assert [each.notes.get("forgiven", 0) for each in got.rounds] == [
        each.notes.get("forgiven", 0) for each in wanted.rounds
    ]
    begun = journal.of(m.Begin)
    assert len(begun) == 2
    assert begun[0].conditions == begun[1].conditions  # the link as it was when the request began
    assert device.generate(PROMPT, protocol=protocol, **WISH).tokens == wanted.tokens


def test_an_edge_that_comes_back_without_its_head(
    mortal: tuple[Device, Callable[..., None]], journal: Journal
) -> None:
    device, replace = mortal
    journal.before = nth(2, m.States, lambda: replace(headless=True))
    with pytest.raises(UnsupportedError, match="--head"):
        device.generate(PROMPT, protocol="wisv-selective", **WISH)
    assert device.generate(PROMPT, protocol="greedy", max_tokens=5).tokens


@pytest.fixture
def relayed(
    pair: Pair, head: str, folders: dict[str, Any], journal: Journal
) -> Iterator[tuple[Device, Relay]]:
    with EdgeServer(pair.target, keys=folders["edge"], threads=1, head=head) as edge:
        relay = Relay(edge.endpoint)
        with Device(pair.draft, relay.endpoint, folders["alice"], threads=1) as device:
            yield device, relay
        relay.close()


@pytest.mark.parametrize(
    ("protocol", "kind"),
    [("wisv-full", m.Verdict), ("wisv-selective", m.StatesRequest), ("wisv-selective", m.Verdict)],
)
def test_a_reply_that_is_lost_with_its_connection(
    relayed: tuple[Device, Relay],
    folders: dict[str, Any],
    journal: Journal,
    protocol: str,
    kind: type[m.Reply],
) -> None:
    """With keys the edge knows the device again and says it once more; else all begins anew."""
    device, relay = relayed
    wanted = device.generate(PROMPT, protocol=protocol, **WISH)
    journal.messages.clear()
    journal.lose = nth(2, kind, relay.cut)
    got = device.generate(PROMPT, protocol=protocol, **WISH)
    assert got.tokens == wanted.tokens
    assert relay.connections >= 2
    assert len(journal.of(m.Begin)) == (1 if folders["edge"] else 2)
    doubled = m.States if kind is m.Verdict and protocol == "wisv-selective" else m.Window
    starts = [message.start for message in journal.of(doubled)]
    # a stranger's is refused before it is begun anew
    assert len(starts) - len(set(starts)) == (1 if folders["edge"] else 2)


@pytest.mark.parametrize("kind", [m.StatesRequest, m.Verdict])
def test_a_reply_that_is_overdue(
    relayed: tuple[Device, Relay],
    journal: Journal,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[m.Reply],
) -> None:
    """The connection stands: the very same bytes go out again, and are answered from memory."""
    monkeypatch.setattr(pending, "RESEND_S", 0.3)
    device, _ = relayed
    wanted = device.generate(PROMPT, protocol="wisv-selective", **WISH)
    journal.messages.clear()
    journal.lose = nth(2, kind, lambda: None)
    got = device.generate(PROMPT, protocol="wisv-selective", **WISH)
    assert got.tokens == wanted.tokens
    assert len(journal.of(m.Begin)) == 1
    requests = [*journal.of(m.Window), *journal.of(m.States)]
    assert len(requests) == sum(1 + (r.inquired > 0) for r in got.rounds) + 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_cuts_at_any_moment(relayed: tuple[Device, Relay], protocol: str) -> None:
    device, relay = relayed
    wanted = device.generate(PROMPT, protocol=protocol, **WISH)
    pieces = device.stream(PROMPT, protocol=protocol, **WISH)
    for _ in range(4):
        next(pieces)
        relay.cut()
    for _ in pieces:
        pass
    assert device.last is not None
    assert device.last.tokens == wanted.tokens
    assert relay.connections >= 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_drafter_goes_on_alone_and_the_edge_comes_back(
    pair: Pair, head: str, protocol: str
) -> None:
    """Under `local`, from between a window and its verdict; what an edge verified stands."""
    first = EdgeServer(pair.target, threads=1, head=head).start()
    try:
        with Device(pair.draft, first.endpoint, threads=1, on_link_loss="local") as device:
            wanted = device.generate(PROMPT, protocol=protocol, **WISH).tokens
            pieces = device.stream(PROMPT, protocol=protocol, **WISH | {"max_tokens": 100})
            got = next(pieces).tokens
            os.kill(first.pid, signal.SIGKILL)
            first.stop()
            origins = [piece.origin for piece in pieces]
            assert "local" in origins
            assert device.last is not None
            assert device.last.tokens[: len(got)] == wanted[: len(got)]
    finally:
        first.stop()


def test_a_head_that_looks_at_the_link_is_told_the_same_again(
    pair: Pair, tmp_path: Path, journal: Journal
) -> None:
    manifests = (Artifact.open(path).manifest for path in pair)
    head = saved(random_head(*manifests), tmp_path)
    with EdgeServer(pair.target, threads=1, head=head) as edge:
        relay = Relay(edge.endpoint)
        with Device(pair.draft, relay.endpoint, threads=1) as device:
            journal.lose = nth(2, m.StatesRequest, relay.cut)
            device.generate(PROMPT, protocol="wisv-selective", **WISH)
            device.generate(PROMPT, protocol="wisv-selective", **WISH)
        relay.close()
    first, again, other = (begin.conditions for begin in journal.of(m.Begin))
    assert first == again
    assert first.rtt_s is not None
    assert first.rtt_s != other.rtt_s  # measured anew
