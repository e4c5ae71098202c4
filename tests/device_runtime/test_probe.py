"""What a device knows of its link before an answer, and what knowing it costs."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median

import msgspec
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import TooLargeError
from pilotfish.device_runtime.link import probing
from pilotfish.device_runtime.plan import Auto
from pilotfish.device_runtime.record import Probing, Round
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.wire import messages as m
from pilotfish.wire.link.meter import LARGE_BYTES
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.link.tcp import is_paced
from pilotfish.wire.link.train import FIRST_TRAIN, MAX_PROBE_BYTES
from tests.conftest import Pair
from tests.support.hostile import RawClient
from tests.support.known_rtt import TRIES, know_rtt
from tests.support.tiny import tiny_artifact

RTT_S = 0.04
TRAIN_BYTES = sum(FIRST_TRAIN)


@pytest.fixture(scope="module")
def road(edge: EdgeServer) -> Iterator[Emulator]:
    with Emulator(edge.endpoint, Conditions(rtt_s=RTT_S, up_bps=8e6, down_bps=40e6)) as link:
        yield link


@pytest.fixture(scope="module")
def far(pair: Pair, road: Emulator) -> Iterator[Device]:
    with Device(pair.draft, road.endpoint, threads=1) as opened:
        yield opened


@pytest.mark.timing
def test_an_answer_knows_its_link(far: Device) -> None:
    far.generate("abc", protocol="greedy", max_tokens=20, window=2)
    link = far.generate("abc", protocol="greedy", max_tokens=4).link
    assert link is not None
    assert link.rtt is not None
    assert link.rtt.value == pytest.approx(RTT_S, abs=0.01)
    assert link.rtt.age_s < 1.0
    assert link.retransmitted is not None
    assert link.up is None  # nothing was large enough to tell


def test_a_fresh_passive_sample_needs_no_ping(far: Device) -> None:
    far.generate("abc", protocol="greedy", max_tokens=12)
    answer = far.generate("abc", max_tokens=4, protocol="auto")
    assert answer.choice is not None
    assert answer.probing == Probing()


@pytest.mark.timing
def test_a_stale_one_costs_one_ping_and_one_rtt(
    pair: Pair, edge: EdgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer costs one ping. A busy machine adds to its time, so the quickest of them counts.

    If the machine suspends the device during a ping, the RTT stays unknown.
    """
    monkeypatch.setattr(probing, "FRESH_S", 0.0)  # every reading is stale
    rtt_s, quickest_s = 0.3, math.inf
    with (
        Emulator(edge.endpoint, Conditions(rtt_s=rtt_s)) as link,
        Device(pair.draft, link.endpoint, threads=1) as device,
    ):
        know_rtt(device)
        for _ in range(TRIES):
            begun_s = time.monotonic()
            answer = device.generate("abc", max_tokens=1, protocol="auto", window=0)
            took_s = time.monotonic() - begun_s
            pings, up, down = answer.probing
            assert pings == 1
            assert 0 < up < 60
            assert 0 < down < 60
            assert answer.link is not None
            if answer.link.rtt is not None and answer.link.rtt.age_s < took_s:
                quickest_s = min(quickest_s, took_s)
            if quickest_s < 2.7 * rtt_s:  # the ping and the one round, but no third exchange
                return
    pytest.fail(f"the quickest answer took {quickest_s} s")


def test_the_first_large_window_is_no_rate(pair: Pair, edge: EdgeServer) -> None:
    """A single large message shows no rate, since jitter may have delayed it."""
    seen: list[tuple[Round, LinkState | None]] = []
    slow = Conditions(rtt_s=0.01, up_bps=1e6)
    with (
        Emulator(edge.endpoint, slow) as link,
        Device(
            pair.draft,
            link.endpoint,
            threads=1,
            on_round=lambda each: seen.append((each, device.link_state())),
        ) as device,
    ):
        know_rtt(device)
        seen.clear()
        large = {"protocol": "dsd", "format": "fp32", "window": 64, "temperature": 1.0}
        device.generate("abc", max_tokens=66, seed=1, **large)
    first, state = seen[0]
    assert first.uplink_bytes >= LARGE_BYTES
    assert state is not None
    assert state.up is None


def test_an_edge_tells_whether_its_tcp_sends_at_a_pace(far: Device) -> None:
    assert far.welcome is not None
    assert far.welcome.paced == is_paced()  # the edge is on this machine


def test_a_fixed_protocol_is_never_held_up_by_a_ping(
    far: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "FRESH_S", 0.0)
    assert far.generate("abc", max_tokens=4, protocol="greedy").probing == Probing()


@pytest.mark.timing
def test_rates_are_probed_only_where_they_matter(pair: Pair, road: Emulator) -> None:
    with Device(pair.draft, road.endpoint, threads=1) as device:
        greedy = device.generate("abc", max_tokens=12, protocol="auto")
        assert greedy.probing.pings <= 1  # the handshake may be fresh
        assert greedy.probing.uplink_bytes < 60
        thin = device.generate(
            "abc", max_tokens=12, protocol=Auto(among=["coupled", "stream"]), temperature=1.0
        )
        assert thin.probing == Probing()
        heavy = device.generate("abc", max_tokens=12, protocol="auto", temperature=1.0)
        assert heavy.probing.pings <= 2
        assert TRAIN_BYTES < heavy.probing.uplink_bytes < 1.02 * MAX_PROBE_BYTES
        assert TRAIN_BYTES < heavy.probing.downlink_bytes < 1.02 * MAX_PROBE_BYTES
        assert heavy.link is not None
        assert heavy.link.up is not None
        assert heavy.link.up.value == pytest.approx(8e6, rel=0.5)
        known = device.generate("abc", max_tokens=12, protocol="auto", temperature=1.0)
        assert known.probing == Probing()


@pytest.mark.timing
def test_asked_for_rates_are_measured(far: Device) -> None:
    ups, downs = [], []
    for _ in range(6):  # half a millisecond of scheduling is a fifth of the way down
        far.generate("abc", protocol="greedy", max_tokens=1, window=0)
        state = far.probe(rates=True)
        ups += [state.up.value] if state.up is not None else []
        downs += [state.down.value] if state.down is not None else []
    # a busy machine reads messages late; then a rate is unknown
    assert len(ups) >= 3
    assert median(ups) == pytest.approx(8e6, rel=0.15)
    assert all(bps == pytest.approx(40e6, rel=0.5) for bps in downs)


@pytest.mark.timing
def test_real_messages_tell_rates(pair: Pair, edge: EdgeServer) -> None:
    """A window of 60 distributions of 72 tokens, with 4 bytes each, is 17 kB a message.

    A busy machine reads some messages late, and so falsifies some rates: the median counts.
    """
    rates_bps = []
    with (
        Emulator(edge.endpoint, Conditions(rtt_s=0.01, up_bps=4e6, down_bps=40e6)) as link,
        Device(pair.draft, link.endpoint, threads=1) as device,
    ):
        for seed in range(TRIES):
            know_rtt(device)
            large = {"protocol": "dsd", "format": "fp32", "window": 60, "temperature": 1.0}
            device.generate("abc", max_tokens=120, seed=seed, **large)
            state = device.generate("abc", protocol="greedy", max_tokens=2).link
            assert state is not None
            rates_bps += [] if state.up is None else [state.up.value]
            if len(rates_bps) >= 3 and median(rates_bps) == pytest.approx(4e6, rel=0.1):
                break
    assert median(rates_bps) == pytest.approx(4e6, rel=0.1)


def test_a_ping_brings_back_what_it_carried(edge: EdgeServer) -> None:
    with RawClient(edge.endpoint) as client:
        for frames in ([], [b"x" * TRAIN_BYTES], [b"y" * (m.MAX_PROBE - 64)]):
            client.say(m.Ping(nonce=7), *frames)
            reply, back = client.receive_all()
            assert isinstance(reply, m.Pong)
            assert list(map(bytes, back)) == frames


def test_a_pong_tells_the_segments_that_the_edge_sent(edge: EdgeServer) -> None:
    with RawClient(edge.endpoint) as client:
        counts = []
        for _ in range(2):
            client.say(m.Ping(nonce=7), b"x" * 100_000)
            reply, _ = client.receive_all()
            assert isinstance(reply, m.Pong)
            counts.append(reply)
        assert counts[1].segments > counts[0].segments
        assert counts[1].repeated < counts[1].segments


@pytest.mark.parametrize("frames", [[b"", b""], [b"z" * (m.MAX_PROBE + 1)]])
def test_a_ping_is_bounded(edge: EdgeServer, frames: list[bytes]) -> None:
    with RawClient(edge.endpoint) as client:
        client.say(m.Ping(nonce=7), *frames)
        client.fails("malformed")


def probe(*arguments: str, timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pilotfish", "probe", *arguments],
        capture_output=True, text=True, check=False, timeout=timeout,
    )  # fmt: skip


@pytest.mark.timing
def test_the_command(road: Emulator) -> None:
    done = probe(road.endpoint, "--json", "-")
    assert done.returncode == 0, done.stderr
    payload = json.loads(done.stdout)
    assert payload["link"]["rtt"]["value"] == pytest.approx(RTT_S, abs=0.01)
    assert payload["link"]["up"]["value"] == pytest.approx(8e6, rel=0.2)
    assert payload["probing"]["pings"] in range(13, 17)  # 10 RTTs; 3 times one or two trains
    assert payload["probing"]["uplink_bytes"] > 3 * TRAIN_BYTES


def test_the_command_for_people(edge: EdgeServer) -> None:
    done = probe(edge.endpoint, "--no-rates", "--pings", "3")
    assert done.returncode == 0, done.stderr
    assert "RTT" in done.stdout
    assert "no radio" in done.stdout or "dBm" in done.stdout
    assert "3 pings" in done.stderr


def test_watching_ends_with_ctrl_c(edge: EdgeServer) -> None:
    command = [sys.executable, "-m", "pilotfish", "probe", edge.endpoint]
    with subprocess.Popen(
        [*command, "--watch", "--every", "0.05"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as watching:  # fmt: skip
        assert watching.stdout is not None
        heading = watching.stdout.readline()
        for _ in range(TRIES):  # "-" if the machine held up the ping
            rtt_ms = watching.stdout.readline().split()[1]
            if rtt_ms != "-":
                break
        watching.send_signal(2)
        _, info = watching.communicate(timeout=60)
        assert watching.returncode == 130
        summary, _, last = info.rstrip().rpartition("\n")
        assert summary.startswith("pilotfish: ")
        assert last == "pilotfish: interrupted"
    assert "RTT" in heading
    assert float(rtt_ms) < 1000


@pytest.mark.parametrize(
    ("address", "code"), [("tcp://127.0.0.1:1", 69), ("tcp://127.0.0.1", 64), ("tcp://e.x:7", 64)]
)
def test_an_edge_that_cannot_be_probed(address: str, code: int) -> None:
    done = probe(address)
    assert done.returncode == code
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_rates_are_due_though_answers_come_slowly(
    pair: Pair, road: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person types for longer than an RTT stays fresh."""
    auto = Auto(among=["tslt", "dsd"])
    with Device(pair.draft, road.endpoint, threads=1) as device:
        know_rtt(device)
        monkeypatch.setattr(probing, "FRESH_S", 0.0)
        answer = device.generate("abc", max_tokens=8, protocol=auto, temperature=1.0)
        assert answer.probing.pings <= 2
        assert answer.probing.uplink_bytes > TRAIN_BYTES


@pytest.mark.parametrize(("pongs", "size"), [(1, 0), (16, 0), (3, 700), (16, 8192)])
def test_a_train_is_answered_at_once(edge: EdgeServer, pongs: int, size: int) -> None:
    with RawClient(edge.endpoint) as client:
        client.say(m.Train(nonce=5, pongs=pongs, bytes=size), b"unreturned")
        client.say(m.Ping(nonce=6))
        frames_seen = set()
        for _ in range(pongs):
            reply, frames = client.receive_all()
            assert isinstance(reply, m.Pong)
            assert reply.nonce == 5
            assert [len(frame) for frame in frames] == ([size] if size else [])
            frames_seen |= {bytes(frame) for frame in frames}
        assert len(frames_seen) == (pongs if size else 0)  # nothing that a link could compress
        last, _ = client.receive_all()
        assert isinstance(last, m.Pong)
        assert last.nonce == 6


@pytest.mark.parametrize("fields", [(1, 17, 0), (1, 0, 0), (1, 1, 8193), (1, 1, -1), (1, 1)])
def test_a_train_is_bounded(edge: EdgeServer, fields: tuple[int, ...]) -> None:
    with RawClient(edge.endpoint) as client:
        client.send(msgspec.msgpack.encode(["train", *fields]))
        client.fails("malformed")


def test_a_long_prompt_is_no_rate(long_pair: Pair) -> None:
    with (
        EdgeServer(long_pair.target, context=16384, threads=1) as edge,
        Emulator(edge.endpoint, Conditions(rtt_s=0.01, up_bps=10e6)) as link,
        Device(long_pair.draft, link.endpoint, threads=1) as device,
    ):
        device.generate([5] * 8000, protocol="greedy", max_tokens=4)  # 16 kB
        state = device.generate([5], protocol="greedy", max_tokens=4).link
        assert state is not None
        assert state.up is None


def test_an_edge_that_comes_back_with_other_limits(pair: Pair) -> None:
    with EdgeServer(pair.target, threads=1) as first:
        address = first.endpoint
        device = Device(pair.draft, address, threads=1)
        device.generate("abc", protocol="greedy", max_tokens=12, window=8)
    with device, EdgeServer(pair.target, listen=address, threads=1, max_window=2):
        device.generate(
            "abc", protocol="greedy", max_tokens=1, window=0
        )  # finds that the connection is another one
        for protocol in ("greedy", Auto(among=["greedy"])):  # hints have no windows
            answer = device.generate("abc", max_tokens=12, protocol=protocol)
            windows = [each.window for each in answer.rounds if each.source in ("", "device")]
            assert max(windows) <= 2  # of what the edge drafts for itself it decides itself
        assert device.welcome is not None
        assert device.welcome.limits.window == 2


@pytest.mark.timing
def test_waiting_for_an_edge_is_no_rtt(pair: Pair) -> None:
    with EdgeServer(pair.target, threads=1) as first:
        address = first.endpoint
        device = Device(pair.draft, address, threads=1)
        device.generate("abc", protocol="greedy", max_tokens=12)
    with device, EdgeServer(pair.target, listen=address, threads=1):
        for _ in range(3):
            link = device.generate("abc", max_tokens=4, protocol="auto").link
            assert link is not None
            assert link.rtt is not None
            assert link.rtt.value < 0.05


def test_windows_that_the_edge_would_not_read_are_not_sent(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("wide")
    wide = tiny_artifact(folder, vocab=40_000, seed=1)
    with (
        EdgeServer(folder, message_mib=1, threads=1) as edge,
        Device(folder, edge.endpoint, threads=1) as device,
    ):
        prompt = [1, 2, 3]
        with pytest.raises(TooLargeError, match="use a smaller window"):
            device.generate(prompt, protocol="dsd", window=16, temperature=1.0, max_tokens=40)
        for _ in range(2):
            answer = device.generate(
                prompt, protocol=Auto(among=["dsd"]), temperature=1.0, max_tokens=40
            )
            assert max(round_.uplink_bytes for round_ in answer.rounds) < 2**20
    assert wide.manifest.vocab_size == 40_000


STOPPED = """
import os, signal, sys, threading
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.probing import ping

link = EdgeLink(sys.argv[1], None)
link.connect()
ping(link)
stop = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP))
stop.start()
ping(link)
stop.join()
print(link.state().rtt.samples, link.state().rtt.value)
link.close()
"""


def test_a_device_that_was_stopped_meanwhile_takes_it_for_no_rtt(edge: EdgeServer) -> None:
    """Not so long that the connection breaks: then the ping would be sent again, and not count."""
    with Emulator(edge.endpoint, Conditions(rtt_s=0.3)) as link:
        command = [sys.executable, "-c", STOPPED, link.endpoint]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pinging:
            _, status = os.waitpid(pinging.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            time.sleep(0.7)
            pinging.send_signal(signal.SIGCONT)
            samples, rtt_s = pinging.communicate(timeout=60)[0].split()
    assert samples == "1"
    assert float(rtt_s) < 0.45
