"""One listed key whose messages cost much to read: others are served as if it were not there."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from pilotfish.base.errors import RateLimitedError
from pilotfish.edge_runtime.admission import Admission
from pilotfish.speculation.truncation import SparseRows
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.sparse import encode_sparse
from pilotfish.wire.keys import DeviceKeys
from tests.conftest import Pair
from tests.support.daemons import Daemon, Systemd, running
from tests.support.hostile import PROMPT, RawClient, RawSession, starved_s
from tests.support.socketless import SocketlessEdge
from tests.support.tiny import tiny_artifact

VOCAB = 4096
LEVELS = 64
CONNECTIONS = 16
WORST_S = 0.3
BEFORE = 512  # messages that lie there when an honest device comes


def tree(candidates: int, tokens: int) -> list[bytes]:
    """Frames of a tree of one node a level, which cost much to read; the last token is not in q."""
    ids = np.zeros(LEVELS * candidates, "<u2")
    ids[-1] = VOCAB - 1
    row = np.arange(tokens, dtype=np.uint32)
    ends = np.arange(1, LEVELS + 1) * tokens
    levels = np.zeros(LEVELS * tokens, np.uint8)
    q = encode_sparse(SparseRows(np.tile(row, LEVELS), levels, ends), VOCAB)
    return [ids.tobytes(), bytes([candidates] * LEVELS), q]


@pytest.fixture(scope="module")
def watched(
    tmp_path_factory: pytest.TempPathFactory, key_folders: dict[str, Path]
) -> Iterator[tuple[Daemon, Systemd]]:
    folder = tmp_path_factory.mktemp("costly")
    tiny_artifact(folder / "target", vocab=VOCAB, padded_vocab=VOCAB, context=1024)
    systemd = Systemd(folder)
    flags = ("--target", folder / "target", "--threads", 1, "--keys", key_folders["edge"])
    with running(*flags, systemd=systemd, watchdog_s=1.0) as daemon:
        yield daemon, systemd


@pytest.mark.timing
@pytest.mark.parametrize(("candidates", "tokens"), [(255, 1), (1, 2040)])
@pytest.mark.parametrize("start", [len(PROMPT), 777], ids=["in place", "out of place"])
def test_another_device_is_served(
    watched: tuple[Daemon, Systemd],
    key_folders: dict[str, Path],
    candidates: int,
    tokens: int,
    start: int,
) -> None:
    daemon, systemd = watched
    alice, bob = (DeviceKeys.load(key_folders[name]) for name in ("alice", "bob"))
    began = time.monotonic()
    with ExitStack() as stack:
        honest = stack.enter_context(RawClient(daemon.endpoint, alice))
        costly = [stack.enter_context(RawClient(daemon.endpoint, bob)) for _ in range(CONNECTIONS)]
        session, theirs = RawSession(), RawSession()
        honest.send(*session.begin(PROMPT))
        session.go_on(honest, 3)
        costly[0].send(*theirs.begin(PROMPT, "tree"))
        for client in costly:
            client.settle()
        window = [theirs._window(start=start), *tree(candidates, tokens)]
        for _ in range(BEFORE // CONNECTIONS):
            for client in costly:
                client.send(*window)
        waits = []
        while len(waits) < 40:
            wanted, starved = time.monotonic(), starved_s(daemon.process.pid)
            session.go_on(honest, 1, [1, 2])
            honest.say(m.Ping(nonce=1))
            assert isinstance(honest.receive(), m.Pong)
            # other programs of a busy machine are no messages of another device
            starved = starved_s(daemon.process.pid) - starved
            waits.append(time.monotonic() - wanted - starved)
            for client in costly:
                client.send(*window)
        assert max(waits) < WORST_S
        counter: Counter[str] = Counter()
        while costly[0].socket.poll(300):
            reply = costly[0].receive()
            assert isinstance(reply, m.Failure)
            counter[reply.code] += 1
        assert counter.keys() <= {"bad-draft", "diverged", "rate-limited"}
        honest.say(m.Close(session=session.id))
        costly[0].say(m.Close(session=theirs.id))
    time.sleep(1.2)
    fed = systemd.fed(began)
    assert max(later - earlier for earlier, later in pairwise(fed)) < 1.0


def best_s(work: Callable[[], object]) -> float:
    """The least time that it took of a few."""
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def test_what_is_refused_unread_costs_nothing(pair: Pair) -> None:
    """A prompt beyond the context, and a window at the wrong place: of whatever length."""
    with SocketlessEdge(pair.target) as edge:
        session = RawSession()
        begin = session.begin(PROMPT, "dsd")
        edge.deliver(begin)
        long = [begin[0], b"\0" * 2**25]
        window = session.window([1] * 4, b"\0" * 2**25, start=99)
        for message, code in ((long, "prompt-too-long"), (window, "diverged")):
            assert best_s(partial(edge.deliver, message)) < 0.002
            edge.fails(code)
            edge.replies.clear()


def refused(admission: Admission, client: bytes, now_s: float) -> bool:
    """Whether a message of the client is."""
    try:
        admission.admit(client, now_s)
    except RateLimitedError:
        return True
    return False


def test_a_client_that_is_alone_has_all_the_time_there_is() -> None:
    """Beside another one it has half, at most."""
    admission = Admission(1e9)
    for number in (False, True):
        served = 0
        for tick in range(1000):  # of 10 ms, and every message takes one
            now_s = 100.0 * number + tick * 0.01
            if number:
                assert not refused(admission, b"another", now_s)
            if not refused(admission, b"busy", now_s):
                served += 1
                admission.charge(b"busy", 0.01)
        assert served == pytest.approx(500 if number else 1000, rel=0.05)


@pytest.mark.parametrize("cost_s", [0.01, 0.05, 0.1, 0.2, 0.8, 5.0])
@pytest.mark.parametrize("keys", [1, 2, 3])
def test_costly_keys_together_have_half_of_the_time(cost_s: float, keys: int) -> None:
    """However much one message costs, and however many keys send them; nobody waits for two."""
    admission, now_s, used_s, worst_s = Admission(2000.0), 0.0, 0.0, 0.0
    hostile = [b"hostile %d" % key for key in range(keys)]
    until_s = 30.0 * max(1.0, cost_s)
    while now_s < until_s:
        assert not refused(admission, b"honest", now_s)
        now_s += 0.002
        turn_s = now_s
        for key in hostile:
            if not refused(admission, key, now_s):
                now_s += cost_s
                used_s += cost_s
                admission.charge(key, cost_s)
        worst_s = max(worst_s, now_s - turn_s)
    assert worst_s <= keys * cost_s + 1e-9
    assert used_s / now_s <= 0.5 + 0.2 * keys / until_s + 2 * keys * cost_s / until_s


def test_a_debt_is_kept_while_it_lasts() -> None:
    """By key, through silence, beside a crowd of others; and a client that is alone makes none."""
    admission = Admission(1e9)
    assert not refused(admission, b"honest", 0.0)
    assert not refused(admission, b"costly", 0.0)
    admission.charge(b"costly", 1000.0)
    for number in range(3000):
        assert not refused(admission, b"%d" % number, 1001.0)
    assert not refused(admission, b"honest", 1500.0)
    assert refused(admission, b"costly", 1500.0)
    for tick in range(100):  # alone it is served, and pays no more than before
        now_s = 1600.0 + tick
        assert not refused(admission, b"costly", now_s)
        admission.charge(b"costly", 0.5)
    assert not refused(admission, b"honest", 1700.0)
    assert refused(admission, b"costly", 1700.0)
    assert not refused(admission, b"honest", 4000.0)
    assert not refused(admission, b"costly", 4000.0)


def test_a_client_alone_owes_for_one_message_at_most() -> None:
    admission = Admission(1e9)
    for tick in range(1000):
        assert not refused(admission, b"busy", tick * 0.1)
        admission.charge(b"busy", 0.1)
    for now_s in (100.0, 100.3):
        assert not refused(admission, b"another", now_s)
    assert not refused(admission, b"busy", 100.31)
