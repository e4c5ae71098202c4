"""An edge that answers to two keys for a while: who comes in, after how many attempts."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from pilotfish.base.errors import ListenError
from pilotfish.edge_runtime.serving import event_handlers
from pilotfish.wire import rollover
from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.connections import Bounds
from pilotfish.wire.keys import DeviceKeys, EdgeKeys
from pilotfish.wire.messages import Ping
from pilotfish.wire.reuseport import Route, SharedPort
from pilotfish.wire.transport import Listener

WAIT_S = 30.0
BOUNDS = Bounds(64, 64, 2**20)
Pair = tuple[bytes, bytes]  # public, secret


@pytest.fixture
def held(key_folders: dict[str, Path]) -> EdgeKeys:
    return EdgeKeys.load(key_folders["edge"])


@pytest.fixture(params=["tcp://127.0.0.1:0", "tcp://[::1]:0", "tcp://*:0"])
def listener(held: EdgeKeys, request: pytest.FixtureRequest) -> Iterator[Listener]:
    with listening(held, getattr(request, "param", "tcp://127.0.0.1:0")) as started:
        yield started


@contextmanager
def listening(held: EdgeKeys, endpoint: str, descriptor: int | None = None) -> Iterator[Listener]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    started = Listener(context, endpoint, held, BOUNDS, descriptor)
    try:
        yield started
    finally:
        started.close()
        context.destroy(linger=0)


@contextmanager
def device(listener: Listener, alice: DeviceKeys, edge: bytes) -> Iterator[EdgeChannel]:
    """A device of Alice's that has this public key of the edge."""
    endpoint = listener.endpoint.replace("0.0.0.0", "127.0.0.1")
    channel = EdgeChannel(endpoint, DeviceKeys(alice.secret, alice.public, edge), 2**20)
    try:
        yield channel
    finally:
        channel.close(0)


def attempts(listener: Listener, *channels: EdgeChannel) -> list[int]:
    """Let devices in; how many handshakes each of them took."""
    deadline = time.monotonic() + WAIT_S
    poller = zmq.Poller()
    table: dict[object, Callable[[], object]] = dict(event_handlers(listener).items())
    table.update((channel.sources[1], channel.read_events) for channel in channels)
    for descriptor in table:
        poller.register(descriptor, zmq.POLLIN)
    while not all(channel.connected for channel in channels):
        assert time.monotonic() < deadline, [each.attempts.handshakes_failed for each in channels]
        for descriptor, _ in poller.poll(100):  # at once, as an edge does
            table[descriptor]()
        for channel in channels:  # a handshake that failed is repeated when that is due
            channel.read_events()
    return [channel.attempts.handshakes_failed + 1 for channel in channels]


def pinged(listener: Listener, channel: EdgeChannel) -> None:
    """A message arrives, over a connection that was there before."""
    channel.send(Ping(nonce=1))
    deadline = time.monotonic() + WAIT_S
    while (envelope := listener.receive()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert envelope.owner


def test_a_whole_rotation(listener: Listener, held: EdgeKeys, key_folders: dict[str, Path]) -> None:
    alice = DeviceKeys.load(key_folders["alice"])
    old, (new, secret) = alice.edge, zmq.curve_keypair()
    assert listener.gate is not None
    with device(listener, alice, old) as stays:
        assert attempts(listener, stays) == [1]
        listener.set_secret_keys(secret, held.secret)
        assert listener.gate.clients_of_former_key == {alice.public}
        for edge, most in ((new, 1), (old, 2), (old, 1)):
            with device(listener, alice, edge) as comes:
                [took] = attempts(listener, comes)
                assert took <= most, edge
                assert listener.gate.clients_of_former_key == (
                    {alice.public} if edge == old else set()
                )
                pinged(listener, comes)
        pinged(listener, stays)
        listener.set_secret_keys(secret, None)
        with device(listener, alice, new) as comes:
            assert attempts(listener, comes) == [1]
        pinged(listener, stays)
        with device(listener, alice, old) as comes:
            begun_s = time.monotonic()
            while comes.attempts.handshakes_failed < 3:
                assert time.monotonic() - begun_s < WAIT_S
                listener.connections.read_events()
                comes.receive_raw(0.01)
            assert not comes.connected
        assert stays.connections == 1


def test_devices_of_both_keys_behind_one_address(
    held: EdgeKeys, key_folders: dict[str, Path]
) -> None:
    """Which is the worst case: chance decides, with an even chance for each attempt."""
    alice = DeviceKeys.load(key_folders["alice"])
    new, secret = zmq.curve_keypair()
    with listening(held, "tcp://127.0.0.1:0") as listener:
        listener.set_secret_keys(secret, held.secret)
        keys = [alice.edge, new] * 4
        openings = [device(listener, alice, key) for key in keys]
        channels = [each.__enter__() for each in openings]
        took = attempts(listener, *channels)
        for each in openings:
            each.__exit__(None, None, None)
    assert sum(took) / len(took) < 8
    assert listener.connections.undecipherable >= sum(took) - len(took) - len(keys)


PRESENT, FORMER, EITHER = (1,), (0,), (1, 0)


@pytest.mark.parametrize(
    ("misses", "expected"),
    [
        ([("a", 0.0)], FORMER),
        ([("a", 0.0), ("a", 60.0)], PRESENT),  # it has moved on
        ([("a", 0.0), ("a", 60.0), ("a", 61.0)], FORMER),  # another one is there, too
        ([("a", 0.0), ("a", 0.1)], EITHER),  # two devices at once
        ([("a", 0.0), ("a", 0.1), ("a", 60.0)], EITHER),
        ([("b", 0.0)], PRESENT),
        ([("", 0.0)], FORMER),  # it left before its address was known: all are given to that one
        ([("", 0.0), ("", 0.1)], EITHER),
        ([("", 0.0), ("", 60.0)], PRESENT),
        ([("", 0.0), ("a", 0.1)], PRESENT),
        # a stranger without pause, where nothing is to be changed any more, keeps nobody out
        ([*(("b", 0.001 * n) for n in range(400)), ("a", 0.4)], FORMER),
        ([("a", 0.0), ("a", 0.001)], FORMER),  # no second program so soon; it comes again
    ],
)
def test_where_an_address_is_led_after_failures(
    held: EdgeKeys,
    monkeypatch: pytest.MonkeyPatch,
    misses: list[tuple[str, float]],
    expected: tuple[int, ...],
) -> None:
    steered: list[tuple[Route, dict[str, Route]]] = []
    clock = [time.monotonic()]
    with listening(held, "tcp://127.0.0.1:0") as listener:
        listener.set_secret_keys(zmq.curve_keypair()[1], held.secret)
        assert listener.rollover is not None
        monkeypatch.setattr(
            SharedPort, "steer", lambda _, usual, routes: steered.append((usual, dict(routes)))
        )
        monkeypatch.setattr(rollover, "monotonic", lambda: clock[0])
        begun_s = clock[0]
        for address, at_s in misses:
            clock[0] = begun_s + at_s
            listener.rollover.note_undecipherable(address)
    usual, routes = steered[-1]
    assert routes.get("a", usual) == expected


def test_a_second_rotation_follows_the_first(held: EdgeKeys, key_folders: dict[str, Path]) -> None:
    alice = DeviceKeys.load(key_folders["alice"])
    pairs = [zmq.curve_keypair() for _ in range(2)]
    with listening(held, "tcp://127.0.0.1:0") as listener:
        former = held.secret
        for public, secret in pairs:
            listener.set_secret_keys(secret, former)
            listener.set_secret_keys(secret, None)
            former = secret
            with device(listener, alice, public) as comes:
                assert attempts(listener, comes) == [1]


def test_a_port_that_another_process_opened_without_sharing_it_goes_on_as_it_was(
    held: EdgeKeys, key_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under systemd's socket unit, whose sockets are root's."""
    alice = DeviceKeys.load(key_folders["alice"])

    def refused(self: SharedPort, backlog: int) -> int:
        raise ListenError("A second socket cannot listen on this port: Address already in use.")

    monkeypatch.setattr(SharedPort, "open_socket", refused)
    with listening(held, "tcp://127.0.0.1:0") as listener:
        with pytest.raises(ListenError, match="in use"):
            listener.set_secret_keys(zmq.curve_keypair()[1], held.secret)
        with device(listener, alice, alice.edge) as comes:
            assert attempts(listener, comes) == [1]


def test_an_address_of_a_path_has_one_key(held: EdgeKeys, tmp_path: Path) -> None:
    with (
        listening(held, f"ipc://{tmp_path}/edge") as listener,
        pytest.raises(ListenError, match="cannot listen"),
    ):
        listener.set_secret_keys(zmq.curve_keypair()[1], held.secret)


def hits(sockets: tuple[socket.socket, socket.socket], source: str, count: int) -> list[int]:
    """So many connections from an address: how many each socket took."""
    family = socket.AF_INET6 if ":" in source else socket.AF_INET
    target = "::1" if ":" in source else "127.0.0.1"
    port = sockets[0].getsockname()[1]
    made = []
    for _ in range(count):
        made.append(socket.socket(family))
        made[-1].bind((source, 0))
        made[-1].connect((target, port))
    taken = [0, 0]
    for number, each in enumerate(sockets):
        while True:
            try:
                each.accept()[0].close()
            except BlockingIOError:
                break
            taken[number] += 1
    for each in made:
        each.close()
    return taken


@pytest.mark.parametrize(
    ("bound", "source", "stranger"),
    [("127.0.0.1", "127.0.0.5", "127.0.0.6"), ("::1", "::1", ""), ("::", "127.0.0.5", "127.0.0.6")],
)
def test_the_kernel_goes_by_the_source_address(bound: str, source: str, stranger: str) -> None:
    first = socket.socket(socket.AF_INET6 if ":" in bound else socket.AF_INET)
    if bound == "::":
        first.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    first.bind((bound, 0))
    first.listen(64)
    first.setblocking(False)
    port = SharedPort(first.fileno())
    with first, socket.socket(fileno=port.open_socket(64)) as second:
        both = first, second
        crowd = {f"10.1.{number % 200}.7": (0, 1) for number in range(1000)}
        for usual in (0, 1):
            port.steer((usual,), {})
            assert hits(both, source, 8)[usual] == 8
            port.steer((usual,), crowd | {source: (1 - usual,)})
            assert hits(both, source, 8)[1 - usual] == 8
            if stranger:
                assert hits(both, stranger, 8)[usual] == 8
        port.steer((0,), {source: (0, 1)})
        assert min(hits(both, source, 40)) > 0
        port.steer((0, 1), {})
        assert min(hits(both, source, 40)) > 0
