"""Large messages cross any link that carries small ones, and are not sent twice."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pilotfish import EdgeServer
from pilotfish.base.errors import InterruptedGenerationError
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.link_estimator import TimedReply
from pilotfish.device_runtime.link.retry import RetryPolicy
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.wire import messages as m
from pilotfish.wire.keys import DeviceKeys
from tests.conftest import Pair
from tests.support.daemons import free_port
from tests.support.kernel_path import KernelPath, needs_paths
from tests.support.relay import Relay

HELLO = m.Hello(
    version=m.VERSION, tokenizer="", vocab_size=1, padded_vocab_size=1, hidden_size=1, bridges=True
)


@contextmanager
def linked(endpoint: str, keys: Path, policy: str = "wait") -> Iterator[EdgeLink]:
    patience = RetryPolicy.from_policy(policy, 20.0)
    link = EdgeLink(endpoint, DeviceKeys.load(keys), patience)
    link.set_hello(HELLO)
    try:
        yield link
    finally:
        link.close()


def echoed(link: EdgeLink, size: int) -> TimedReply:
    """The answer to a ping with so many bytes."""
    frame = bytes(range(256)) * (size // 256)
    answer = link.request(m.Ping(nonce=7), [frame], lambda reply: isinstance(reply, m.Pong))
    assert bytes(answer.frames[0]) == frame
    return answer


def cutting(relay: Relay, *at_s: float) -> threading.Thread:
    """Cut all connections these seconds from now."""

    def cut() -> None:
        begun_s = time.monotonic()
        for each in at_s:
            time.sleep(max(0.0, begun_s + each - time.monotonic()))
            relay.cut()

    thread = threading.Thread(target=cut, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_connection_that_is_cut_costs_only_what_was_under_way(
    locked_edge: EdgeServer, key_folders: dict[str, Path], way: str
) -> None:
    """100 kB in 3 s, with three breaks: at most 1.2 times of it crosses."""
    slow = {"up_bps": 2e6, "down_bps": 2e6} | {f"{way}_bps": 256e3}
    with Emulator(locked_edge.endpoint, Conditions(rtt_s=0.04, **slow)) as emulator:
        relay = Relay(emulator.endpoint)
        with linked(relay.endpoint, key_folders["alice"]) as link:
            echoed(link, 256)
            cuts = cutting(relay, 1.5, 2.5, 3.5)
            answer = echoed(link, 100_096)
            cuts.join()
            relay.close()
    assert relay.connections >= 3
    sent = answer.uplink_bytes if way == "up" else answer.downlink_bytes
    assert sent < 1.2 * 100_096
    assert answer.resent  # its time says nothing


def test_an_edge_that_has_it_all_is_not_sent_it_again(
    locked_edge: EdgeServer, key_folders: dict[str, Path]
) -> None:
    """The reply is lost with its connection: a question is enough."""
    relay = Relay(locked_edge.endpoint)
    with linked(relay.endpoint, key_folders["alice"]) as link:
        frame = bytes(100_000)
        sent = link.send(m.Ping(nonce=9), [frame])
        assert sent.chunked
        relay.cut()
        answer = link.wait(sent, lambda reply: isinstance(reply, m.Pong))
        assert answer.uplink_bytes < 110_000
    relay.close()


def test_whoever_changes_his_mind_often_is_not_refused(
    locked_edge: EdgeServer, key_folders: dict[str, Path]
) -> None:
    """An editor asks anew with every letter, and each time breaks off what is on its way."""
    with (
        Emulator(locked_edge.endpoint, Conditions(up_bps=1e6)) as emulator,
        linked(emulator.endpoint, key_folders["alice"], "fail") as link,
    ):
        echoed(link, 256)
        for _ in range(9):
            threading.Timer(0.1, link._cancel_token.cancel).start()
            with pytest.raises(InterruptedGenerationError):
                echoed(link, 400_128)
            link._cancel_token.reset()
        began_s = time.monotonic()
        echoed(link, 100_096)  # 0.8 s, behind what was on its way: 0.3 s each
        assert time.monotonic() - began_s < 8.0


def test_a_device_without_slices_gets_whole_replies(
    locked_edge: EdgeServer, key_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with linked(locked_edge.endpoint, key_folders["alice"]) as link:
        monkeypatch.setattr(EdgeLink, "_current_hello", lambda self: HELLO)
        answer = echoed(link, 200_192)
        assert answer.downlink_bytes < 200_300


@pytest.fixture
def holed(pair: Pair, key_folders: dict[str, Path]) -> Iterator[Callable[..., EdgeLink]]:
    """Links over paths that lose large packets, by their MTU each way."""
    with KernelPath() as path:
        endpoint = f"tcp://{path.address}:{free_port()}"
        words = ["-m", "pilotfish", "edge", "serve", "--target", pair.target, "--threads", 1]
        words += ["--listen", endpoint, "--keys", key_folders["edge"]]
        edge = subprocess.Popen(path.edge_command(sys.executable, *words))
        with path.at_device(), linked(endpoint, key_folders["alice"], "wait") as link:
            echoed(link, 0)

            def open_(policy: str, **mtus: int) -> EdgeLink:
                path.set(rtt_s=0.02, **mtus)
                link._retry_policy = link._absence._retry_policy = RetryPolicy.from_policy(
                    policy, 20.0
                )
                return link

            yield open_
        edge.kill()
        edge.wait()


@needs_paths()
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_path_that_loses_large_packets_is_crossed(
    holed: Callable[..., EdgeLink], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Within the 2.2 s that `fail` gives the edge, since it gets on with it."""
    link = holed("fail", **{f"mtu_{way}": 600})
    echoed(link, 8192)
    assert "tcp_mtu_probing" in caplog.text or way == "down"
