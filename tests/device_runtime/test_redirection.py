"""Another edge answers: it took the first one's place, or the device was sent to it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import (
    AccessDeniedError,
    KeysError,
    PairMismatchError,
    UnsupportedError,
)
from tests.conftest import Pair
from tests.device_runtime.test_link_loss import (
    PROMPT,
    SAMPLED,
    await_true,
    opened,
    relay,
    server,
    tokens_of,
)
from tests.support.relay import Relay
from tests.support.tiny import tiny_artifact

__all__ = ["relay", "server"]


def test_an_edge_of_another_vocabulary_ends_the_answer_and_is_bridged_to_in_the_next(
    long_pair: Pair, relay: Relay, server, tmp_path: Path
) -> None:
    tiny_artifact(tmp_path / "other", vocab=100, seed=9)
    with EdgeServer(tmp_path / "other", threads=1) as other:
        with Device(long_pair.draft, other.endpoint, threads=1) as device:
            wanted = device.generate(PROMPT, protocol="stream", max_tokens=10).tokens
        with opened(long_pair, relay.endpoint, "wait") as device:
            before = device.generate(PROMPT, protocol="greedy", max_tokens=10).tokens
            for there, text in ((other, wanted), (server, before)):
                pieces = device.stream(PROMPT, protocol="greedy", max_tokens=100)
                next(pieces)
                relay.turn_to(there.endpoint)
                relay.cut()
                with pytest.raises(PairMismatchError, match="repeat the request"):
                    list(pieces)
                assert device.generate(PROMPT, protocol="greedy", max_tokens=10).tokens == text
        with opened(long_pair, relay.endpoint, "local") as device:
            pieces = device.stream(PROMPT, protocol="greedy", max_tokens=100)
            next(pieces)
            relay.turn_to(other.endpoint)
            relay.cut()
            assert [piece.origin for piece in pieces][-1] == "local"
            again = device.generate(PROMPT, protocol="greedy", max_tokens=10)
            assert (again.tokens, again.recoveries) == (wanted, [])


def test_an_edge_with_narrower_limits_gets_narrower_windows(long_pair: Pair, relay: Relay) -> None:
    wish = {"protocol": "coupled", "window": 8, **SAMPLED}
    with (
        EdgeServer(long_pair.target, threads=1, max_window=3) as narrow,
        opened(long_pair, relay.endpoint, "wait") as device,
    ):
        wanted = device.generate(PROMPT, **wish).tokens
        pieces = device.stream(PROMPT, **wish)
        got = [next(pieces)]
        relay.turn_to(narrow.endpoint)
        relay.cut()
        got += pieces
        assert tokens_of(got) == wanted
        assert device.last.rounds[-5].window <= 3


@pytest.mark.parametrize("protocol", ["dssd", "stream", "ahead"])
def test_redirected_in_the_middle(long_pair: Pair, key_folders, protocol: str) -> None:
    wish = {**SAMPLED, "protocol": protocol}
    edges = [EdgeServer(long_pair.target, keys=key_folders["edge"], threads=1) for _ in range(2)]
    with (
        edges[0],
        edges[1],
        Device(
            long_pair.draft,
            edges[0].endpoint,
            key_folders["alice"],
            threads=1,
            lanes=2,
            on_link_loss="wait",
        ) as device,
        device.beside() as other,
    ):
        wanted = device.generate(PROMPT, **wish).tokens
        pieces = device.stream(PROMPT, **wish)
        got = [next(pieces)]
        device.redirect(edges[1].endpoint)
        edges[0].stop()
        got += pieces
        assert tokens_of(got) == wanted
        assert other.generate(PROMPT, **wish).tokens == wanted


@pytest.mark.parametrize("protocol", ["dssd", "stream"])
def test_reconnected_in_the_middle(
    long_pair: Pair, server: EdgeServer, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    """The answer goes on over another connection, and no loss is logged."""
    wish = {**SAMPLED, "protocol": protocol}
    with Device(long_pair.draft, server.endpoint, threads=1) as device:
        wanted = device.generate(PROMPT, **wish).tokens
        pieces = device.stream(PROMPT, **wish)
        got = [next(pieces)]
        before = device._link.connection
        device.reconnect()
        got += pieces
        assert tokens_of(got) == wanted
        assert device._link.connection != before
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_a_wrong_turn_changes_nothing(long_pair: Pair, server: EdgeServer, tmp_path) -> None:
    with opened(long_pair, server.endpoint, "fail") as device:
        wanted = device.generate(PROMPT, protocol="greedy", max_tokens=10).tokens
        with pytest.raises(UnsupportedError):
            device.redirect("tcp://192.0.2.1:7077")  # beyond loopback, without keys
        with pytest.raises(UnsupportedError):
            device.redirect("127.0.0.1")
        with pytest.raises(KeysError):
            device.redirect(server.endpoint, tmp_path)
        assert device.generate(PROMPT, protocol="greedy", max_tokens=10).tokens == wanted
    with Device(long_pair.draft, threads=1) as device, pytest.raises(UnsupportedError):
        device.redirect(server.endpoint)


def test_a_device_that_was_not_let_in_may_be_later(long_pair: Pair, key_folders) -> None:
    with EdgeServer(long_pair.target, keys=key_folders["edge"], threads=1) as locked:
        with Device(
            long_pair.draft, locked.endpoint, key_folders["eve"], threads=1, on_link_loss="local"
        ) as device:
            alone = device.generate(PROMPT, protocol="dsd", **SAMPLED)
            assert {record.protocol for record in alone.rounds} == {"local"}
            device.redirect(locked.endpoint, key_folders["bob"])
            await_true(lambda: device.link_up)
            assert device.generate(PROMPT, protocol="dsd", **SAMPLED).recoveries == []
        with pytest.raises(AccessDeniedError):
            Device(
                long_pair.draft, locked.endpoint, key_folders["eve"], threads=1, on_link_loss="wait"
            )


HOSTS = """
import os, signal, sys
from pathlib import Path
from pilotfish import Device, EdgeServer

hosts, draft, target, keys = map(Path, sys.argv[1:])
edges = [EdgeServer(target, keys=keys, threads=1).start()]
port = edges[0].endpoint.rsplit(":", 1)[1]
edges.append(EdgeServer(target, f"tcp://127.0.0.2:{port}", keys=keys, threads=1).start())
hosts.write_text("127.0.0.1 moving.example\\n")
wish = dict(protocol="dsd", temperature=1.0, seed=4, max_tokens=120)
with Device(draft, f"tcp://moving.example:{port}", keys, threads=1, on_link_loss="wait") as device:
    wanted = device.generate([1, 3, 2, 7], **wish).tokens
    pieces = device.stream([1, 3, 2, 7], **wish)
    got = [*next(pieces).tokens]
    hosts.write_text("127.0.0.2 moving.example\\n")
    os.kill(edges[0].pid, signal.SIGKILL)
    got += [token for piece in pieces for token in piece.tokens]
    assert got == wanted and len(device.last.recoveries) == 1
for edge in edges:
    edge.stop()
print("moved")
"""


def test_a_name_that_stands_for_another_address_now(
    long_pair: Pair, key_folders, tmp_path: Path
) -> None:
    """Needs an /etc/hosts of its own, and so a mount namespace."""
    unshare = [shutil.which("unshare") or "unshare", "--mount", "--map-root-user"]
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 moving.example\n")
    mounting = ["sh", "-c", 'mount --bind "$1" /etc/hosts && shift && exec "$@"', "sh", str(hosts)]
    try:
        possible = subprocess.run([*unshare, *mounting, "true"], capture_output=True, check=False)
    except OSError as error:
        pytest.skip(f"no mount namespace can be made here: {error}")
    if possible.returncode:
        pytest.skip(f"no mount namespace can be made here: {possible.stderr.decode().strip()}")
    both = tmp_path / "keys"
    shutil.copytree(key_folders["edge"], both)
    for name in ("device.key", "device.pub", "edge.pub"):
        shutil.copy(key_folders["alice"] / name, both / name)
    script = [sys.executable, "-c", HOSTS, str(hosts), *map(str, long_pair), str(both)]
    ran = subprocess.run(
        [*unshare, *mounting, *script], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stdout == "moved\n", ran.stderr
