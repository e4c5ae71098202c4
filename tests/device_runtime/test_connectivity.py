"""The state of one link: what the edge says, what answers in its place, and when it is logged."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from pilotfish import Device
from pilotfish.base.errors import AccessDeniedError, EdgeLostError, PilotfishError
from pilotfish.device_runtime.link.connectivity import (
    REFUSALS,
    Connectivity,
    LinkStatus,
)
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.link_group import LinkGroup
from pilotfish.device_runtime.link.retry import FAIL, CancelToken, RetryPolicy
from pilotfish.wire import messages as m
from pilotfish.wire.connections import Bounds
from pilotfish.wire.keys import DeviceKeys, EdgeKeys
from pilotfish.wire.link.attempts import CERTAIN_HANG_UPS, ConnectFailure
from pilotfish.wire.link.diagnosis import AddressState
from pilotfish.wire.transport import Listener
from tests.conftest import VOCAB, Pair
from tests.device_runtime.test_bad_edge import LyingEdge
from tests.support.relay import Relay
from tests.support.serving import eventually

HELLO = m.Hello(
    version=m.VERSION, tokenizer="t", vocab_size=VOCAB, padded_vocab_size=VOCAB, hidden_size=64
)
NOWHERE = "tcp://127.0.0.1:1"


@pytest.mark.parametrize("state", Connectivity)
@pytest.mark.parametrize("keys", [False, True])
def test_every_state_has_a_sentence_and_the_error_says_it(state: Connectivity, keys: bool) -> None:
    status = LinkStatus.from_state(state, "tcp://edge.example:7077", keys=keys)
    assert "tcp://edge.example:7077" in status.message
    assert status.message.endswith(".")
    assert "{" not in str(status)
    assert bool(status.remedy) or state not in REFUSALS
    for number in (False, True):
        error = status.error(was_welcomed=number, waited_s=2.2)
        assert str(status) in str(error)
        assert type(error) is REFUSALS.get(state, type(error))


CODES = {
    "draining": Connectivity.DRAINING,
    "busy": Connectivity.BUSY,
    "target-lost": Connectivity.BUSY,
    "access-denied": Connectivity.KEY_REFUSED,
    "version-mismatch": Connectivity.OTHER_VERSION,
    "pair-mismatch": Connectivity.OTHER_VOCABULARY,
}


@pytest.mark.parametrize("code", CODES)
def test_what_an_edge_says_instead_of_a_welcome(pair: Pair, code: str) -> None:
    lines = [code]

    def script(request: m.DeviceMessage) -> list[list[m.Reply | bytes]]:
        if isinstance(request, m.Hello) and lines:
            return [[m.Failure(code=code, message="no", session=None)]]
        return []

    edge = LyingEdge(pair, script)
    edge.start()
    link = EdgeLink(edge.endpoint, None, FAIL)
    link.set_hello(HELLO)
    try:
        link.connect()
        assert link.status.state is Connectivity.CONNECTING

        def attended(state: Connectivity) -> bool:
            link.attend()
            return link.status.state is state

        eventually(lambda: attended(CODES[code]))
        lines.clear()
        if code in ("draining", "busy", "target-lost", "access-denied"):  # it may be over
            eventually(lambda: attended(Connectivity.CONNECTED))
    finally:
        link.close()
        edge.stop()


@pytest.fixture
def opened() -> Iterator[Callable[..., EdgeLink]]:
    links: list[EdgeLink] = []

    def make(
        endpoint: str, keys: DeviceKeys | None = None, patience: RetryPolicy = FAIL
    ) -> EdgeLink:
        links.append(EdgeLink(endpoint, keys, patience, CancelToken()))
        return links[-1]

    yield make
    for link in links:
        link.close()


def test_a_proxy_without_an_edge_is_no_wrong_edge_pub_and_is_tried_each_second(
    edge, key_folders: dict[str, Path], opened: Callable[..., EdgeLink]
) -> None:
    relay = Relay(NOWHERE)
    try:
        link = opened(relay.endpoint)
        link.set_hello(HELLO)

        def is_in(state: Connectivity) -> bool:
            link.attend()
            return link.status.state is state

        eventually(lambda: is_in(Connectivity.NO_EDGE))
        end_s = time.monotonic() + 4.0
        while time.monotonic() < end_s:
            assert is_in(Connectivity.NO_EDGE)
            time.sleep(0.05)
        relay.turn_to(edge.endpoint)
        began_s = time.monotonic()
        eventually(link.is_up)
        assert time.monotonic() - began_s < 5.0  # not half a minute
    finally:
        relay.close()


@pytest.mark.parametrize("why", ["stops", "full"])
def test_an_edge_that_takes_no_connections_is_no_wrong_edge_pub(
    key_folders: dict[str, Path], opened: Callable[..., EdgeLink], why: str
) -> None:
    """It hangs up on handshakes, as one with another key does: see what else it hangs up on."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    held = EdgeKeys.load(key_folders["edge"])
    room = Bounds(0 if why == "full" else 9, 9, 2**20)
    listener = Listener(context, "tcp://127.0.0.1:0", held, room)
    if why == "stops":
        listener.stop_accepting()
    assert listener.gate is not None
    link = opened(listener.endpoint, DeviceKeys.load(key_folders["alice"]))
    link.set_hello(HELLO)
    seen = set()
    try:
        end_s = time.monotonic() + 60.0
        while link.channel.attempts.handshakes_failed < CERTAIN_HANG_UPS + 4:
            assert time.monotonic() < end_s
            listener.connections.read_events()
            listener.gate.answer_requests()
            link.attend()
            seen.add(link.status.state)
            time.sleep(0.002)
        assert seen - {Connectivity.CONNECTING, Connectivity.LOST} == {Connectivity.BUSY}
    finally:
        listener.close()
        context.destroy(linger=0)


@pytest.fixture
def hasty_edge() -> Iterator[Callable[[bytes], str]]:
    """An edge that hangs up when it has read another mechanism, before it has named its own."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.1)
    stop = threading.Event()

    def begin(mechanism: bytes) -> str:
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)

        def answer(connection: socket.socket) -> None:
            with connection:
                connection.settimeout(0.2)
                connection.sendall(greeting[:12])
                received = b""
                with suppress(TimeoutError, ConnectionError):
                    while len(received) < len(greeting) and (more := connection.recv(64)):
                        received += more
                if len(received) < len(greeting):  # a probe, which does not name a mechanism
                    with suppress(ConnectionError):
                        connection.sendall(greeting[12:])
                        stop.wait(2.0)

        def serve() -> None:
            while not stop.is_set():
                with suppress(TimeoutError):
                    threading.Thread(target=answer, args=[listener.accept()[0]]).start()

        threads.append(threading.Thread(target=serve))
        threads[0].start()
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"

    threads: list[threading.Thread] = []
    yield begin
    stop.set()
    for each in threads:
        each.join()
    listener.close()


@pytest.mark.parametrize("keys", [False, True])
def test_an_edge_that_hangs_up_before_it_names_its_mechanism(
    hasty_edge: Callable[[bytes], str],
    key_folders: dict[str, Path],
    opened: Callable[..., EdgeLink],
    keys: bool,
) -> None:
    """Which end reads the other's greeting first is chance; what is said about keys is not."""
    ours = DeviceKeys.load(key_folders["alice"]) if keys else None
    patience = RetryPolicy.from_policy("wait", 30.0)
    link = opened(hasty_edge(b"NULL" if keys else b"CURVE"), ours, patience)
    with pytest.raises(
        AccessDeniedError, match="the edge has no keys" if keys else "requires keys"
    ):
        link.connect()
    assert link.channel.attempts.failure is ConnectFailure.CLOSED


@pytest.mark.parametrize("policy", ["fail", "wait", "local"])
def test_what_becomes_of_requests_is_said_as_it_is(policy: str) -> None:
    patience = RetryPolicy.from_policy(policy, 7.0)
    away, refused = (patience.consequence(refused=each) for each in (False, True))
    assert ("7 s" in away) == (policy == "wait")
    assert ("requests fail" in refused) == (policy != "local")


PLACES = {
    "tcp://no-such-machine.invalid:7077": Connectivity.NO_NAME,
    NOWHERE: Connectivity.CONNECTION_REFUSED,
}


@pytest.mark.parametrize("place", PLACES)
def test_why_nobody_is_reached(place: str, opened: Callable[..., EdgeLink]) -> None:
    link = opened(place)
    with pytest.raises(PilotfishError, match="No edge answers"):
        link.connect()
    eventually(lambda: link.status.state is PLACES[place])


def test_a_port_that_says_nothing(opened: Callable[..., EdgeLink]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        link = opened(f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(PilotfishError, match="No edge answers"):
            link.connect()


@pytest.mark.parametrize("policy", ["fail", "wait", "local"])
def test_lost_and_back_are_a_line_each_under_every_policy(
    pair: Pair, edge, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    relay = Relay(edge.endpoint)
    caplog.set_level(logging.INFO, "pilotfish.device")
    with (
        Device(
            pair.draft, relay.endpoint, threads=1, on_link_loss=policy, patience_s=1.0, lanes=2
        ) as device,
        device.beside() as other,
    ):
        for each in (device, other):
            each.generate("abc", max_tokens=2)

        def lines(level: int) -> list[str]:
            both = device.attend(), other.attend()
            assert both == (None, None)
            return [record.message for record in caplog.records if record.levelno == level]

        assert sum("connected" in line for line in lines(logging.INFO)) == 1
        relay.turn_to(NOWHERE)
        relay.cut()
        eventually(lambda: len(lines(logging.WARNING)) >= 1)
        if policy != "local":
            with pytest.raises(EdgeLostError, match="is not an edge, or is a proxy"):
                device.generate("abc", max_tokens=2)
        eventually(lambda: "no edge there" in lines(logging.WARNING)[-1])
        for _ in range(20):
            assert len(lines(logging.WARNING)) <= 2  # lost, and why
            time.sleep(0.02)
        relay.turn_to(edge.endpoint)
        eventually(lambda: any("connected, " in line for line in lines(logging.INFO)))
        assert other.generate("abc", max_tokens=2).tokens
        assert sum("connected" in line for line in lines(logging.INFO)) == 2
    relay.close()


@pytest.mark.parametrize("policy", ["fail", "local"])
def test_an_edge_that_says_the_same_again_and_again_is_a_line(
    pair: Pair, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An idle lane greets it twice a second, and an answer that goes on alone at each token."""
    caplog.set_level(logging.INFO, "pilotfish.device")
    busy = m.Failure(code="busy", message="no room", session=None)
    denied = m.Failure(code="access-denied", message="no", session=None)
    lines = [busy]
    edge = LyingEdge(pair, lambda request: [[lines[0]]] if isinstance(request, m.Hello) else [])
    edge.start()
    link = EdgeLink(edge.endpoint, None, RetryPolicy.from_policy(policy, 1.0))
    link.set_hello(HELLO)
    try:
        eventually(link.is_up)

        def received(times: int) -> bool:
            link.attend()
            if policy == "local":
                link.poll()
            time.sleep(0.001)
            return len(edge.requests) >= times

        eventually(lambda: received(20))
        assert sum("no room" in record.message for record in caplog.records) == 1
        lines[0] = denied
        eventually(lambda: received(40))
        assert sum("refused this device" in record.message for record in caplog.records) == 1
    finally:
        link.close()
        edge.stop()


def test_a_device_is_as_well_off_as_its_best_lane(edge) -> None:
    family = LinkGroup(edge.endpoint, None)
    assert family.status is None
    first, second = (family.open(FAIL, CancelToken()) for _ in range(2))
    try:
        eventually(lambda: first.is_up() and second.is_up())
        assert family.status is not None
        assert family.status.state is Connectivity.CONNECTED
        second._refusal = second.connection, Connectivity.DRAINING
        assert second.status.state is Connectivity.DRAINING
        assert family.status.state is Connectivity.CONNECTED
    finally:
        for link in (first, second):
            family.remove(link)
            link.close()


class SlowStatus:
    """Stands for a link of a family, whose state the first who asks gets late."""

    def __init__(self) -> None:
        self.state = Connectivity.WRONG_EDGE_KEY
        self.requests, self.go_on = threading.Event(), threading.Event()

    @property
    def status(self) -> LinkStatus:
        status = LinkStatus.from_state(self.state, NOWHERE, keys=True)
        if not self.requests.is_set():
            self.requests.set()
            self.go_on.wait(10.0)
        return status

    def retry(self) -> None:
        pass


def test_states_are_logged_in_their_order(caplog: pytest.LogCaptureFixture) -> None:
    """A thread that looked before a change, and is late, does not log the former state again."""
    caplog.set_level(logging.INFO, "pilotfish.device")
    family, link = LinkGroup(NOWHERE, None), SlowStatus()
    family._links.add(link)
    patience = RetryPolicy.from_policy("local", 1.0)
    late, soon = (
        threading.Thread(target=family._log_change, args=(patience,), daemon=True) for _ in range(2)
    )
    late.start()
    link.requests.wait(10.0)
    link.state = Connectivity.CONNECTED
    soon.start()
    soon.join(0.1)
    link.go_on.set()
    for each in (late, soon):
        each.join(10.0)
    assert [record.message.split(":")[0] for record in caplog.records][-1].startswith("connected")


def test_a_state_lasts_until_another_one_is_known(
    opened: Callable[..., EdgeLink], key_folders: dict[str, Path]
) -> None:
    """Keys are read again: the edge may take them now, but whether it does is not known yet."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        link = opened(endpoint, DeviceKeys.load(key_folders["alice"]))
        link.channel.attempts.failure, link.channel.attempts.hang_ups = (
            ConnectFailure.CLOSED,
            CERTAIN_HANG_UPS,
        )
        link._diagnosis.state, link._diagnosis._due_s = AddressState.CURVE, time.monotonic() + 60.0
        assert link.status.state is Connectivity.WRONG_EDGE_KEY
        link.retry()
        assert link.status.state is Connectivity.WRONG_EDGE_KEY


def test_an_edge_at_another_address_is_not_lost_before_it_was_there(pair: Pair, edge) -> None:
    with (
        Device(pair.draft, edge.endpoint, threads=1, on_link_loss="local") as device,
        socket.create_server(("127.0.0.1", 0)) as listening,
    ):
        device.generate("abc", max_tokens=2)
        device.redirect(f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        device.attend()
        status = device._link_group.status
        assert status is not None
        assert status.state is Connectivity.CONNECTING
