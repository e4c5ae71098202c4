"""A connection that breaks, an edge that dies or freezes in the middle: the text stays the same."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.wire import keys
from tests.conftest import Pair
from tests.support.registered import ALL_LOSSLESS, sampling_only
from tests.support.relay import Relay
from tests.support.tiny import tiny_artifact

PROMPT = [1, 3, 2, 7]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recovery")
    tiny_artifact(folder / "target", seed=1)
    tiny_artifact(folder / "draft", seed=2)
    keys.create(folder / "keys", keys.EDGE)
    keys.allow(folder / "keys", keys.create(folder / "keys", keys.DEVICE))
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["keys", "no-keys"])
def cuttable(request, artifacts):
    """An edge, and the keys that it wants."""
    folder = artifacts / "keys" if request.param else None
    # without keys each cut leaves a session behind
    with EdgeServer(artifacts / "target", keys=folder, threads=1, sessions=100) as edge:
        yield edge, folder


@pytest.mark.parametrize(
    "options",
    [
        {"protocol": "greedy"},
        *(
            {"protocol": name, "temperature": 1.0, "seed": 5}
            for name in (*sampling_only(ALL_LOSSLESS), "stream")
        ),
        {"protocol": "dssd", "temperature": 1.0, "seed": 6, "window": "auto"},
    ],
    ids=lambda options: "-".join(str(options[k]) for k in ("protocol", "window") if k in options),
)
def test_cut_connections_change_nothing(artifacts, cuttable, options):
    edge, folder = cuttable
    relay = Relay(edge.endpoint)
    with Device(artifacts / "draft", relay.endpoint, folder, threads=1) as device:
        wanted = device.generate(PROMPT, max_tokens=400, **options)
        # or a fast edge's whole answer would have arrived before the first cut
        relay.pause_s = 0.01
        pieces = device.stream(PROMPT, max_tokens=400, **options)
        for _ in range(3):
            next(pieces, None)  # after a cut, a stream brings all that was missed at once
            relay.cut()
        for _ in pieces:
            pass
        assert device.last.tokens == wanted.tokens
        assert relay.connections >= 2
    relay.close()


@pytest.mark.parametrize(
    ("protocol", "temperature", "locked"),
    [
        pytest.param("greedy", 0.0, True, marks=pytest.mark.slow),
        pytest.param("dsd", 1.0, False, marks=pytest.mark.slow),
        pytest.param("tslt", 1.0, True, marks=pytest.mark.slow),
        ("tree", 1.0, False),
        pytest.param("dssd", 1.0, True, marks=pytest.mark.slow),
        pytest.param("coupled", 1.0, False, marks=pytest.mark.slow),
        ("stream", 1.0, True),
        ("ahead", 1.0, False),
        pytest.param("ahead", 0.0, True, marks=pytest.mark.slow),
    ],
)
def test_a_restarted_edge_goes_on_with_the_same_text(
    pair: Pair, key_folders, protocol: str, temperature: float, locked: bool
) -> None:
    options = {
        "protocol": protocol, "temperature": temperature, "seed": 0, "window": 3, "max_tokens": 40,
    }  # fmt: skip
    edge_keys = key_folders["edge"] if locked else None
    device_keys = key_folders["alice"] if locked else None
    first = EdgeServer(pair.target, keys=edge_keys, threads=1).start()
    try:
        with Device(pair.draft, first.endpoint, device_keys, threads=1) as device:
            wanted = device.generate(PROMPT, **options).tokens
            pieces = device.stream(PROMPT, **options)
            got = [*next(pieces).tokens, *next(pieces).tokens]
            os.kill(first.pid, signal.SIGKILL)
            first.stop()
            with EdgeServer(pair.target, first.endpoint, keys=edge_keys, threads=1):
                got += [token for piece in pieces for token in piece.tokens]
                assert got == wanted
                assert device.generate(PROMPT, **options).tokens == wanted
    finally:
        first.stop()


@pytest.mark.parametrize(
    ("protocol", "temperature"),
    [
        ("dssd", 1.0),
        ("ahead", 1.0),
        *(
            pytest.param(name, 1.0, marks=pytest.mark.slow)
            for name in ("tree", "dsd", "coupled", "stream")
        ),
    ],
)
def test_an_edge_killed_under_way_and_replaced(
    long_pair: Pair, key_folders, protocol: str, temperature: float
) -> None:
    """The device is waiting for the answer of an edge that dies; another stands in its place."""
    options = {"protocol": protocol, "temperature": temperature, "seed": 3, "max_tokens": 300}
    edges = [
        EdgeServer(long_pair.target, keys=key_folders["edge"], threads=1).start() for _ in range(2)
    ]
    relay = Relay(edges[0].endpoint)
    try:
        with Device(long_pair.draft, relay.endpoint, key_folders["alice"], threads=1) as device:
            wanted = device.generate(PROMPT, **options).tokens
            if protocol in ("coupled", "ahead"):
                assert wanted == device.generate(PROMPT, **options | {"protocol": "stream"}).tokens

            def replace() -> None:
                relay.turn_to(edges[1].endpoint)
                os.kill(edges[0].pid, signal.SIGKILL)

            killer = threading.Timer(0.001, replace)  # by then the device waits for a verdict
            got: list[int] = []
            for piece in device.stream(PROMPT, **options):
                got += piece.tokens
                if len(got) > len(wanted) // 3 and killer.ident is None:
                    killer.start()
            killer.join()
            assert got == wanted
            assert relay.connections == 2
    finally:
        relay.close()
        for server in edges:
            server.stop()


@pytest.mark.parametrize("locked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_edge_that_was_frozen_for_a_while(pair: Pair, key_folders, locked: bool) -> None:
    """The connection breaks, and without keys the edge does not know the new one's owner."""
    options = {"protocol": "dsd", "temperature": 1.0, "seed": 0, "window": 3, "max_tokens": 40}
    edge_keys = key_folders["edge"] if locked else None
    device_keys = key_folders["alice"] if locked else None
    with (
        EdgeServer(pair.target, keys=edge_keys, threads=1) as server,
        Device(pair.draft, server.endpoint, device_keys, threads=1) as device,
    ):
        wanted = device.generate(PROMPT, **options).tokens
        pieces = device.stream(PROMPT, **options)
        got = next(pieces).tokens
        os.kill(server.pid, signal.SIGSTOP)
        waker = threading.Timer(1.6, os.kill, (server.pid, signal.SIGCONT))
        waker.start()
        got = [*got, *(token for piece in pieces for token in piece.tokens)]
        waker.join()
        assert got == wanted


def test_a_reply_may_come_before_the_news_that_the_edge_is_back(artifacts, monkeypatch):
    """The link broke and healed unnoticed, and its events are read one by one."""
    with EdgeServer(artifacts / "target") as edge:
        relay = Relay(edge.endpoint)
        with Device(artifacts / "draft", relay.endpoint) as device:
            wanted = device.generate(PROMPT, protocol="greedy", max_tokens=12)
            channel = device._link.channel
            note = channel._note

            def slowly(event, value):
                note(event, value)
                time.sleep(0.1)

            pieces = device.stream(PROMPT, protocol="greedy", max_tokens=12)
            next(pieces)
            relay.cut()
            time.sleep(1.0)
            monkeypatch.setattr(channel, "_note", slowly)
            for _ in pieces:
                pass
            assert device.last.tokens == wanted.tokens
        relay.close()


@pytest.mark.slow
def test_many_kills_and_cuts(long_pair: Pair, tmp_path) -> None:
    """The benchmark's own run, but smaller: SIGKILLs, broken links and stalls, at any moment."""
    out = tmp_path / "recovery.json"
    command = [sys.executable, "benchmarks/recovery.py", "--kills", "7", "--cuts", "6"]
    command += ["--draft", str(long_pair.draft), "--target", str(long_pair.target)]
    ran = subprocess.run(
        [*command, "--tokens", "200", "--json", str(out)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    rows = [row for row in json.loads(out.read_text())["rows"] if row["protocol"] == "all"]
    assert sum(row["answers"] for row in rows) == 13
    for row in rows:
        assert row["identical"] == row["whole"] == row["answers"], row
        assert 0.0 < row["noticed p95"] < 60.0
