"""A hundred thousand spoilt messages: the edge answers each with a typed error or does its work.

The messages are valid ones of every kind, made for the sessions as they stand at that moment, and
then mostly spoilt: bytes, frames, fields. Most go to the service itself, in this process and at
full speed; a share goes through the socket of a real edge process.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.ids import decode_ids
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, Draft
from tests.conftest import CONTEXT, HIDDEN, PADDED_VOCAB, VOCAB, Pair
from tests.support.hostile import (
    PROMPT,
    RawClient,
    RawSession,
    drafted,
    resident_mib,
)
from tests.support.judging import conditions_of
from tests.support.socketless import SocketlessEdge
from tests.support.spoiling import Frames, spoil

BY_SOCKET = 5_000
CLIENTS = 3
MESSAGE_S = 0.001  # from one message to the next, by the edge's clock

CHAINS = [(1,) * length for length in (0, 1, 2, 4, 8)]
TREES = [(), (1,), (3,), (1, 1, 1), (2, 2, 1), (2, 2, 2), (5, 2)]
# By protocol: windows that a drafter could have drafted, and that fit wherever a session stands.
DRAFTS = {
    name: [
        drafted(name, shape, seed)
        for shape in (TREES if exchange.allows_trees else CHAINS)
        for seed in range(6)
    ]
    for name, exchange in PROTOCOL_REGISTRY.items()
    if not exchange.streams
}
# A verdict of `wisv-selective` takes two exchanges that are not spoilt.
PROTOCOLS = [*PROTOCOL_REGISTRY, "wisv-selective", "stream"]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "adaptive": [{}, {"tau": 1.0, "lambdas": (1e6, 1.0, 0.0)}, {"tau": 0.0}, {"tau": None}],
    "wisv-full": [{}, {"threshold": 0.5}, {"hidden": "fp16"}],
}


class Talk:
    """One client's session and the valid messages that could come next in it."""

    def __init__(
        self, rng: random.Random, conditions: m.DecisionConditions, vocabulary: str = "ab" * 32
    ) -> None:
        self.rng = rng
        self.conditions = conditions
        self.vocabulary = vocabulary  # the digest of the edge's, if it is to give parts of it
        self.session = RawSession(conditions=conditions)
        self.protocol = ""
        self.supply: Frames = []  # the answer to an inquiry that is open
        self.sent: dict[int, Draft] = {}  # the windows sent, by start
        self.decided: Counter[str] = Counter()  # verdicts that were followed, by protocol
        self.lost = True  # begin again

    def next(self) -> Frames:
        """A valid message; what it changes is learnt from the replies."""
        rng = self.rng
        if self.lost or len(self.session.committed) > CONTEXT - 70 or rng.random() < 0.02:
            return self._begin()
        if rng.random() < 0.07:
            return [m.encode(self._aside())]
        # now and then to a protocol that takes no hints, too
        if rng.random() < (0.7 if self.protocol == "ahead" else 0.03):
            return self._hint()
        if self.protocol in ("ahead", "stream"):
            return self.session.pull(rng.choice([0, 1, 2, 5]))
        if self.supply and rng.random() < 0.9:
            return self.supply
        return self._window()

    def _hint(self) -> Frames:
        rng = self.rng
        ids = rng.choices(range(VOCAB), k=rng.choice([1, 3, 15, 64, 128]))
        previous = rng.choices(range(VOCAB), k=rng.choice([0, 0, 0, 1, 9]))
        return self.session.hint(ids, rng.choice([0, 128, 255]), previous)

    def _aside(self) -> m.DeviceMessage:
        session, rng = self.session, self.rng
        kind = rng.choice(["ping", "train", "hello", "hello", "fetch", "cancel", "close"])
        if kind == "hello":
            return m.Hello(
                version=rng.choice([m.VERSION, m.VERSION + 1]), tokenizer="ab" * 32,
                vocab_size=VOCAB, padded_vocab_size=PADDED_VOCAB, hidden_size=HIDDEN,
                bridges=rng.random() < 0.3, drafter=rng.choice(["", self.conditions.drafter]),
            )  # fmt: skip
        if kind == "fetch":
            return m.Fetch(vocabulary=self.vocabulary, part=rng.choice([0, 0, 1, 2**31 - 1]))
        if kind == "train":
            return m.Train(nonce=rng.getrandbits(60), pongs=1, bytes=rng.choice([0, 1, 700]))
        if kind == "cancel":
            return m.Cancel(session=session.id, generation=session.generation)
        if kind == "close":
            self.lost = True
            return m.Close(session=session.id)
        return m.Ping(nonce=rng.getrandbits(60))

    def _begin(self) -> Frames:
        rng = self.rng
        if rng.random() < 0.2:
            self.session = RawSession(rng.randbytes(16), self.conditions)
        self.lost, self.sent, self.supply = False, {}, []
        self.protocol = rng.choice(PROTOCOLS)
        length = rng.choice([1, 2, 5, 30, 150, CONTEXT - 2, CONTEXT])
        prompt = rng.choices(range(VOCAB), k=length)
        return self.session.begin(
            prompt,
            self.protocol,
            seed=rng.getrandbits(60),
            top_k=rng.choice([0, 1, 5]),
            options=rng.choice(OPTIONS.get(self.protocol, [{}])),
        )

    def _window(self) -> Frames:
        draft = self.rng.choice(DRAFTS[self.protocol])
        self.sent[len(self.session.committed)] = draft
        return self.session.propose(self.protocol, draft)

    def receive(self, reply: m.Reply, frames: Frames) -> None:
        """Follow what the edge did; lose the thread where it followed a spoilt message."""
        session, committed = self.session, self.session.committed
        match reply:
            case m.Verdict(session=session.id, generation=session.generation, start=start) if (
                start == len(committed) and start in self.sent
            ):
                self._follow(self.sent[start], reply)
            case m.StatesRequest(
                session=session.id, generation=session.generation, start=start
            ) if start == len(committed) and start in self.sent:
                fits = max(frames[0]) < len(self.sent[start].ids)  # else of a spoilt, longer window
                self.supply, self.lost = [], self.lost or not fits
                if fits:
                    self.supply = session.supply(self.protocol, self.sent[start], frames)
            case m.Tokens(session=session.id, start=start) if start == len(committed):
                committed.extend(decode_ids(frames[0], VOCAB))
            case m.Failure(code=("diverged" | "unknown-session" | "conflict")):
                self.lost = self.lost or self.rng.random() < 0.3

    def _follow(self, draft: Draft, verdict: m.Verdict) -> None:
        if verdict.accepted > len(draft.ids):  # of a spoilt, longer window
            self.lost = True
            return
        self.session.follow(draft, verdict, sampled=self.rng.randrange(VOCAB))
        self.supply = []
        self.decided[self.protocol] += 1
        self.decided["without a token"] += verdict.token is None


def texts_of(edge: SocketlessEdge, conditions: m.DecisionConditions) -> list[list[int]]:
    """A generation under each protocol by an honest client."""
    texts = []
    for protocol, drafts in DRAFTS.items():
        session = RawSession(conditions=conditions)
        edge.deliver(session.begin(PROMPT, protocol), b"honest")
        for draft in drafts[:24:3]:
            edge.deliver(session.propose(protocol, draft), b"honest")
            reply, wanted = edge.reply_all(b"honest")
            if isinstance(reply, m.StatesRequest):
                edge.deliver(session.supply(protocol, draft, wanted), b"honest")
                reply = edge.reply(b"honest")
            session.follow(draft, reply, sampled=7)
        edge.deliver([m.encode(m.Close(session=session.id))], b"honest")
        texts.append(session.committed.ids.tolist())
    return [*texts, hinted_text(edge, "stream"), hinted_text(edge, "ahead")]


def hinted_text(edge: SocketlessEdge, protocol: str) -> list[int]:
    """A generation that streams, with hints of any kind."""
    session, rng = RawSession(), random.Random(3)
    edge.deliver(session.begin(PROMPT, protocol), b"honest")
    edge.deliver(session.pull(20), b"honest")
    while len(session.committed) < len(PROMPT) + 20:
        edge.deliver(session.hint(rng.choices(range(VOCAB), k=5)), b"honest")
        reply, frames = edge.reply_all(b"honest")
        assert isinstance(reply, m.Tokens), reply
        session.committed.extend(decode_ids(frames[0], VOCAB))
        if session.committed.ids[-1] == VOCAB - 1:
            break
    edge.deliver([m.encode(m.Close(session=session.id))], b"honest")
    return session.committed.ids.tolist()


class Clock:
    """A clock that only the test advances: what the edge does is the same on a slow machine."""

    def __init__(self) -> None:
        self.now_ns = time.monotonic_ns()

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(pair: Pair, head: str, clock: Clock) -> Iterator[SocketlessEdge]:
    limits = {"sessions": 6, "sessions_per_client": 3, "idle_s": 0.05}
    with SocketlessEdge(pair.target, [head], clock=clock, **limits) as edge:
        edge.start()
        yield edge


@pytest.mark.parametrize("messages", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_thousands_of_messages(
    pair: Pair,
    service: SocketlessEdge,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    messages: int,
) -> None:
    rng = random.Random(7)
    conditions = conditions_of(pair)
    wanted = texts_of(service, conditions)
    digest = Vocabulary.from_artifact(Artifact.open(pair.target)).digest
    talks = {f"client {i}".encode(): Talk(rng, conditions, digest) for i in range(CLIENTS)}
    seen: Counter[str] = Counter()
    started_mib = 0.0
    for count in range(messages):
        clock.advance(MESSAGE_S)
        client = rng.choice(list(talks))
        frames = talks[client].next()
        service.deliver(frames if rng.random() < 0.3 else spoil(frames, rng), client)
        if rng.random() < 0.2:
            service.turn()
        for to, reply, reply_frames in service.replies:
            talks[to].receive(reply, reply_frames)
            seen[reply.code if isinstance(reply, m.Failure) else type(reply).__name__] += 1
        service.replies.clear()
        assert len(service.service.sessions) <= 6
        if count == messages // 5:
            started_mib = resident_mib()
    assert resident_mib() - started_mib < 32
    assert not caplog.records
    assert "internal" not in seen
    assert seen.keys() >= {
        "Verdict", "StatesRequest", "Tokens", "Pong", "Welcome", "Part", "malformed", "diverged",
        "conflict", "token-out-of-range", "bad-draft", "unknown-session", "unsupported",
        "too-many-sessions", "pair-mismatch", "version-mismatch", "prompt-too-long", "too-large",
    }  # fmt: skip
    assert seen["Verdict"] > messages / 100, seen
    decided = sum((talk.decided for talk in talks.values()), Counter())
    assert min(decided[name] for name in (*DRAFTS, "without a token")) > messages / 1000, decided
    assert service.metrics.hints.keys() == {"kept", "stale", "unknown", "malformed", "refused"}
    clock.advance(0.1)  # so that an idle session yields
    assert texts_of(service, conditions) == wanted
    assert wanted[-1] == wanted[-2]


def test_spoilt_messages_through_the_socket(pair: Pair, head: str) -> None:
    rng, conditions = random.Random(8), conditions_of(pair)
    options = {"protocol": "dsd", "temperature": 1.0, "seed": 0, "window": 3, "max_tokens": 40}
    seen: Counter[str] = Counter()
    with (
        EdgeServer(pair.target, head=head, sessions=8, idle=0.05, rate=1e9, threads=1) as edge,
        Device(pair.draft, edge.endpoint, threads=1) as device,
        ExitStack() as opened,
    ):
        wanted = device.generate(PROMPT, **options).tokens
        clients = [
            (opened.enter_context(RawClient(edge.endpoint)), Talk(rng, conditions))
            for _ in range(CLIENTS)
        ]
        before = resident_mib(edge.pid)
        for count in range(BY_SOCKET):
            client, talk = rng.choice(clients)
            frames = talk.next()
            client.send(*(frames if rng.random() < 0.3 else spoil(frames, rng)))
            if count % 10 == 0:
                for reply, reply_frames in client.settle_all():
                    talk.receive(reply, reply_frames)
                    seen[reply.code if isinstance(reply, m.Failure) else type(reply).__name__] += 1
        assert "internal" not in seen
        assert seen["malformed"] > 100
        assert seen["Verdict"] > 20
        assert resident_mib(edge.pid) - before < 32
        time.sleep(0.1)  # so that an idle session yields
        assert device.generate(PROMPT, **options).tokens == wanted


def test_the_seeds_of_the_fuzz_are_valid(pair: Pair) -> None:
    """Unspoilt, every message is understood: the fuzz starts from inside the protocol."""
    rng = random.Random(9)
    talk = Talk(rng, conditions_of(pair))
    kinds = Counter(type(m.decode_device_message(talk.next()[0])).__name__ for _ in range(2000))
    assert kinds.keys() == {
        "Begin",
        "Window",
        "Pull",
        "Hint",
        "Ping",
        "Train",
        "Hello",
        "Fetch",
        "Cancel",
        "Close",
    }
