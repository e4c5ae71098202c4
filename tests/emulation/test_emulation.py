"""The emulated link is what was asked for: real sockets, a real proxy process, a real clock.

A machine with other work wakes late, and then a measurement is made again. The first few go by the
median; the last by the quicker quarter, since what such a machine does is to make trips longer. An
emulator that is off would be off each time, and in all trips.
"""

from __future__ import annotations

import hashlib
import random
import socket
import statistics
import struct
import threading
import time
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish import Device
from pilotfish.emulation.emulator import Conditions, Emulator
from tests.support.examples import examples
from tests.support.tcp import arrivals, connected, echo, received, round_trips_s, serving

SHARES = (0.5, 0.5, 0.5, 0.25, 0.25, 0.25)


@pytest.fixture(scope="module")
def echoing():
    with serving(echo) as endpoint:
        yield endpoint


def within(measure, wanted, tolerance):
    """``measure``, told which share of its values to go by, comes as near as this to ``wanted``."""
    seen = []
    for share in SHARES:
        seen.append(measure(share))
        if abs(seen[-1] - wanted) <= tolerance:
            return
        time.sleep(0.2)
    pytest.fail(f"wanted {wanted} ± {tolerance}, measured {seen}")


def quantile(values, share):
    ordered = sorted(values)
    return ordered[int(len(ordered) * share)]


# -- delay -----------------------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.parametrize("rtt_s", [0.0, 0.001, 0.02, 0.05])
def test_the_round_trip_is_right_to_a_millisecond(echoing, rtt_s):
    bare_s = statistics.median(round_trips_s(echoing, 25))
    with Emulator(echoing, Conditions(rtt_s=rtt_s)) as link:
        within(
            lambda share: quantile(round_trips_s(link.endpoint, 25), share) - bare_s, rtt_s, 0.001
        )


@pytest.mark.timing
def test_jitter_stays_in_its_bounds(echoing):
    rtt_s, jitter_s = 0.01, 0.02
    with Emulator(echoing, Conditions(rtt_s=rtt_s, jitter_s=jitter_s, seed=3)) as link:

        def quarters(_):
            times = sorted(round_trips_s(link.endpoint, 40))
            assert times[0] >= rtt_s - 0.0005  # nothing makes a trip shorter
            # a sum of two even draws is a triangle: mean ± range·(1 − √½)/2 hold its middle half
            ideal = [rtt_s + jitter_s * x for x in (0.354, 0.5, 0.646)]
            off = [abs(times[10 * (i + 1)] - at) for i, at in enumerate(ideal)]
            late = max(0.0, times[-2] - (rtt_s + jitter_s))
            return max(*off, late)

        within(quarters, 0.0, 0.003)


def test_a_small_message_is_not_held_up_by_what_came_behind_it():
    """They come in one piece, but the small one has left long before the other."""
    seen = []

    def note(connection):
        seen.extend(arrivals(connection))
        connection.sendall(b".")

    with (
        serving(note) as endpoint,
        Emulator(endpoint, Conditions(up_bps=5e6)) as link,
        connected(link.endpoint) as client,
    ):
        start = time.monotonic()
        client.sendall(bytes(60 + 62_500))
        client.shutdown(socket.SHUT_WR)
        received(client, 1)
    assert seen[0][0] - start < 0.02
    assert seen[-1][0] - start == pytest.approx(0.1, abs=0.02)


# -- rate ------------------------------------------------------------------------------------------


def goodput_bps(link, way, size):
    """Of a transfer up or down, from the first arrival to the last."""
    seen: list[tuple[float, int]] = []

    def serve(connection):
        if received(connection, 1) == b"u":
            seen.extend(arrivals(connection))
            connection.sendall(b".")
        else:
            connection.sendall(bytes(size))

    with (
        serving(serve) as endpoint,
        Emulator(endpoint, link) as emulator,
        connected(emulator.endpoint) as client,
    ):
        if way == "up":
            client.sendall(b"u" + bytes(size))
            client.shutdown(socket.SHUT_WR)
            assert received(client, 1) == b"."
        else:
            client.sendall(b"d")
            seen.extend(arrivals(client))
    return sum(count for _, count in seen[1:]) * 8 / (seen[-1][0] - seen[0][0])


@pytest.mark.timing
@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("rate_bps", [5e6, 20e6, 100e6])
def test_the_rate_is_right_to_three_percent(way, rate_bps):
    other = {"up": "down_bps", "down": "up_bps"}[way]
    link = Conditions(**{f"{way}_bps": rate_bps, other: 1e6, "rtt_s": 0.01})
    size = int(rate_bps / 8 * 0.6)
    within(lambda _: goodput_bps(link, way, size), rate_bps, 0.03 * rate_bps)


@pytest.mark.timing
def test_connections_share_the_rate():
    totals: dict[int, int] = {}

    def count(connection):
        number = received(connection, 1)[0]
        for _, size in arrivals(connection):
            totals[number] = totals.get(number, 0) + size

    with serving(count) as endpoint, Emulator(endpoint, Conditions(up_bps=40e6)) as link:
        start = time.monotonic()

        def fill(number):
            with connected(link.endpoint) as client:
                client.sendall(bytes([number]) + bytes(625_000))

        senders = [threading.Thread(target=fill, args=(number,)) for number in range(4)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        while sum(totals.values()) < 4 * 625_000:
            assert time.monotonic() - start < 10
            time.sleep(0.002)
        assert time.monotonic() - start == pytest.approx(0.5, rel=0.1)
    assert set(totals.values()) == {625_000}


# -- the buffer ------------------------------------------------------------------------------------


def acknowledged_over_time(client, size):
    """Sample the sender's TCP: (seconds, payload bytes acknowledged) until all are."""
    begun, seen = time.monotonic(), []
    while not seen or seen[-1][1] < size:
        info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
        seen.append((time.monotonic() - begun, struct.unpack_from("Q", info, 120)[0]))
        assert seen[-1][0] < 20
        time.sleep(0.01)
    return seen


def test_a_sender_sees_the_rate_of_a_slow_link_in_what_is_acknowledged():
    """As over a real one: acknowledgements move on all the time, little ahead of the link."""
    rate_bps, size = 256e3, 48_000  # 1.5 s
    with (
        serving(echo) as endpoint,
        Emulator(endpoint, Conditions(rtt_s=0.1, up_bps=rate_bps)) as link,
        connected(link.endpoint) as client,
    ):
        client.sendall(bytes(size))
        seen = acknowledged_over_time(client, size)
    ahead = [count - at * rate_bps / 8 for at, count in seen]
    assert max(ahead) <= 8000 + 2 * 4000 + 1500  # the buffer, the kernel's, a segment
    moved = [at for (at, count), (_, after) in pairwise(seen) if after > count]
    assert max(b - a for a, b in pairwise(moved)) < 0.5


def test_a_larger_buffer_takes_a_message_at_once():
    """All of it is acknowledged while most is still on the link, where it takes six seconds."""
    arrived = [0]

    def count(connection):
        for _, size in arrivals(connection):
            arrived[0] += size

    with (
        serving(count) as endpoint,
        Emulator(endpoint, Conditions(up_bps=64e3, buffer_bytes=60_000)) as link,
        connected(link.endpoint) as client,
    ):
        client.sendall(bytes(48_000))
        acknowledged_over_time(client, 48_000)
        assert arrived[0] < 24_000


# -- traces ----------------------------------------------------------------------------------------


@pytest.mark.timing
def test_each_second_of_a_trace_delivers_what_the_file_says(tmp_path):
    per_second = [40, 300, 0, 120]  # kept from the seconds' edges, so that each can be exact
    times = [
        second * 1000 + 100 + 800 * i // count
        for second, count in enumerate(per_second)
        for i in range(count)
    ]
    path = tmp_path / "trace"
    path.write_text("".join(f"{time}\n" for time in [*times, 4000]))
    expected = [40, 300, 0, 120, 41]  # the last is the period; then it begins again

    def measure():
        bins = [0] * 6

        def count(connection):
            for at, size in arrivals(connection):
                bins[min(int(at - link.since_s), 5)] += size

        with (
            serving(count) as endpoint,
            Emulator(endpoint) as link,
            connected(link.endpoint) as client,
        ):
            client.settimeout(0.2)
            link.set(trace_up=path)
            while time.monotonic() < link.since_s + 4.97:
                with suppress(TimeoutError):
                    client.send(bytes(20_000))
        return [size / 1500 for size in bins[:5]]

    seen = []
    for _ in range(3):
        seen.append(measure())
        off = [abs(have - want) for have, want in zip(seen[-1], expected, strict=True)]
        # whole segments arrive, and one may be half through at the edge of a second
        if max(off) <= 1 and abs(sum(seen[-1]) - sum(expected)) <= 1:
            return
    pytest.fail(f"wanted {expected} packets a second, measured {seen}")


# -- change ----------------------------------------------------------------------------------------


@pytest.mark.timing
def test_the_round_trip_changes_while_it_runs(echoing):
    with Emulator(echoing, Conditions(rtt_s=0.01)) as link, connected(link.endpoint) as client:

        def echo_s():
            start = time.monotonic()
            client.sendall(b"ping")
            received(client, 4)
            return time.monotonic() - start

        for rtt_s in (0.01, 0.06, 0.0, 0.03):
            link.set(rtt_s=rtt_s)
            assert link.conditions == Conditions(rtt_s=rtt_s)
            within(lambda share: quantile([echo_s() for _ in range(9)], share), rtt_s, 0.004)


@pytest.mark.timing
def test_the_rate_changes_in_the_middle_of_a_message():
    done = threading.Event()
    seen = []

    def note(connection):
        seen.extend(arrivals(connection))
        done.set()

    def measure(_):
        seen.clear()
        done.clear()
        with (
            serving(note) as endpoint,
            Emulator(endpoint, Conditions(up_bps=4e6)) as link,
            connected(link.endpoint) as client,
        ):
            start = time.monotonic()
            client.sendall(bytes(500_000))  # a second at 4 Mbit/s
            client.shutdown(socket.SHUT_WR)
            time.sleep(0.25)
            link.set(up_bps=40e6)
            changed = link.since_s - start
            assert done.wait(10)
        return seen[-1][0] - start - (changed + (1.0 - changed) / 10)

    within(measure, 0.0, 0.02)


# -- loss ------------------------------------------------------------------------------------------


def test_loss_shows_as_stalls_of_a_time_out_for_lone_messages(echoing):
    with Emulator(echoing, Conditions(rtt_s=0.01, loss=0.1, seed=5)) as link:
        times = round_trips_s(link.endpoint, 80)
        traffic = link.traffic()
    lost = traffic.up_lost + traffic.down_lost
    assert 6 <= lost <= 30  # 166 segments
    # each costs a time-out of RTT + 200 ms, and nothing else does (but for the three warm-ups)
    stalls = sum(round(max(0.0, spent - 0.01) / 0.21) for spent in times)
    assert lost - 3 <= stalls <= lost


@pytest.mark.timing
def test_loss_in_a_stream_holds_it_for_a_round_trip():
    rtt_s, seen = 0.05, []

    def note(connection):
        seen.extend(arrivals(connection))
        connection.sendall(b".")

    link = Conditions(rtt_s=rtt_s, up_bps=40e6, loss=0.003, seed=2)
    with (
        serving(note) as endpoint,
        Emulator(endpoint, link) as emulator,
        connected(emulator.endpoint) as client,
    ):
        client.sendall(bytes(3_000_000))  # 0.6 s
        client.shutdown(socket.SHUT_WR)
        received(client, 1)
        lost = emulator.traffic().up_lost
    assert sum(size for _, size in seen) == 3_000_000
    # two that are lost within a round trip make one stall; a busy machine may make others
    stalls = [(later - at, size) for (at, _), (later, size) in pairwise(seen)]
    # what was held comes at once; what is under way is not lost with the one
    assert any(size > 10_000 and abs(gap - rtt_s) < 0.01 for gap, size in stalls)
    assert lost > 0
    assert seen[-1][0] - seen[0][0] == pytest.approx(0.6, abs=0.1)


# -- what goes in comes out ------------------------------------------------------------------------


@given(
    chunks=st.lists(st.integers(1, 60_000), min_size=1, max_size=25),
    link=st.builds(
        Conditions,
        rtt_s=st.sampled_from([0.0, 0.004]),
        jitter_s=st.sampled_from([0.0, 0.003]),
        up_bps=st.sampled_from([None, 30e6]),
        down_bps=st.sampled_from([None, 50e6]),
        loss=st.sampled_from([0.0, 0.002]),
        seed=st.integers(0, 9),
    ),
)
@examples(15)
def test_data_arrive_whole_and_in_order(echoing, shared_link, chunks, link):
    shared_link.set(link)
    data = random.Random(len(chunks)).randbytes(sum(chunks))
    with connected(shared_link.endpoint) as client:

        def send():
            start = 0
            for size in chunks:
                client.sendall(data[start : start + size])
                start += size
            client.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        back = b"".join(iter(lambda: client.recv(65536), b""))
        sender.join()
    assert hashlib.sha256(back).digest() == hashlib.sha256(data).digest()


@pytest.fixture(scope="module")
def shared_link(echoing):
    with Emulator(echoing) as link:
        yield link


def test_a_link_that_changes_all_the_time_loses_nothing(shared_link):
    data = random.Random(0).randbytes(3_000_000)
    stop = threading.Event()

    def meddle():
        for seed in range(10_000):
            if stop.wait(0.005):
                return
            rates = random.Random(seed).choices([None, 20e6, 80e6, 400e6], k=2)
            shared_link.set(
                Conditions(rtt_s=0.002 * (seed % 5), up_bps=rates[0], down_bps=rates[1], seed=seed)
            )

    meddler = threading.Thread(target=meddle)
    meddler.start()
    with connected(shared_link.endpoint) as client:
        sender = threading.Thread(target=client.sendall, args=(data,))
        sender.start()
        back = received(client, len(data))
        sender.join()
    stop.set()
    meddler.join()
    assert back == data


# -- a pair across it ------------------------------------------------------------------------------


@pytest.mark.timing
def test_a_generation_is_the_same_across_a_long_link(pair, edge, device):
    requests = {"protocol": "greedy", "window": 4, "max_tokens": 24}
    plain = device.generate("abc", **requests)

    def travel_s(generation, share):
        return quantile([r.timings.uplink + r.timings.downlink for r in generation.rounds], share)

    def measure(share):
        distant = far.generate("abc", **requests)
        assert distant.tokens == plain.tokens
        return travel_s(distant, share) - travel_s(plain, share)

    with Emulator(edge.endpoint) as link, Device(pair.draft, link.endpoint, threads=1) as far:
        for rtt_s in (0.04, 0.02):
            link.set(rtt_s=rtt_s)
            within(measure, rtt_s, 0.002)
