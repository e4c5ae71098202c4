"""A hundred thousand spoilt messages: the edge answers each with a typed error or does its work.

The messages are valid ones of every kind, made for the sessions as they stand at that moment, and
then mostly spoilt: bytes, frames, fields. Most go to the service itself, in this process and at
full speed; a share goes through the socket of a real edge process.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest

from pilotfish import Device, EdgeServer
from tests.conftest import CONTEXT, PADDED_VOCAB, VOCAB, Pair
from tests.hostile import (
    RawClient,
    RawSession,
    SocketlessEdge,
    ids_bytes,
    packed,
    resident_mib,
)
from wire import messages as m

MESSAGES = 100_000
BY_SOCKET = 5_000
CLIENTS = 3
PROMPT = [3, 1, 4, 1, 5]
Frames = list[bytes]

# What a mutated field may become: limits, their neighbours, and other types.
ODD_VALUES = (
    0, 1, -1, 2, 63, 64, 65, 127, 128, 255, 256, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63,
    2**64 - 1, 0.0, -0.0, 0.5, 1e-46, 1e300, float("nan"), float("inf"), True, None, "", "stream",
    "x" * 5000, b"", b"x" * 16, b"\x00" * 8, [], [[]], {}, {"type": "ping"},
)  # fmt: skip


# [n, V]: any rows of it may be a window's q
DISTRIBUTIONS = np.random.default_rng(1).random((64, VOCAB)).astype("<f4")
DISTRIBUTIONS /= DISTRIBUTIONS.sum(axis=1, keepdims=True)


class Talk:
    """One client's session and the valid messages that could come next in it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.session = RawSession()
        self.protocol = ""
        self.sent: dict[int, list[int]] = {}  # ids of the windows sent, by start
        self.lost = True  # begin again

    def next(self) -> Frames:
        """A valid message; what it changes is learnt from the replies."""
        rng = self.rng
        if self.lost or len(self.session.committed) > CONTEXT - 70 or rng.random() < 0.02:
            return self._begin()
        if rng.random() < 0.07:
            return [m.encode(self._aside())]
        if self.protocol == "stream":
            return self.session.pull(rng.choice([0, 1, 2, 5]))
        return self._window()

    def _aside(self) -> m.Request:
        session, rng = self.session, self.rng
        kind = rng.choice(["ping", "ping", "hello", "hello", "cancel", "close"])
        if kind == "hello":
            return m.Hello(
                version=rng.choice([m.VERSION, m.VERSION + 1]), tokenizer="ab" * 32,
                vocab_size=VOCAB, padded_vocab_size=PADDED_VOCAB, hidden_size=64,
            )  # fmt: skip
        if kind == "cancel":
            return m.Cancel(session=session.id, generation=session.generation)
        if kind == "close":
            self.lost = True
            return m.Close(session=session.id)
        return m.Ping(nonce=rng.getrandbits(60))

    def _begin(self) -> Frames:
        rng = self.rng
        if rng.random() < 0.2:
            self.session = RawSession(rng.randbytes(16))
        self.lost, self.sent = False, {}
        self.protocol = rng.choice(["greedy", "dsd", "dsd", "stream"])
        length = rng.choice([1, 2, 5, 30, 150, CONTEXT - 2, CONTEXT])
        prompt = rng.choices(range(VOCAB), k=length)
        return self.session.begin(
            prompt, self.protocol, seed=rng.getrandbits(60), top_k=rng.choice([0, 1, 5])
        )

    def _window(self) -> Frames:
        rng = self.rng
        gamma = rng.choice([0, 1, 2, 4, 8])
        ids = rng.choices(range(VOCAB), k=gamma)
        self.sent[len(self.session.committed)] = ids
        if self.protocol == "greedy":
            return self.session.window(ids)
        at = rng.randrange(len(DISTRIBUTIONS) - gamma)
        return self.session.window(ids, DISTRIBUTIONS[at : at + gamma].tobytes())

    def hear(self, reply: m.Reply, frames: Frames) -> None:
        """Follow what the edge did; lose the thread where it followed a spoilt message."""
        committed = self.session.committed
        match reply:
            case m.Verdict(start=start) if start == len(committed) and start in self.sent:
                committed.extend([*self.sent[start][: reply.accepted], reply.token])
            case m.Tokens(start=start) if start == len(committed):
                committed.extend(m.read_ids(frames[0], VOCAB))
            case m.Failure(code=("diverged" | "unknown-session" | "conflict")):
                self.lost = self.lost or self.rng.random() < 0.3


def spoil(frames: Frames, rng: random.Random) -> Frames:
    """One to three mutations of a message's bytes, frames or fields."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        frames = rng.choice(MUTATIONS)(list(frames), rng)
    return frames


def _flip(frames: Frames, rng: random.Random) -> Frames:
    at = rng.randrange(len(frames))
    if frames[at]:
        changed = bytearray(frames[at])
        for _ in range(rng.choice([1, 1, 4])):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        frames[at] = bytes(changed)
    return frames


def _cut(frames: Frames, rng: random.Random) -> Frames:
    at = rng.randrange(len(frames))
    frames[at] = frames[at][: rng.randrange(len(frames[at]) + 1)]
    return frames


def _grow(frames: Frames, rng: random.Random) -> Frames:
    at = rng.randrange(len(frames))
    frames[at] += rng.randbytes(rng.choice([1, 4, 256, 20_000]))
    return frames


def _drop(frames: Frames, rng: random.Random) -> Frames:
    if len(frames) > 1:
        del frames[rng.randrange(len(frames))]
    return frames


def _repeat(frames: Frames, rng: random.Random) -> Frames:
    return frames + [rng.choice(frames)] * rng.choice([1, 2, 20])


def _shuffle(frames: Frames, rng: random.Random) -> Frames:
    rng.shuffle(frames)
    return frames


def _header(frames: Frames) -> list[object]:
    """The header's fields; none if it is past recognition."""
    try:
        header = msgspec.msgpack.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    return header if isinstance(header, list) else []


def _odd_field(frames: Frames, rng: random.Random) -> Frames:
    header = _header(frames)
    if header:
        header[rng.randrange(len(header))] = rng.choice(ODD_VALUES)
        frames[0] = packed(header)
    return frames


def _other_type(frames: Frames, rng: random.Random) -> Frames:
    header = _header(frames)
    if header:
        header[0] = rng.choice(["hello", "begin", "window", "pull", "close", "verdict", "wind"])
        frames[0] = packed(header)
    return frames


def _odd_ids(frames: Frames, rng: random.Random) -> Frames:
    wild = [VOCAB - 1, VOCAB, PADDED_VOCAB, 2**32 - 1]
    count = rng.choice([0, 3, 65])
    ids = [rng.choice([rng.randrange(VOCAB), rng.choice(wild)]) for _ in range(count)]
    return [frames[0], ids_bytes(ids), *frames[2:]]


def _odd_floats(frames: Frames, rng: random.Random) -> Frames:
    if len(frames) > 2 and len(frames[2]) >= 4:
        values = np.frombuffer(frames[2][: len(frames[2]) // 4 * 4], dtype="<f4").copy()
        odd = [np.nan, np.inf, -np.inf, -1.0, 1e38, 1e-45, 0.0]
        values[rng.randrange(len(values))] = rng.choice(odd)
        frames[2] = values.tobytes()
    return frames


def _garbage(frames: Frames, rng: random.Random) -> Frames:
    return [rng.randbytes(rng.randrange(64)) for _ in range(rng.randrange(1, 5))]


def _near_context(frames: Frames, rng: random.Random) -> Frames:
    return [frames[0], ids_bytes([1] * (CONTEXT + rng.choice([-1, 0, 1, 5000]))), *frames[2:]]


MUTATIONS: list[Callable[[Frames, random.Random], Frames]] = [
    _flip, _flip, _cut, _grow, _drop, _repeat, _shuffle, _odd_field, _odd_field, _other_type,
    _odd_ids, _odd_floats, _garbage, _near_context,
]  # fmt: skip


def text_of(edge: SocketlessEdge) -> list[int]:
    """A generation by an honest client."""
    session = RawSession()
    edge.deliver(session.begin(PROMPT, "dsd"), b"honest")
    for _ in range(8):
        q = np.full((2, VOCAB), 1 / VOCAB, dtype="<f4")
        edge.deliver(session.window([7, 9], q.tobytes()), b"honest")
        session.settle([7, 9], edge.reply(b"honest"))
    edge.deliver([m.encode(m.Close(session=session.id))], b"honest")
    return session.committed.ids.tolist()


@pytest.fixture
def service(pair: Pair) -> Iterator[SocketlessEdge]:
    with SocketlessEdge(pair.target, sessions=6, sessions_per_client=3, idle_s=0.05) as edge:
        edge.start()
        yield edge


def test_a_hundred_thousand_messages(
    service: SocketlessEdge, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(7)
    wanted = text_of(service)
    talks = {f"client {i}".encode(): Talk(rng) for i in range(CLIENTS)}
    seen: Counter[str] = Counter()
    started_mib = 0.0
    for count in range(MESSAGES):
        client = rng.choice(list(talks))
        frames = talks[client].next()
        service.deliver(frames if rng.random() < 0.3 else spoil(frames, rng), client)
        if rng.random() < 0.25:
            service.turn()
        for to, reply, reply_frames in service.replies:
            talks[to].hear(reply, reply_frames)
            seen[reply.code if isinstance(reply, m.Failure) else type(reply).__name__] += 1
        service.replies.clear()
        assert len(service.service.sessions) <= 6
        if count == MESSAGES // 5:
            started_mib = resident_mib()
    assert resident_mib() - started_mib < 32
    assert not caplog.records
    assert "internal" not in seen
    assert seen.keys() >= {
        "Verdict", "Tokens", "Pong", "malformed", "diverged", "conflict", "token-out-of-range",
        "bad-draft", "unknown-session", "unsupported", "too-many-sessions", "pair-mismatch",
        "version-mismatch", "prompt-too-long", "too-large",
    }  # fmt: skip
    assert seen["Verdict"] > MESSAGES / 100, seen
    time.sleep(0.1)  # so that an idle session yields
    assert text_of(service) == wanted


def test_spoilt_messages_through_the_socket(pair: Pair) -> None:
    rng = random.Random(8)
    options = {"protocol": "dsd", "temperature": 1.0, "seed": 0, "window": 3, "max_tokens": 40}
    seen: Counter[str] = Counter()
    with (
        EdgeServer(pair.target, sessions=8, idle=0.05, rate=1e9, threads=1) as edge,
        Device(pair.draft, edge.endpoint, threads=1) as device,
        ExitStack() as opened,
    ):
        wanted = device.generate(PROMPT, **options).tokens
        clients = [
            (opened.enter_context(RawClient(edge.endpoint)), Talk(rng)) for _ in range(CLIENTS)
        ]
        before = resident_mib(edge.pid)
        for count in range(BY_SOCKET):
            client, talk = rng.choice(clients)
            frames = talk.next()
            client.send(*(frames if rng.random() < 0.3 else spoil(frames, rng)))
            if count % 10 == 0:
                for reply in client.settle():
                    talk.hear(reply, [b""])
                    seen[reply.code if isinstance(reply, m.Failure) else type(reply).__name__] += 1
        assert "internal" not in seen
        assert seen["malformed"] > 100
        assert seen["Verdict"] > 20
        assert resident_mib(edge.pid) - before < 32
        assert device.generate(PROMPT, **options).tokens == wanted


def test_the_seeds_of_the_fuzz_are_valid() -> None:
    """Unspoilt, every message is understood: the fuzz starts from inside the protocol."""
    rng = random.Random(9)
    talk = Talk(rng)
    kinds = Counter(type(m.decode_request(talk.next()[0])).__name__ for _ in range(2000))
    assert kinds.keys() == {"Begin", "Window", "Pull", "Ping", "Hello", "Cancel", "Close"}
