"""What a key is sent again and again, for a few bytes each time, is bounded by key."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pilotfish.base.errors import TargetLostError
from pilotfish.edge_runtime import admission
from pilotfish.edge_runtime.targets.target import Scores
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.logprobs import entry_type
from pilotfish.wire.keys import DeviceKeys
from tests.conftest import Pair
from tests.support.daemons import running
from tests.support.hostile import RawClient, RawSession, drafted
from tests.support.socketless import SocketlessEdge
from tests.support.tiny import tiny_artifact

PROMPT = [7, 3, 9, 4] * 20
AT_ONCE = 100_000


@pytest.fixture
def edge(long_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[SocketlessEdge]:
    """With a small budget, which does not grow while a test runs."""
    monkeypatch.setattr(admission, "_REPLY_BURST", AT_ONCE)
    monkeypatch.setattr(admission, "_REPLY_BYTES_PER_S", 0.0)
    with SocketlessEdge(long_pair.target) as opened:
        opened.start()
        yield opened


def sent_back(edge: SocketlessEdge, client: bytes = b"me") -> int:
    """Bytes of the replies until now, without headers."""
    while edge.scheduler.wait_s() is not None:
        edge.turn()
    size = sum(sum(map(len, frames)) for to, _, frames in edge.replies if to == client)
    edge.replies.clear()
    return size


def again(kind: str, edge: SocketlessEdge) -> Callable[[], list[bytes]]:
    """Begin a generation, and return what asks for its last reply again."""
    session = RawSession()
    match kind:
        case "pull":
            edge.deliver(session.begin(PROMPT, "stream", logprobs=20))
            edge.deliver(session.pull(40))
            return lambda: session.pull(40)
        case "prompt":
            edge.deliver(session.begin(PROMPT, "stream", prompt_logprobs=20))
            edge.deliver(session.pull(1))
            return lambda: session.pull(1)
        case "window":
            edge.deliver(session.begin(PROMPT, "dssd", logprobs=20))
            frames = session.propose("dssd", drafted("dssd", (1, 1, 1)))
            edge.deliver(frames)
            return lambda: frames
        case "fetch":
            vocabulary = edge.service._vocabulary_server.digest
            return lambda: [m.encode(m.Fetch(vocabulary=vocabulary, part=0))]
        case _:
            artifact = edge.service._handshake.manifest
            hello = m.Hello(
                version=m.VERSION, tokenizer=artifact.tokenizer_fingerprint,
                vocab_size=artifact.vocab_size, padded_vocab_size=artifact.padded_vocab_size,
                hidden_size=64,
            )  # fmt: skip
            return lambda: [m.encode(hello)]


@pytest.mark.parametrize("kind", ["pull", "prompt", "window", "fetch", "hello"])
def test_repeats_are_bounded(edge: SocketlessEdge, kind: str) -> None:
    ask = again(kind, edge)
    sent_back(edge)
    largest = total = 0
    for _ in range(3000):
        edge.deliver(ask())
        size = sent_back(edge)
        largest, total = max(largest, size), total + size
    assert total <= AT_ONCE + largest
    assert edge.metrics.refusals["rate-limited"] > 500
    other = RawSession()  # of another client, who is served as ever
    edge.deliver(other.begin(PROMPT, "stream"), client=b"other")
    edge.deliver(other.pull(3), client=b"other")
    assert isinstance(edge.reply(b"other"), m.Tokens)


def test_refusals_of_what_was_not_read_are_bounded(edge: SocketlessEdge) -> None:
    """Beyond the rate of messages; each other request is told why it is refused."""
    for _ in range(1000):
        edge.deliver([b"\0"])
    assert len(edge.replies) == 1000
    edge.service._admission.rate = 1e-9
    for _ in range(3000):
        edge.deliver([b"\0"])
    assert 1000 <= len(edge.replies) < 1000 + AT_ONCE / 200
    assert edge.metrics.dropped_replies > 2000


def test_a_pass_is_paid_by_itself(edge: SocketlessEdge) -> None:
    """A key without any budget left goes on with its rounds; it cannot have them twice."""
    ask = again("pull", edge)
    sent_back(edge)
    for _ in range(500):
        edge.deliver(ask())
    assert edge.metrics.refusals["rate-limited"] > 0
    sent_back(edge)
    session = RawSession()
    edge.deliver(session.begin(PROMPT, "stream", logprobs=20, prompt_logprobs=20))
    edge.deliver(session.pull(5))
    assert sent_back(edge) > 5 * 20 * 8 + len(PROMPT) * 20 * 8


def test_the_prompts_are_told_once_over_a_connection(long_pair: Pair) -> None:
    """And once more over another one: there the first reply may have been lost."""
    with SocketlessEdge(long_pair.target) as edge:
        edge.start()
        session = RawSession()
        edge.deliver(session.begin(PROMPT, "stream", prompt_logprobs=20))
        for client, frames in ((b"me", 2), (b"me", 1), (b"me", 1), (b"back", 2), (b"back", 1)):
            owner_of(edge, session, client)
            edge.deliver(session.pull(1), client=client)
            assert len(edge.reply_all(client)[1]) == frames


def owner_of(edge: SocketlessEdge, session: RawSession, client: bytes) -> None:
    """Let a session belong to this connection, as to every one of its key."""
    value = edge.service.sessions.get(session.id)
    assert value is not None
    value.owner = client


def test_what_was_not_taken_is_told_again(long_pair: Pair) -> None:
    with SocketlessEdge(long_pair.target) as edge:
        edge.start()
        session, keep, full = RawSession(), edge._keep, [True]
        edge.service._replies.send = lambda *reply: False if full[0] else keep(*reply)
        edge.deliver(session.begin(PROMPT, "dssd", prompt_logprobs=20))
        frames = session.propose("dssd", drafted("dssd", (1,)))
        edge.deliver(frames)
        sent_back(edge)
        full[0] = False
        edge.deliver(frames)
        first = edge.reply_all()[1]
        edge.deliver(frames)
        assert len(first) == len(edge.reply_all()[1]) + 1


def test_the_prompts_outlive_a_failed_pass(long_pair: Pair) -> None:
    """The same round comes again, and what of the prompt was not told is computed anew."""
    with SocketlessEdge(long_pair.target) as edge:
        edge.start()
        session, prompt = RawSession(), PROMPT * 2
        edge.deliver(session.begin(prompt, "stream", prompt_logprobs=2))
        edge.deliver(session.pull(1))
        edge.turn()  # tells of some
        batch = edge.scheduler.next_batch()
        assert batch is not None
        for job in edge.scheduler.finish_pass(Scores(batch[0], error=TargetLostError("gone"))):
            edge.service.finish_job(job)
        edge.fails("target-lost")
        edge.deliver(session.pull(1))
        info = np.frombuffer(edge.reply_all()[1][-1], entry_type(2))
        assert len(info) == len(prompt) - 1
        assert not np.isnan(info["own"]).any()


def test_a_listed_key_pulls_the_same_again_and_again(tmp_path, key_folders) -> None:
    """Half a megabyte each time, for 39 bytes."""
    target = tiny_artifact(tmp_path / "target", context=8192).path
    flags = ("--target", target, "--threads", 1, "--keys", key_folders["edge"])
    bob = DeviceKeys.load(key_folders["bob"])
    with running(*flags, "--context", 8192) as daemon, RawClient(daemon.endpoint, bob) as client:
        session = RawSession()
        client.send(*session.begin([7, 3] * 1500, "stream", prompt_logprobs=20))
        client.send(*session.pull(1))
        reply, frames = client.receive_all(60.0)
        assert isinstance(reply, m.Tokens)
        assert sum(map(len, frames)) > 4 * 10**5
        messages: list[tuple[m.Reply, list[bytes]]] = []
        for _ in range(5):
            for _ in range(40):  # an edge has room for 64 replies at least
                client.send(*session.pull(1))
            messages += client.settle_all()
        assert sum(sum(map(len, frames)) for _, frames in messages) < 10**5
        assert len(messages) == 200
