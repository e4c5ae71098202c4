"""What an edge's process takes for one device's requests costs no other device its connection."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from pilotfish import EdgeServer
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.ids import encode_ids
from pilotfish.wire.keys import DeviceKeys
from tests.support.daemons import free_port, scrape
from tests.support.hostile import RawClient, RawSession, peak_mib, resident_mib
from tests.support.tiny import tiny_artifact

VOCAB, GAMMA, ROUNDS = 120_000, 5, 6
BPS = 24e6  # a window takes a good half of a second


def packed(ids: list[int]) -> bytes:
    return bytes(encode_ids(np.array(ids), VOCAB))


def read_prompts(client: RawClient, over: threading.Event) -> None:
    """Have long prompts read, and the probabilities of their tokens told, one after the other."""
    random = np.random.default_rng(0)
    while not over.is_set():
        session, ids = RawSession(), random.integers(0, VOCAB, 900).tolist()
        begin, _ = session.begin(ids, "stream", prompt_logprobs=20)
        client.send(begin, packed(ids))
        client.send(*session.pull(1))
        assert isinstance(client.receive(60.0), m.Tokens)
        client.say(m.Close(session=session.id))


@pytest.mark.parametrize("locked", [False, True], ids=["plain", "encrypted"])
def test_a_slow_window_beside_prompts_of_others(
    locked: bool, tmp_path: Path, key_folders: dict[str, Path]
) -> None:
    tiny_artifact(tmp_path / "target", vocab=VOCAB, padded_vocab=VOCAB, context=1024)
    alice, bob = (
        DeviceKeys.load(key_folders[name]) if locked else None for name in ("alice", "bob")
    )
    q, ids = np.full((GAMMA, VOCAB), 1 / VOCAB, "<f4").tobytes(), list(range(GAMMA))
    port, over = free_port(), threading.Event()
    flags = {"threads": 1, "metrics": port, "keys": key_folders["edge"] if locked else None}
    with (
        EdgeServer(tmp_path / "target", **flags) as edge,
        Emulator(edge.endpoint, Conditions(up_bps=BPS)) as link,
        RawClient(link.endpoint, alice) as slow,
        RawClient(edge.endpoint, bob) as busy,
        ExitStack() as stack,
    ):
        peak_mib(edge.pid)
        before = resident_mib(edge.pid)
        session = RawSession()
        begin, _ = session.begin([1, 2, 3], "dsd")
        slow.send(begin, packed([1, 2, 3]))
        other = threading.Thread(target=read_prompts, args=(busy, over))
        other.start()
        stack.callback(other.join)
        stack.callback(over.set)
        for _ in range(ROUNDS):
            window, _ = session.window()
            slow.send(window, packed(ids), q)
            session.settle(ids, slow.receive(30.0))
        assert peak_mib(edge.pid) - before > 24, "the process did not grow: this tells nothing"
        samples = scrape(port)
    assert not [name for name in samples if "connections_cut" in name and samples[name]]
