"""An edge that talks nonsense: the device ends with a typed error, or passes it over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import zmq

from pilotfish import Device, PilotfishError
from pilotfish.base.errors import (
    InternalError,
    MalformedError,
    PairMismatchError,
    PromptTooLongError,
    RateLimitedError,
    TokenOutOfRangeError,
    UnknownSessionError,
    VersionMismatchError,
)
from pilotfish.engines.artifact import Artifact
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.counts import encode_counts
from pilotfish.wire.protocols import PROTOCOL_REGISTRY
from pilotfish.wire.protocols.dssd import P_BITS
from pilotfish.wire.transfer import unpack
from tests.conftest import CONTEXT, VOCAB, Pair
from tests.support.hostile import COLD, PROMPT

TIMES = m.Times(received_ns=1, held_ns=1, queue_ns=0, verify_ns=0)
Answer = list[m.Reply | bytes]


class LyingEdge(threading.Thread):
    """A ROUTER that welcomes devices, answers pings and trains, and the rest by a script.

    The script makes of a request the parts of each message to send. It gets a message that comes in
    chunks as a whole; if ``assembles`` is false, it gets the chunks.
    """

    assembles = True

    def __init__(self, pair: Pair, script: Callable[[m.DeviceMessage], list[Answer]]) -> None:
        super().__init__(daemon=True)
        self._manifest = Artifact.open(pair.target).manifest
        self._script = script
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._over = threading.Event()
        self.requests: list[m.DeviceMessage] = []
        self._bodies: dict[bytes, bytearray] = {}  # transfer → bytes so far

    def welcome(self) -> m.Welcome:
        return m.Welcome(
            version=m.VERSION, software="liar", model="liar", vocab_size=VOCAB,
            padded_vocab_size=VOCAB, hidden_size=64, eos_ids=self._manifest.eos_ids,
            protocols=[*PROTOCOL_REGISTRY], received_ns=1, sent_ns=2,
            limits=m.Limits(context=CONTEXT, window=64, message_bytes=2**20, sessions=1),
            passes=[], digest="", tokenizer=self._manifest.tokenizer_fingerprint,
            vocabulary="", vocabulary_bytes=0, drafts=[], paced=False,
        )  # fmt: skip

    def run(self) -> None:
        try:  # where a script fails, too: a context that is left hangs the garbage collector
            while not self._over.is_set():
                if self._socket.poll(20):
                    self._answer(*self._socket.recv_multipart())
        finally:
            self._context.destroy(linger=0)

    def _answer(self, client: bytes, header: bytes, *frames: bytes) -> None:
        request = m.decode_device_message(header)
        if isinstance(request, m.Chunk) and self.assembles:
            self._take_chunk(client, request, frames[0])
            return
        self.requests.append(request)
        answers = self._script(request)
        if not answers and isinstance(request, m.Hello):
            answers = [[self.welcome()]]
        if not answers and isinstance(request, m.Ping):
            answers = [[m.Pong(nonce=request.nonce, received_ns=1, sent_ns=1), *frames]]
        if not answers and isinstance(request, m.Train):
            pong: Answer = [m.Pong(nonce=request.nonce, received_ns=1, sent_ns=1)]
            pong += [bytes(request.bytes)] if request.bytes else []
            answers = [pong] * request.pongs
        for parts in answers:
            packed = [p if isinstance(p, bytes) else m.encode(p) for p in parts]
            self._socket.send_multipart([client, *packed])

    def _take_chunk(self, client: bytes, chunk: m.Chunk, data: bytes) -> None:
        """Acknowledge a chunk; answer the message once it is complete, or asked for again."""
        body = self._bodies.setdefault(chunk.transfer, bytearray())
        body += data if chunk.offset == len(body) else b""
        ack = m.Ack(transfer=chunk.transfer, offset=len(body))
        self._socket.send_multipart([client, m.encode(ack)])
        if len(body) == chunk.total:
            header, frames = unpack(bytes(body))
            self._answer(client, *map(bytes, (header, *frames)))

    def stop(self) -> None:
        self._over.set()
        self.join()


@pytest.fixture
def liar(pair: Pair) -> Iterator[Callable[..., tuple[LyingEdge, Device]]]:
    opened: list[LyingEdge | Device] = []

    def make(script: Callable[[m.DeviceMessage], list[Answer]]) -> tuple[LyingEdge, Device]:
        edge = LyingEdge(pair, script)
        edge.start()
        opened.append(edge)
        device = Device(pair.draft, edge.endpoint, threads=1)
        opened.append(device)
        return edge, device

    yield make
    for each in reversed(opened):
        each.close() if isinstance(each, Device) else each.stop()


def test_the_text_drafts_for_no_edge_that_keeps_its_vocabulary(pair: Pair) -> None:
    edge = LyingEdge(pair, lambda request: [])
    edge.start()
    try:
        with pytest.raises(PairMismatchError, match="does not offer this vocabulary"):
            Device("text", edge.endpoint)
    finally:
        edge.stop()


def verdict(request: m.Window, **changes: int | None) -> m.Verdict:
    values = {"generation": request.generation, "start": request.start, "accepted": 0, "token": 1}
    return m.Verdict(session=request.session, times=TIMES, **{**values, **changes})


def failure(request: m.Window | m.Pull, code: str) -> m.Failure:
    return m.Failure(
        code=code, message="No.", session=request.session, generation=request.generation
    )


WINDOWS: dict[str, tuple[type[PilotfishError], Callable[[m.Window], Answer]]] = {
    "garbage": (MalformedError, lambda w: [b"\xc1\xc1"]),
    "an empty header": (MalformedError, lambda w: [b""]),
    "a request": (MalformedError, lambda w: [m.encode(m.Ping(nonce=1))]),
    "more accepted than sent": (MalformedError, lambda w: [verdict(w, accepted=9)]),
    "a token that is none": (MalformedError, lambda w: [verdict(w, token=VOCAB)]),
    "a failure of its own": (InternalError, lambda w: [failure(w, "internal")]),
    "a failure of the future": (InternalError, lambda w: [failure(w, "tired")]),
    "a limit": (RateLimitedError, lambda w: [failure(w, "rate-limited")]),
}


@pytest.mark.parametrize(("error", "answer"), WINDOWS.values(), ids=WINDOWS.keys())
def test_bad_answers_to_a_window(
    liar, error: type[PilotfishError], answer: Callable[[m.Window], Answer]
) -> None:
    _, device = liar(lambda request: [answer(request)] if isinstance(request, m.Window) else [])
    with pytest.raises(error):
        device.generate(PROMPT, protocol="greedy", window=4, max_tokens=20)


def counts(vocab: int = VOCAB, bits: int = P_BITS) -> bytes:
    """A rounded distribution over so many tokens."""
    values = np.zeros(vocab, np.int64)
    values[[1, 5, vocab - 2]] = 2 ** (bits - 2)
    values[3] = 2**bits - values.sum()
    return bytes(encode_counts(values, bits))


def text(request: m.Window, *frames: bytes, **changes: int | None) -> Answer:
    return [verdict(request, **changes), *frames]


# What no honest edge answers to a window of two tokens, under any protocol.
VERDICTS: dict[str, Callable[[m.Window], Answer]] = {
    "one more accepted than sent": lambda w: text(w, accepted=5),
    "a tree's worth more accepted": lambda w: text(w, accepted=7),
    "very many accepted": lambda w: text(w, accepted=2**31 - 1),
    "more accepted, and no token": lambda w: text(w, counts(), accepted=3, token=None),
    "a token that only the padding has": lambda w: text(w, token=VOCAB),
    "a token far out of range": lambda w: text(w, token=2**31 - 1),
    "a token and an empty frame": lambda w: text(w, b""),
    "a token and a distribution": lambda w: text(w, counts()),
    "a token and many frames": lambda w: text(w, *[b"x"] * 50),
    "neither token nor frame": lambda w: text(w, token=None),
    "no token after the whole window": lambda w: text(w, counts(), accepted=2, token=None),
    "no token and an empty frame": lambda w: text(w, b"", token=None),
    "no token and garbage": lambda w: text(w, b"\xff" * 300, token=None),
    "no token and a frame too many": lambda w: text(w, counts(), b"", token=None),
    "no token, and two distributions": lambda w: text(w, counts(), counts(), token=None),
    "for a larger vocabulary": lambda w: text(w, counts(VOCAB + 8), token=None),
    "for a much larger vocabulary": lambda w: text(w, counts(50_000), token=None),
    "sums to half": lambda w: text(w, counts(bits=P_BITS - 1), token=None),
    "sums to twice": lambda w: text(w, counts(bits=P_BITS + 1), token=None),
    "a byte too many": lambda w: text(w, counts() + b"\0", token=None),
    "a distribution that never ends": lambda w: text(w, counts() + b"\xff" * 2**23, token=None),
}


@pytest.mark.parametrize("answer", VERDICTS.values(), ids=VERDICTS.keys())
def test_verdicts_that_cannot_be(liar, answer: Callable[[m.Window], Answer]) -> None:
    edge, device = liar(lambda request: [answer(request)] if isinstance(request, m.Window) else [])
    protocols = [name for name, item in PROTOCOL_REGISTRY.items() if not item.streams]
    for count, protocol in enumerate(protocols, start=1):
        shape = {"expansion": (2, 1)} if protocol == "tree" else {"window": 2}  # to four nodes
        temperature = 0.0 if protocol in COLD else 1.0
        began = time.process_time()
        with pytest.raises(MalformedError):
            device.generate(
                PROMPT,
                protocol=protocol,
                **shape,
                temperature=temperature,
                seed=1,
                max_tokens=20,
            )
        assert time.process_time() - began < 1
        # and it is not asked again, at once or after a while
        assert sum(isinstance(request, m.Window) for request in edge.requests) == count


def test_every_truncation_of_a_distribution(liar) -> None:
    size = len(counts())
    cuts = iter(range(size))

    def script(request: m.DeviceMessage) -> list[Answer]:
        if not isinstance(request, m.Window):
            return []
        return [text(request, counts()[: next(cuts)], token=None)]

    _, device = liar(script)
    for _ in range(size):
        with pytest.raises(MalformedError):
            device.generate(PROMPT, protocol="dssd", window=2, temperature=1.0, max_tokens=20)


def test_a_distribution_that_was_never_rounded_is_sampled_all_the_same(liar) -> None:
    """The device cannot know p: what it is sent it samples from, whatever that makes of the law."""

    def script(request: m.DeviceMessage) -> list[Answer]:
        return [text(request, counts(), token=None)] if isinstance(request, m.Window) else []

    edge, device = liar(script)
    pieces = device.stream(PROMPT, protocol="dssd", window=2, temperature=1.0, max_tokens=20)
    tokens = [token for _ in range(6) for token in next(pieces).tokens]
    assert len(tokens) == 6
    assert set(tokens) <= {1, 3, 5, VOCAB - 2}
    starts = [request.start for request in edge.requests if isinstance(request, m.Window)]
    assert starts == list(range(len(PROMPT), len(PROMPT) + 6))


PULLS: dict[str, tuple[type[PilotfishError], list[bytes]]] = {
    "no tokens": (MalformedError, []),
    "an empty frame": (MalformedError, [b""]),
    "two frames": (MalformedError, [b"\x01\x00"] * 2),
    "half a token": (MalformedError, [b"\x01\x00\x02"]),
    "a token that is none": (TokenOutOfRangeError, [b"\xff\xff\xff\xff"]),
}


def streamed(*frames: bytes, **info: float | str) -> Callable[[m.DeviceMessage], list[Answer]]:
    """Answer every pull with this."""

    def script(request: m.DeviceMessage) -> list[Answer]:
        if not isinstance(request, m.Pull):
            return []
        place = {"generation": request.generation, "start": request.start}
        tokens = m.Tokens(session=request.session, times=TIMES, **{**place, **info})
        return [[tokens, *frames]]

    return script


def some_ids(count: int) -> bytes:
    return (np.arange(count) % 5).astype("<u2").tobytes()


@pytest.mark.parametrize("protocol", ["stream", "ahead"])
@pytest.mark.parametrize(("error", "frames"), PULLS.values(), ids=PULLS.keys())
def test_bad_tokens_of_a_stream(
    liar, error: type[PilotfishError], frames: list[bytes], protocol: str
) -> None:
    _, device = liar(streamed(*frames))
    with pytest.raises(error):
        device.generate(PROMPT, protocol=protocol, max_tokens=5)


@pytest.mark.parametrize("protocol", ["stream", "ahead"])
@pytest.mark.parametrize("count", [6, 50, 10_000, 2_000_000])
def test_more_tokens_than_were_asked_for(liar, count: int, protocol: str) -> None:
    _, device = liar(streamed(some_ids(count)))
    with pytest.raises(MalformedError, match="more tokens"):
        device.generate(PROMPT, protocol=protocol, max_tokens=5)
    committed = device._conversation.session.committed
    assert len(committed) == len(PROMPT)
    assert len(committed._ids) < 1000


ACCOUNTS: dict[str, dict[str, float | str]] = {
    "more accepted than drafted": {"source": "device", "drafted": 2, "accepted": 3},
    "more accepted than sent": {"source": "device", "drafted": 9, "accepted": 6},
    "accepted of nothing": {"accepted": 1},
    "drafts without a source": {"drafted": 3, "accepted": 1},
    "an unknown source": {"source": "elsewhere", "drafted": 3, "accepted": 1},
    "more drafts than a pass has": {"source": "edge", "drafted": 16, "accepted": 1},
    "drafts without end": {"source": "device", "drafted": 2**31 - 1, "accepted": 0},
    "more omitted than there is": {"omitted_mass": 1.01},
    "more omitted than of two tokens": {
        "source": "edge",
        "drafted": 3,
        "accepted": 1,
        "omitted_mass": 2.01,
    },
    "endless omitted mass": {"omitted_mass": float("inf")},
}


@pytest.mark.parametrize("protocol", ["stream", "ahead"])
@pytest.mark.parametrize("options", ACCOUNTS.values(), ids=ACCOUNTS.keys())
def test_an_account_of_drafts_that_cannot_be(
    liar, options: dict[str, float | str], protocol: str
) -> None:
    _, device = liar(streamed(some_ids(5), **options))
    with pytest.raises(MalformedError, match="counts of drafts"):
        device.generate(PROMPT, protocol=protocol, max_tokens=5)


def test_a_late_failure_of_another_generation_does_not_end_a_stream(liar) -> None:
    """Nor do tokens of another session, or from another position."""

    def script(request: m.DeviceMessage) -> list[Answer]:
        answers = streamed(some_ids(5))(request)
        if not answers:
            return []
        assert isinstance(request, m.Pull)
        late = m.Failure(
            code="internal", message="Old.", session=request.session,
            generation=request.generation + 1,
        )  # fmt: skip
        others = [
            *streamed(b"\x09\x00" * 5, start=request.start + 1)(request),
            *streamed(b"\x09\x00" * 5, generation=request.generation + 1)(request),
        ]
        return [[late], *others, *answers]

    _, device = liar(script)
    assert device.generate(PROMPT, protocol="ahead", max_tokens=5).tokens == [0, 1, 2, 3, 4]


def test_hints_stay_before_the_answers_end_however_long_the_edge_takes(liar) -> None:
    def script(request: m.DeviceMessage) -> list[Answer]:
        if isinstance(request, m.Pull):
            time.sleep(0.3)  # what the device drafts meanwhile
        return streamed(some_ids(5))(request)

    edge, device = liar(script)
    device.generate(PROMPT, protocol="ahead", max_tokens=5)
    time.sleep(0.2)
    hints = [request for request in edge.requests if isinstance(request, m.Hint)]
    assert hints
    assert all(len(PROMPT) <= hint.start < len(PROMPT) + 5 for hint in hints)


@pytest.mark.parametrize("protocol", ["greedy", "tree", "dssd", "stream", "ahead"])
@pytest.mark.parametrize("code", ["unknown-session", "diverged"])
def test_an_edge_that_never_learns_the_session(liar, protocol: str, code: str) -> None:
    def script(request: m.DeviceMessage) -> list[Answer]:
        return [[failure(request, code)]] if isinstance(request, m.Window | m.Pull) else []

    edge, device = liar(script)
    with pytest.raises(PilotfishError) as raised:
        device.generate(PROMPT, protocol=protocol, max_tokens=5)
    assert raised.value.code == code
    begun = [request for request in edge.requests if isinstance(request, m.Begin)]
    assert len(begun) == 3
    names = {request.session for request in begun}
    assert len(names) == (3 if code == UnknownSessionError.code else 1)


def test_late_and_foreign_answers_are_passed_over(liar) -> None:
    def script(request: m.DeviceMessage) -> list[Answer]:
        if not isinstance(request, m.Window):
            return []
        stranger = m.Verdict(
            session=b"x" * 16, generation=request.generation, start=request.start, accepted=0,
            token=2, times=TIMES,
        )  # fmt: skip
        late = m.Failure(
            code="internal", message="Old.", session=request.session,
            generation=request.generation + 1,
        )  # fmt: skip
        return [
            [m.Pong(nonce=1, received_ns=1, sent_ns=1)],
            [stranger],
            [late],
            [verdict(request, start=request.start + 1)],
            [verdict(request, generation=request.generation + 1)],
            [verdict(request)],
        ]

    _, device = liar(script)
    assert device.generate(PROMPT, protocol="greedy", max_tokens=5).tokens == [1] * 5


@pytest.mark.parametrize(
    ("code", "error"),
    [("pair-mismatch", PairMismatchError), ("version-mismatch", VersionMismatchError)],
)
def test_a_handshake_that_is_refused(liar, code: str, error: type[PilotfishError]) -> None:
    with pytest.raises(error):
        liar(lambda request: [[m.Failure(code=code, message="No.")]])


def test_an_edge_without_room(pair: Pair, liar) -> None:
    def script(request: m.DeviceMessage) -> list[Answer]:
        if not isinstance(request, m.Hello):
            return []
        welcome = LyingEdge(pair, script).welcome()
        tight = m.Limits(context=4, window=64, message_bytes=2**20, sessions=1)
        fields = {name: getattr(welcome, name) for name in welcome.__struct_fields__}
        return [[m.Welcome(**{**fields, "limits": tight})]]

    _, device = liar(script)
    with pytest.raises(PromptTooLongError):
        device.generate(PROMPT, protocol="greedy", max_tokens=5)
