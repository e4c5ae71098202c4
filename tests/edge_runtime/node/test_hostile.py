"""What others can do to a worker: nothing to the edge that it works for, whatever they say."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

from pilotfish import EdgeServer
from pilotfish.engines.engine import Work
from pilotfish.wire import keys
from pilotfish.wire.messages import encode
from pilotfish.wire.nodes import Attach, Greet, Item, Ready, Refused, Step
from tests.conftest import VOCAB
from tests.support.averaging import tokens_of
from tests.support.federating import (
    SESSIONS,
    Cast,
    Opened,
    WorkerThread,
    await_,
    kill,
    opened,
    worker,
    write_list,
)
from tests.support.hostile import await_idle, packed, resident_mib
from tests.support.lying import same_logits
from tests.support.pipelines import cut, made_pair
from tests.support.raw_edge import CODES, KEPT, RawEdge, Tenant, expected_of, ids, item, parents
from tests.support.spoiling import ODD_VALUES, Frames, spoil

GROWTH_MIB = 48
MESSAGES = 20_000
BY_SOCKET = 3_000
WORK = Work(1, tokens_of(4, 20), 5)


@dataclass
class Fort:
    """A worker that lets in an honest edge and a rival; both keys' folders, and the node's key."""

    worker: EdgeServer
    folder: Path
    node: bytes
    honest: Opened
    wanted: NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        self.wanted = self.run()

    def run(self) -> NDArray[np.float32]:
        """What the honest edge gets."""
        return self.honest.target.run(secrets.randbits(40), [WORK])[0].logits

    def rival(self) -> RawEdge:
        return RawEdge(self.worker.endpoint, self.folder / "rival", self.node)

    def stranger(self) -> RawEdge:
        return RawEdge(self.worker.endpoint, self.folder / "stranger", self.node)


@pytest.fixture(scope="module")
def fort(cast: Cast, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fort]:
    folder = tmp_path_factory.mktemp("fort")
    node = keys.create(folder / "node", keys.EDGE)
    for name in ("honest", "rival", "stranger"):
        public = keys.create(folder / name, keys.EDGE)
        if name != "stranger":
            keys.allow(folder / "node", public, name)
    with worker(cast.a, keys=folder / "node", message_mib=1) as held:
        path = write_list(folder / "w.toml", [("a", held.endpoint)], kept=KEPT, values="fp32")
        path.write_text(path.read_text() + f'key = "{node}"\n')
        with opened(path, cast.a, folder / "honest") as honest:
            yield Fort(held, folder, keys.read_public(node), honest)


@pytest.fixture(autouse=True)
def neighbour(request: pytest.FixtureRequest) -> Iterator[None]:
    """Beside the fort's tests an honest edge goes on unharmed, and the worker does not grow."""
    if "fort" not in request.fixturenames:
        yield
        return
    fort: Fort = request.getfixturevalue("fort")
    before = resident_mib(fort.worker.pid)
    yield
    same_logits(fort.run(), fort.wanted)
    assert fort.honest.metrics.node_events.total() == 0
    assert resident_mib(fort.worker.pid) - before < GROWTH_MIB


# Others beside an honest edge


def test_a_rival_is_told_that_the_node_is_taken(fort: Fort) -> None:
    with fort.rival() as rival:
        ready, _ = rival.order(Greet(version=1))
        assert isinstance(ready, Ready)
        assert (ready.vocab_size, ready.slots, ready.stages) == (VOCAB, SESSIONS, 0)
        for _ in range(20):
            attach = Attach(incarnation=secrets.token_bytes(16), top_k=1, values="fp16")
            reply, _ = rival.order(attach)
            assert isinstance(reply, Refused)
            assert (reply.code, reply.incarnation) == ("conflict", None)
            step = Step(
                incarnation=attach.incarnation,
                number=0,
                items=[Item(slot=1, start=0, size=1, rows=1)],
            )
            reply, _ = rival.order(step, ids(1), b"")
            assert isinstance(reply, Refused)
            assert (reply.code, reply.incarnation) == ("conflict", attach.incarnation)


def test_peers_without_a_listed_key_are_ignored(fort: Fort) -> None:
    strangers = [fort.stranger(), RawEdge(fort.worker.endpoint)]
    for stranger in strangers:
        with suppress(zmq.Again):  # it may have been shown out already
            stranger.socket.send(encode(Greet(version=1)), zmq.NOBLOCK)
        assert not stranger.socket.poll(500)
        stranger.close()


def test_a_message_that_is_too_long_costs_only_its_sender(fort: Fort) -> None:
    with fort.rival() as rival:
        rival.order(Greet(version=1))
        rival.send(encode(Greet(version=1)), bytes(2**21))
        assert not rival.socket.poll(500)
    with fort.rival() as rival:
        rival.send(encode(Greet(version=1)), *[bytes(2**19)] * 4)
        rival.refused("too-large")
        rival.send(encode(Greet(version=1)), *[b""] * 12)
        rival.refused("malformed")


def test_noise_from_a_rival(fort: Fort) -> None:
    """Spoilt messages of every kind; the honest edge's passes go between them."""
    rng = random.Random(7)
    with fort.rival() as rival:
        for _ in range(BY_SOCKET // 100):
            for _ in range(100):
                rival.send(*noise(rng, rng.randbytes(16)))
            same_logits(fort.run(), fort.wanted)
            while rival.socket.poll(0):
                reply, _ = rival.report()
                assert isinstance(reply, Ready | Refused), reply
                assert isinstance(reply, Ready) or reply.code in CODES
    await_idle(fort.worker.pid)


def test_an_edge_takes_over_what_another_one_has_left(cast: Cast, tmp_path: Path) -> None:
    """While the first is there it is refused; after that it is let in."""
    with WorkerThread(cast.a) as held:
        path = write_list(tmp_path / "w.toml", [("a", held.endpoint)], kept=KEPT)
        with opened(path, cast.a) as first, RawEdge(held.endpoint) as second:
            wanted = first.target.run(1, [WORK])[0].logits
            attach = Attach(incarnation=secrets.token_bytes(16), top_k=KEPT, values="fp16")
            reply, _ = second.order(attach)
            assert isinstance(reply, Refused)
            assert "each edge needs its own nodes" in reply.message
            same_logits(first.target.run(2, [WORK])[0].logits, wanted)
        with opened(path, cast.a) as second:
            same_logits(second.target.run(1, [WORK])[0].logits, wanted)


def test_two_edges_with_one_key_are_told_of_each_other(cast: Cast, tmp_path: Path) -> None:
    """The node is of the one that came last; the other one says so, and asks again."""
    node = keys.create(tmp_path / "node", keys.EDGE)
    keys.allow(tmp_path / "node", keys.create(tmp_path / "edge", keys.EDGE))
    held = keys.EdgeKeys.load(tmp_path / "node")
    with WorkerThread(cast.a, keys=held) as taken:
        path = write_list(tmp_path / "w.toml", [("a", taken.endpoint)], kept=KEPT)
        path.write_text(path.read_text() + f'key = "{node}"\n')
        with (
            opened(path, cast.a, tmp_path / "edge") as first,
            opened(path, cast.a, tmp_path / "edge") as second,
        ):
            wanted = second.target.run(1, [WORK])[0].logits
            first.target.start(1, [WORK])
            await_(lambda: "another edge" in first.target.problem, turn=first.target.collect_scores)
            assert first.events("a") == {"refused": 1}
            await_(lambda: finished(first, wanted), turn=first.target.pause)


def finished(held: Opened, wanted: NDArray[np.float32]) -> bool:
    for scores in held.target.collect_scores():
        same_logits(scores.outputs[0].logits, wanted)
        return True
    return False


def test_a_node_rests_when_its_attachment_is_over(tmp_path: Path) -> None:
    """A stage does not go on listening to the next one, which has died since."""
    stages = cut(made_pair(tmp_path, 256).target, tmp_path / "stages", 3)
    with (
        worker(stages / "stage-2") as second,
        worker(stages / "stage-3") as third,
        RawEdge(third.endpoint) as to_third,
        RawEdge(second.endpoint) as to_second,
    ):
        attach = Attach(incarnation=secrets.token_bytes(16), states="fp32")
        to_third.order(attach)
        to_second.order(msgspec.structs.replace(attach, next=third.endpoint))
        step = Step(incarnation=attach.incarnation, number=1, items=[item()])
        reply, _ = to_second.order(step, ids(1), b"", b"no states")
        assert isinstance(reply, Refused)
        kill(third)
        await_idle(second.pid, limit_s=10.0)


# Noise


def noise(rng: random.Random, incarnation: bytes) -> Frames:
    """A message of some kind, mostly spoilt."""
    kind = rng.choice(["greet", "attach", "step", "step", "step"])
    if kind == "greet":
        frames = [encode(Greet(version=rng.choice([1, 2])))]
    elif kind == "attach":
        values = rng.choice(["fp16", "fp32", "levels"])
        frames = [
            encode(Attach(incarnation=incarnation, top_k=rng.choice([1, 8, 64, 99]), values=values))
        ]
    else:
        frames = a_step(rng, incarnation)
    if rng.random() < 0.2:
        return frames
    if kind == "step" and rng.random() < 0.4:
        return [odd_item(frames[0], rng), *frames[1:]]
    return spoil(frames, rng)


def a_step(rng: random.Random, incarnation: bytes) -> Frames:
    """A step that may fit what the slots hold, as none knows."""
    items, tokens, nodes = [], [], []
    for slot in rng.sample(range(SESSIONS), rng.choice([1, 1, 2, 4])):
        chain = rng.choice([1, 1, 2, 5, 40])
        tree = rng.choice([0, 0, 0, 1, 3])
        path = 1 if rng.random() < 0.2 else 0
        start = rng.choice([0, 0, 0, 1, 2, 5])
        rows = rng.randrange(min(chain + tree, 8) + 1)
        items.append(
            item(
                slot=slot,
                start=start,
                size=chain + tree,
                rows=rows,
                nodes=tree,
                path=path,
            )
        )
        tokens += [rng.randrange(VOCAB) for _ in range(path + chain + tree)]
        nodes += [rng.randrange(-1, index) for index in range(tree)]
    step = Step(incarnation=incarnation, number=rng.randrange(100), items=items)
    return [encode(step), ids(*tokens), parents(*nodes)]


def odd_item(header: bytes, rng: random.Random) -> bytes:
    """A step with another value somewhere in an item."""
    fields = msgspec.msgpack.decode(header)
    chosen = rng.choice(fields[3])
    at = rng.randrange(len(chosen))
    chosen[at] = rng.choice([*ODD_VALUES, [0], [1, 0], [0] * 200])
    return packed(fields)


def test_noise_from_the_edge_itself(cast: Cast) -> None:
    """Steps that could be right, mostly spoilt: answered, or refused by name; then all is well."""
    rng, received = random.Random(3), Counter[str]()
    with worker(cast.a) as held, RawEdge(held.endpoint) as edge:
        talk = Tenant(edge)
        before = resident_mib(held.pid)
        for _ in range(MESSAGES // 200):
            attach = Attach(incarnation=talk.incarnation, top_k=KEPT, values="fp32")
            for _ in range(20):
                edge.send(encode(attach))
                for _ in range(10):
                    edge.send(*noise(rng, talk.incarnation))
            while edge.socket.poll(300 if received.total() % 3 == 0 else 30):
                reply, _ = edge.report()
                received[type(reply).__name__] += 1
                if isinstance(reply, Refused):
                    received[reply.code] += 1
                    assert reply.code in CODES, reply
        await_idle(held.pid)
        while edge.socket.poll(300):
            edge.report()
        talk.attach()
        talk.proves(expected_of(cast.a))
        assert resident_mib(held.pid) - before < GROWTH_MIB
    for kind in ("Scored", "AttachReply", "Ready", "malformed", "conflict", "token-out-of-range"):
        assert received[kind] > 20, received
