"""Memory is charged to the peer that caused it, whatever else makes the process grow."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import zmq

from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.wire import messages as m
from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.io_memory import MAX_OVERHEAD_BYTES, OverheadMeter, clear_overhead
from pilotfish.wire.keys import DeviceKeys, EdgeKeys
from pilotfish.wire.link.tcp import Volume
from pilotfish.wire.memory_watch import MemorySample, ReceiveCounter
from pilotfish.wire.peer_connection import UNFINISHED
from pilotfish.wire.transport import Envelope, Listener
from tests.support.bare_peer import part, shake_hands
from tests.support.hostile import RawClient
from tests.support.listening import listening

Ends = tuple[EdgeKeys | None, DeviceKeys | None]
MESSAGE = 1_000_000
# ZeroMQ hears nothing of a peer within a frame, which must not take longer than its patience.
FRAMES = [bytes(MESSAGE // 8)] * 8
BPS = 4e6  # so that the message takes two seconds
PART = part(20_000)
TINY, SMALL = b"\x01\x00" * 30_000, b"\x01\x22" + b"x" * 34  # 2 and 36 bytes a frame


@contextmanager
def growing() -> Iterator[None]:
    """The process grows by 160 MiB and shrinks again, ever so often, in a thread of its own."""
    over = threading.Event()

    def grow() -> None:
        remaining = []
        while not over.wait(0.02):
            remaining.append(np.ones(1 << 19))
            if len(remaining) == 40:
                remaining.clear()

    growth = threading.Thread(target=grow)
    growth.start()
    try:
        yield
    finally:
        over.set()
        growth.join()


def await_message(take: Callable[[], int], size: int, within_s: float = 20.0) -> None:
    """Take messages until one of at least this size has come. take: the next one's size, or 0."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        taken = take()
        if taken >= size:
            return
        if not taken:
            time.sleep(0.005)
    pytest.fail("the message did not come")


def served(listener: Listener) -> Envelope | None:
    """Answer handshakes, and take the next message."""
    if listener.gate is not None:
        listener.gate.answer_requests()
    return listener.receive()


def served_size(listener: Listener) -> int:
    envelope = served(listener)
    return 0 if envelope is None else envelope.size


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def ends(request: pytest.FixtureRequest, key_folders: dict[str, Path]) -> Ends:
    """The keys of an edge and of its device, or none."""
    if not request.param:
        return None, None
    return EdgeKeys.load(key_folders["edge"]), DeviceKeys.load(key_folders["alice"])


def test_a_device_is_not_charged_what_its_edge_does(ends: Ends) -> None:
    ours, theirs = ends
    with (
        listening(ours) as listener,
        Emulator(listener.endpoint, Conditions(up_bps=BPS)) as link,
        RawClient(link.endpoint, theirs) as device,
    ):
        device.say(m.Ping(nonce=1))
        await_message(lambda: served_size(listener), 1)
        device.say(m.Ping(nonce=2), *FRAMES)
        with growing():
            await_message(lambda: served_size(listener), MESSAGE)
        assert not listener.connections.cuts


def test_an_edge_is_not_charged_what_its_device_does(ends: Ends) -> None:
    ours, theirs = ends
    with (
        listening(ours) as listener,
        Emulator(listener.endpoint, Conditions(down_bps=BPS)) as link,
    ):
        channel = EdgeChannel(link.endpoint, theirs, 16 << 20)
        try:
            end_s = time.monotonic() + 10.0
            while not channel.connected:
                assert time.monotonic() < end_s
                served(listener)
                channel.receive_raw(0.01)
            channel.send(m.Ping(nonce=1))
            end_s = time.monotonic() + 10.0
            while (greeted := served(listener)) is None:
                assert time.monotonic() < end_s
                time.sleep(0.005)
            listener.send(greeted.client, m.Pong(nonce=1, received_ns=0, sent_ns=0), FRAMES)
            with growing():
                await_message(lambda: (channel.receive_raw(0.0) or (None, (), 0))[2], MESSAGE)
            assert channel.connections == 1
        finally:
            channel.close()


def spoil(endpoint: str, frames: bytes) -> None:
    """Send a message of such frames that does not end, until the connection does."""
    with suppress(OSError), shake_hands(endpoint) as hostile:
        end_s = time.monotonic() + 10.0
        while time.monotonic() < end_s:
            hostile.sendall(frames)


@pytest.mark.timing  # on a busy machine others fall behind, too
@pytest.mark.parametrize("frames", [TINY, SMALL], ids=["tiny", "alone"])
def test_it_pays_who_sends_tiny_frames_not_who_holds_most(frames: bytes) -> None:
    """Others' message is larger, and half there."""
    with listening() as listener, shake_hands(listener.endpoint) as honest, ExitStack() as stack:
        honest.sendall(40 * PART)
        time.sleep(0.3)
        hostile = [
            threading.Thread(target=spoil, args=(listener.endpoint, frames)) for _ in range(6)
        ]
        for each in hostile:
            each.start()
            stack.callback(each.join)
            for _ in range(10):
                honest.sendall(PART)
                time.sleep(0.02)
                assert listener.receive() is None
        end_s = time.monotonic() + 15.0
        while any(each.is_alive() for each in hostile):
            assert time.monotonic() < end_s
            honest.sendall(PART)
            time.sleep(0.02)
        assert listener.connections.cuts == {UNFINISHED: len(hostile)}
        honest.sendall(b"\x00\x00")
        await_message(
            lambda: served_size(listener), 10 * 20_000
        )  # all that is taken of so many parts


def test_what_one_left_unread_is_not_the_next_ones_who_has_its_descriptor() -> None:
    """It would be charged to the key of another, and be known before it has said a word."""
    with listening() as listener:
        with shake_hands(listener.endpoint, "127.0.0.2") as missing:
            missing.sendall(b"\x00\x05early")
        time.sleep(0.3)  # ZeroMQ closes its descriptor, which the next one gets
        with shake_hands(listener.endpoint) as silent:
            early = listener.receive()
            assert early is not None
            assert early.header == b"early"
            assert listener.connections.devices == 0
            silent.sendall(b"\x00\x04late")
            await_message(lambda: served_size(listener), 4)
            assert listener.connections.devices == 1


def test_of_too_much_under_way_in_all_no_more_is_cut_than_must_be() -> None:
    """Six known peers, each with a message that it may send, and room for four of these."""
    with listening(message_bytes=MESSAGE) as listener, ExitStack() as stack:
        peers = [stack.enter_context(shake_hands(listener.endpoint)) for _ in range(6)]
        for peer in peers:
            peer.sendall(b"\x00\x05early")
            await_message(lambda: served_size(listener), 5)
        assert listener.receive() is None
        listener.connections.check_memory(
            MemorySample(time.monotonic(), urgent=False)
        )  # none holds any
        for peer in peers:
            with suppress(OSError):
                peer.sendall(8 * part(120_000))
        end_s = time.monotonic() + 30.0
        while listener.connections.cuts.total() < 2:
            assert time.monotonic() < end_s
            for peer in peers:
                with suppress(OSError):
                    peer.sendall(b"\x01\x00")  # or it would be cut for its silence
            time.sleep(0.05)
        assert listener.connections.cuts == {UNFINISHED: 2}
        for peer in peers:
            with suppress(OSError):
                peer.sendall(b"\x00\x00")
        for _ in range(4):
            await_message(lambda: served_size(listener), 8 * 120_000)


@pytest.fixture
def meter() -> Iterator[OverheadMeter]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield OverheadMeter(context)
    context.destroy(linger=0)


def read_more(counter: ReceiveCounter, size: int, segments: int) -> None:
    """Have ZeroMQ read ``size`` more bytes of a message, which came in so many segments."""
    read, segments = counter._read + size, counter._segments + segments
    sample = MemorySample(time.monotonic(), urgent=True)
    counter.update(Volume(read, read, 0, segments=segments), sample, drained=False)


def test_small_frames_that_come_alone_are_charged_a_buffer_each(meter: OverheadMeter) -> None:
    """One peer sends 20,000 bytes in two segments, another 100,000 in frames of 36 bytes each.

    More memory is touched than buffers take.
    """
    honest, hostile = ReceiveCounter(False), ReceiveCounter(False)
    meter._unexplained_bytes = 40 << 20
    read_more(honest, 20_000, 2)
    read_more(hostile, 100_000, 2778)
    meter.charge([honest, hostile])
    assert hostile.overhead_bytes > 30 * honest.overhead_bytes > 0


@pytest.mark.parametrize("tricklers", [1, 2, 8])
@pytest.mark.parametrize("segment", [1460, 32_768])
def test_a_large_frame_is_not_charged_the_buffers_of_others(
    meter: OverheadMeter, tricklers: int, segment: int
) -> None:
    """A frame comes at 1 MB/s, beside 2000 frames a second of 64 bytes, each in its own segment."""
    honest, hostile = ReceiveCounter(False), [ReceiveCounter(False) for _ in range(tricklers)]
    for each in hostile:
        read_more(each, 8000, 1)  # a message has begun
    alone = 2000 // 25 // tricklers  # frames of each in a check, of which a second has 25
    for _ in range(25 * 20):
        size = 40_000 // segment * segment
        read_more(honest, size, size // segment)
        for each in hostile:
            read_more(each, 66 * alone, alone)
        meter._unexplained_bytes += size + 8192 * alone * tricklers
        meter.charge([honest, *hostile])
    assert honest.overhead_bytes == 0
    assert sum(each.overhead_bytes for each in hostile) > 20 * MAX_OVERHEAD_BYTES


def test_who_sends_large_segments_does_not_explain_the_buffers_of_small_ones(
    meter: OverheadMeter,
) -> None:
    """A cut connection clears only others whose segments are no smaller than its own."""
    large, small, cut = (ReceiveCounter(False) for _ in range(3))
    for counter, segments in ((large, 7), (small, 200), (cut, 5)):
        read_more(counter, 10_000, segments)
        counter.overhead_bytes, counter.shared_overhead_bytes = 200_000, 300_000
    clear_overhead([cut], [large, small])
    assert large.overhead_bytes == 0
    assert small.overhead_bytes == 200_000


@pytest.mark.timing  # on a busy machine several frames come together, and take no memory
def test_a_slow_large_frame_stays_beside_who_sends_small_ones_alone() -> None:
    """Three peers send lone frames of 64 bytes until they are cut; the frame comes as fast."""
    size, rest = 16 << 20, 16 << 20
    with listening() as listener, ExitStack() as stack:
        honest, *hostile = (stack.enter_context(shake_hands(listener.endpoint)) for _ in range(4))
        count, end_s = len(hostile), time.monotonic() + 60.0
        honest.sendall(b"\x02" + struct.pack(">Q", size))
        while hostile:
            assert time.monotonic() < end_s
            for each in list(hostile):
                try:
                    each.sendall(b"\x01\x40" + bytes(64))
                except OSError:
                    hostile.remove(each)
            honest.sendall(bytes(730))
            rest -= 730
            time.sleep(0.0005)
        assert listener.connections.cuts == {UNFINISHED: count}
        honest.sendall(bytes(rest))
        await_message(lambda: served_size(listener), size)
