"""Whatever a client sends, it gets a typed failure, and everyone else goes on unharmed.

Around every test here a well-behaved device is in the middle of a generation on the same edge; it
must finish it with exactly the tokens that it would have got (`neighbour`, always there).
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest

from pilotfish import Device, EdgeServer
from tests.conftest import CONTEXT, PADDED_VOCAB, VOCAB
from tests.hostile import (
    RawClient,
    RawSession,
    SocketlessEdge,
    fields,
    ids_bytes,
    packed,
    resident_mib,
    take_tokens,
)
from wire import messages as m
from wire.committed import Committed
from wire.errors import AccessDeniedError
from wire.keys import DeviceKeys
from wire.messages import HEADER_BYTES, MAX_FRAMES

PROMPT = [3, 1, 4, 1, 5]
GENERATION = {
    "protocol": "dsd", "temperature": 1.0, "seed": 0, "window": 3, "max_tokens": 40,
}  # fmt: skip
MESSAGE_BYTES = 64 * 2**20


@pytest.fixture(scope="module")
def undisturbed(device: Device) -> list[int]:
    return device.generate(PROMPT, **GENERATION).tokens


@pytest.fixture(autouse=True)
def neighbour(device: Device, undisturbed: list[int]) -> Iterator[None]:
    pieces = device.stream(PROMPT, **GENERATION)
    got = [*next(pieces).tokens, *next(pieces).tokens]
    yield
    got += [token for piece in pieces for token in piece.tokens]
    assert got == undisturbed


@pytest.fixture
def client(edge: EdgeServer) -> Iterator[RawClient]:
    with RawClient(edge.endpoint) as opened:
        yield opened


@pytest.fixture
def session(client: RawClient) -> RawSession:
    """A greedy generation, begun."""
    opened = RawSession()
    client.send(*opened.begin(PROMPT))
    return opened


def honest_q(ids: list[int], vocab: int = VOCAB) -> np.ndarray:
    q = np.full((len(ids), vocab), 0.5 / (vocab - 1), dtype="<f4")
    q[np.arange(len(ids)), ids] = 0.5
    return q


HELLO = m.Hello(version=m.VERSION, tokenizer="?", vocab_size=1, padded_vocab_size=1, hidden_size=1)
PING = m.Ping(nonce=1)


# Frames


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x00"],
        [b"\xc1" * 40],  # a byte that msgpack never uses
        [b"GET / HTTP/1.1\r\n\r\n"],
        [secrets.token_bytes(64)],
        [packed({})],
        [packed([])],
        [packed(["window"])],
        [packed(None)],
        [packed(7)],
        [packed(["hello"] * 6)],
        [m.encode(PING) + b"\x00"],
        [m.encode(PING)[:-1]],
        [b"", b"", b""],
    ],
)
def test_garbage(client: RawClient, frames: list[bytes]) -> None:
    client.send(*frames)
    client.fails("malformed")
    client.say(PING)
    assert isinstance(client.hear(), m.Pong)


def test_every_truncation_of_every_message(client: RawClient, session: RawSession) -> None:
    messages = [
        session.begin(PROMPT, "dsd")[0],
        session.window([1])[0],
        session.pull(3)[0],
        m.encode(HELLO),
        m.encode(PING),
        m.encode(m.Cancel(session=session.id, generation=0)),
        m.encode(m.Close(session=session.id)),
    ]
    for message in messages:
        for at in range(len(message)):
            client.send(message[:at])
            client.fails("malformed")


def test_unknown_messages_and_messages_of_the_other_direction(client: RawClient) -> None:
    client.send(packed(["teleport", b"x" * 16]))
    client.fails("malformed")
    client.say(m.Pong(nonce=1, received_ns=1, sent_ns=1))
    client.fails("malformed")
    client.say(m.Failure(code="internal", message="boo"))
    client.fails("malformed")


def test_an_overlong_header(client: RawClient) -> None:
    client.send(packed(["hello", 1, "x" * HEADER_BYTES, 1, 1, 1]))
    client.fails("malformed")


@pytest.mark.parametrize(
    "opening", [b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\xdf\x00\x00\x00\x01\x01"]
)
def test_nesting_bombs(client: RawClient, opening: bytes) -> None:
    client.send(opening * (HEADER_BYTES // len(opening)))
    client.fails("malformed")
    client.send(packed(["ping"])[:-5] + b"\x92\xa4ping" + opening * 4000)
    client.fails("malformed")


@pytest.mark.parametrize("kind", [b"\xdd", b"\xdf", b"\xc6", b"\xdb"])  # array, map, bytes, text
def test_lengths_that_are_not_there(client: RawClient, kind: bytes) -> None:
    client.send(kind + b"\xff\xff\xff\xff" + b"\x01" * 100)
    client.fails("malformed")


def test_many_frames(client: RawClient, session: RawSession) -> None:
    client.send(*session.window([1], *[b""] * MAX_FRAMES))
    client.fails("malformed")
    client.send(m.encode(PING), *[b"x"] * 20_000)
    client.fails("malformed")
    session.go_on(client, 2)


@pytest.mark.parametrize("extra", [1, 2, MAX_FRAMES - 1])
def test_frames_that_do_not_belong(client: RawClient, session: RawSession, extra: int) -> None:
    client.send(*session.window([1], *[b"1234"] * extra))
    client.fails("malformed")
    session.go_on(client, 2)


def test_frames_that_are_missing(client: RawClient, session: RawSession) -> None:
    client.send(session.window([1])[0])
    client.fails("malformed")
    client.send(RawSession().begin(PROMPT)[0])
    client.fails("malformed")
    session.go_on(client, 2)


@pytest.mark.parametrize("size", [1, 3, 5, 1023])
def test_truncated_ids(client: RawClient, session: RawSession, size: int) -> None:
    client.send(session.window()[0], b"\x00" * size)
    client.fails("malformed")
    session.go_on(client, 2)


@pytest.mark.parametrize("cut", [1, 4, VOCAB * 4])
def test_truncated_distributions(client: RawClient, session: RawSession, cut: int) -> None:
    client.send(*session.begin(PROMPT, "dsd"))
    client.send(*session.window([1, 2], honest_q([1, 2]).tobytes()[:-cut]))
    client.fails("malformed")
    client.send(*session.window([1, 2], honest_q([1, 2]).tobytes()))
    assert isinstance(client.hear(), m.Verdict)


# The handshake


@pytest.mark.parametrize("version", [0, 2, 2**31 - 1])
@pytest.mark.parametrize("more", [[], ["something", {"new": 1}]])
def test_wrong_version(client: RawClient, version: int, more: list[object]) -> None:
    hello = fields(HELLO)
    hello[1] = version
    client.send(packed([*hello, *more]))
    assert "version" in client.fails("version-mismatch").message


def test_another_vocabulary(client: RawClient) -> None:
    client.say(HELLO)
    assert "vocabulary" in client.fails("pair-mismatch").message


# Values

WINDOW_FIELDS = ("type", "session", "generation", "start", "hash")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("generation", -1),
        ("generation", 0.5),
        ("generation", 2**31),
        ("generation", 2**64 - 1),
        ("generation", True),
        ("generation", None),
        ("generation", "0"),
        ("start", -5),
        ("start", 5.25),
        ("start", [5]),
        ("start", float("nan")),
        ("session", b"short"),
        ("session", b"x" * 17),
        ("session", "x" * 16),
        ("hash", b""),
        ("hash", b"x" * 9),
        ("type", b"window"),
        ("type", 3),
    ],
)
def test_fields_of_the_wrong_kind(
    client: RawClient, session: RawSession, place: str, value: object
) -> None:
    header = msgspec.msgpack.decode(session.window()[0])
    header[WINDOW_FIELDS.index(place)] = value
    client.send(packed(header), b"")
    client.fails("malformed")
    session.go_on(client, 2)


def test_strings_that_are_no_utf8(client: RawClient, session: RawSession) -> None:
    begin, ids = session.begin(PROMPT)
    client.send(begin.replace(b"greedy", b"\xff\xfe\xed\xa0\x80\x80"), ids)
    client.fails("malformed")
    client.send(packed(["ping", 1]).replace(b"ping", b"\xf0\x9f\xff\xff"))
    client.fails("malformed")


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": -float("inf")},
        {"temperature": -1.0},
        {"temperature": 1e30},
        {"temperature": 1e-46},  # 0 as a float32: p would be 0/0
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**63},
        {"seed": 1.5},
        {"keep": -1},
    ],
)
def test_sampling_that_makes_no_sense(
    client: RawClient, session: RawSession, changes: dict[str, object]
) -> None:
    begin, ids = session.begin(PROMPT, "dsd", **changes)
    client.send(begin, ids)
    client.fails("malformed")


def test_smallest_and_largest_sampling_that_makes_sense(client: RawClient) -> None:
    for changes in (
        {"temperature": 1e-3, "top_p": 1e-300, "top_k": 2**31 - 1, "seed": 2**63 - 1},
        {"temperature": 100.0, "top_p": 1.0, "top_k": 1},
    ):
        session = RawSession()
        client.send(*session.begin(PROMPT, "stream", **changes))
        client.send(*session.pull(4))
        assert all(token < VOCAB for token in take_tokens(client, 4))


@pytest.mark.parametrize(
    ("protocol", "temperature", "code"),
    [
        ("telepathy", 0.0, "unsupported"),
        ("local", 0.0, "unsupported"),
        ("", 0.0, "unsupported"),
        ("greedy", 1.0, "unsupported"),
        ("x" * 65, 0.0, "malformed"),
    ],
)
def test_protocols_that_are_not_offered(
    client: RawClient, protocol: str, temperature: float, code: str
) -> None:
    client.send(*RawSession().begin(PROMPT, protocol, temperature=temperature))
    client.fails(code)


# Tokens and distributions


@pytest.mark.parametrize("token", [VOCAB, PADDED_VOCAB - 1, PADDED_VOCAB, 2**31, 2**32 - 1])
def test_token_out_of_range(client: RawClient, session: RawSession, token: int) -> None:
    client.send(*RawSession().begin([1, token, 2]))
    client.fails("token-out-of-range")
    client.send(*session.window([1, token]))
    failure = client.fails("token-out-of-range")
    assert (failure.session, failure.generation, failure.start) == (session.id, 0, len(PROMPT))
    session.go_on(client, 2)


def bad_q(kind: str) -> np.ndarray:
    """q [2, V] over the window [7, 9], spoilt."""
    q = honest_q([7, 9])
    match kind:
        case "nan":
            q[1, 3] = np.nan
        case "inf":
            q[0, 3] = np.inf
        case "inf and its opposite":
            q[0, 3], q[0, 4] = np.inf, -np.inf
        case "negative":
            q[0, 3] -= 0.25
            q[0, 4] += 0.25
        case "huge and its opposite":
            q[1, 3], q[1, 4] = 1e30, -1e30
        case "sum too small":
            q[1] *= 0.5
        case "sum too large":
            q[0] *= 1.01
        case "all zero":
            q[:] = 0.0
        case "drafted token excluded":
            q[1, 10] += q[1, 9]
            q[1, 9] = 0.0
        case "drafted token at minus zero":
            q[0, 10] += q[0, 7]
            q[0, 7] = -0.0
    return q


@pytest.mark.parametrize(
    "kind",
    ["nan", "inf", "inf and its opposite", "negative", "huge and its opposite", "sum too small",
     "sum too large", "all zero", "drafted token excluded", "drafted token at minus zero"],
)  # fmt: skip
def test_distributions_that_nobody_sampled_from(client: RawClient, kind: str) -> None:
    session = RawSession()
    client.send(*session.begin(PROMPT, "dsd"))
    client.send(*session.window([7, 9], bad_q(kind).tobytes()))
    failure = client.fails("bad-draft")
    assert (failure.session, failure.start) == (session.id, len(PROMPT))
    # the round is still open for an honest window
    client.send(*session.window([7, 9], honest_q([7, 9]).tobytes()))
    session.settle([7, 9], client.hear())


def test_the_tiniest_probability_is_allowed(client: RawClient) -> None:
    q = honest_q([7])
    q[0, 9] += q[0, 7]
    q[0, 7] = np.float32(1e-45)  # denormal: p/q overflows, which means "accept"
    session = RawSession()
    client.send(*session.begin(PROMPT, "dsd"))
    client.send(*session.window([7], q.tobytes()))
    session.settle([7], client.hear())
    assert session.committed.ids[len(PROMPT)] == 7


# Positions


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 0},
        {"start": len(PROMPT) - 1},
        {"start": len(PROMPT) + 1},
        {"start": 2**31 - 1},
        {"hash": b"12345678"},
        {"hash": Committed().hash},
        {"generation": 1},
        {"generation": 2**31 - 1},
    ],
)
def test_wrong_start_hash_or_generation(
    client: RawClient, session: RawSession, changes: dict[str, object]
) -> None:
    client.send(*session.window([1], **changes))
    client.fails("diverged")
    session.go_on(client, 2)


@pytest.mark.parametrize("changes", [{"start": 6}, {"start": 2**31 - 1}, {"hash": b"12345678"}])
def test_wrong_start_or_hash_of_a_stream(client: RawClient, changes: dict[str, object]) -> None:
    session = RawSession()
    client.send(*session.begin(PROMPT, "stream"))
    client.send(*session.pull(3, **changes))
    client.fails("diverged")
    client.send(*session.pull(3))
    assert len(take_tokens(client, 3)) == 3


@pytest.mark.parametrize("keep", [1, len(PROMPT) + 1])
def test_keeping_tokens_that_the_edge_does_not_have(client: RawClient, keep: int) -> None:
    session = RawSession()
    client.send(*session.begin(PROMPT, keep=keep))
    client.fails("unknown-session")
    client.send(*session.begin(PROMPT))
    client.send(*session.begin(PROMPT, keep=keep))
    client.fails("diverged")
    client.send(*session.begin(PROMPT, keep=2**31 - 1))
    client.fails("prompt-too-long")
    session.generation -= 2  # the edge did not go along
    session.go_on(client, 2)


def test_a_generation_that_goes_backwards_or_comes_again(
    client: RawClient, session: RawSession
) -> None:
    first = session.begin(PROMPT)
    client.send(*first)
    client.send(*session.begin([9, 9]))
    client.send(*first)
    client.fails("diverged")
    client.send(*RawSession(session.id).begin([8]))
    client.fails("diverged")
    assert session.go_on(client, 2)[:2] == [9, 9]


def test_a_wrong_hash_of_nothing_opens_no_session(edge: EdgeServer, client: RawClient) -> None:
    for _ in range(20):  # more than this client may open
        client.send(*RawSession().begin(PROMPT, hash=b"12345678"))
        client.fails("diverged")
    session = RawSession()
    client.send(*session.begin(PROMPT))
    session.go_on(client, 1)


# Rounds


def test_a_window_again_gets_the_same_verdict(client: RawClient, session: RawSession) -> None:
    window = session.window([6, 7, 8])
    client.send(*window)
    verdict = client.hear()
    for _ in range(3):
        client.send(*window)
        assert client.hear() == verdict
    session.settle([6, 7, 8], verdict)
    session.go_on(client, 2)


@pytest.mark.parametrize("other", [[6, 7], [6, 7, 9], [6, 7, 8, 1], []])
def test_a_different_window_at_a_start_already_answered(
    client: RawClient, session: RawSession, other: list[int]
) -> None:
    ids = [6, 7, 8]
    changed = session.window(other)
    client.send(*session.window(ids))
    verdict = client.hear()
    client.send(*changed)
    client.fails("conflict")
    session.settle(ids, verdict)
    session.go_on(client, 2)


def test_the_same_window_on_another_past(client: RawClient, session: RawSession) -> None:
    ids = [6, 7, 8]
    changed = session.window(ids, hash=b"12345678")
    client.send(*session.window(ids))
    session.settle(ids, client.hear())
    client.send(*changed)
    client.fails("diverged")
    session.go_on(client, 2)


def test_windows_during_an_unfinished_window(pair, undisturbed) -> None:
    with SocketlessEdge(pair.target) as edge:
        session = RawSession()
        edge.deliver(session.begin(PROMPT))
        window = session.window([6, 7])
        edge.deliver(window)
        edge.deliver(session.window([6, 8]))
        edge.fails("conflict")
        edge.deliver(session.window([6], start=len(PROMPT) + 1))
        edge.fails("conflict")
        edge.deliver(window)  # a retry: it is answered when the first one is
        edge.start()
        session.settle([6, 7], edge.reply())
        edge.turn()
        assert not edge.replies
        edge.deliver(window)
        assert isinstance(edge.reply(), m.Verdict)


def test_windows_of_a_stream_and_pulls_of_a_speculation(client: RawClient) -> None:
    session = RawSession()
    client.send(*session.begin(PROMPT, "stream"))
    client.send(*session.window([1]))
    client.fails("malformed")
    client.send(*session.begin(PROMPT))
    client.send(*session.pull(5))
    client.fails("malformed")
    session.go_on(client, 2)


def test_begin_and_cancel_during_a_stream(client: RawClient) -> None:
    session = RawSession()
    client.send(*session.begin(PROMPT))
    wanted = session.go_on(client, 6)
    session = RawSession()
    for stop in ("begin", "cancel"):
        client.send(*session.begin(PROMPT, "stream"))
        client.send(*session.pull(2**31 - 1))
        take_tokens(client, 3)
        if stop == "cancel":
            client.say(m.Cancel(session=session.id, generation=session.generation))
        client.send(*session.begin(PROMPT))
        client.send(*session.window())
        replies = client.settle()
        while not (replies and isinstance(replies[-1], m.Verdict)):
            replies.append(client.hear())
        assert all(isinstance(r, m.Tokens) for r in replies[:-1])
        session.settle([], replies[-1])
        assert session.go_on(client, 5) == wanted


def test_a_pull_without_end_ends_with_the_context(client: RawClient) -> None:
    session = RawSession()
    client.send(*session.begin([4] * (CONTEXT - 20), "stream", temperature=0.0))
    client.send(*session.pull(2**31 - 1))
    tokens = take_tokens(client, 1)
    while tokens[-1] != VOCAB - 1 and len(tokens) < 20:
        tokens += take_tokens(client, 1)
    time.sleep(0.1)
    assert client.settle() == []


def test_a_pull_of_nothing_says_nothing(client: RawClient) -> None:
    session = RawSession()
    client.send(*session.begin(PROMPT, "stream"))
    client.send(*session.pull(0))
    assert client.settle() == []
    client.send(*session.pull(1))
    assert len(take_tokens(client, 1)) == 1


# Sizes


def test_overlong_prompt(client: RawClient, session: RawSession) -> None:
    for length in (CONTEXT, CONTEXT + 1, 1_000_000):
        client.send(*RawSession().begin([1] * length))
        client.fails("prompt-too-long")
    client.send(*RawSession().begin([]))
    client.fails("malformed")
    session.go_on(client, 2)


def test_a_context_that_is_full(client: RawClient, session: RawSession) -> None:
    client.send(*session.begin([1] * (CONTEXT - 1)))
    client.send(*session.window([1]))
    client.fails("too-large")
    client.send(*session.window([]))
    session.settle([], client.hear())
    client.send(*session.window([]))
    client.fails("too-large")
    client.send(*session.begin([1] * (CONTEXT - 1), "stream"))
    client.send(*session.pull(7))
    assert len(take_tokens(client, 1)) == 1


def test_a_window_beyond_the_limit(client: RawClient, session: RawSession) -> None:
    client.send(*session.window([1] * 65))
    client.fails("too-large")
    ids = [1] * 64
    client.send(*session.window(ids))
    session.settle(ids, client.hear())


def test_an_oversize_message_is_answered(client: RawClient, session: RawSession) -> None:
    half = b"\x00" * (MESSAGE_BYTES // 2)
    client.send(*session.window([], half, half))
    assert str(MESSAGE_BYTES) in client.fails("too-large").message
    session.go_on(client, 2)


def test_an_oversize_frame_costs_the_connection_and_no_more(
    locked_edge: EdgeServer, key_folders
) -> None:
    with RawClient(locked_edge.endpoint, DeviceKeys.load(key_folders["alice"])) as client:
        session = RawSession()
        client.send(*session.begin(PROMPT))
        before = session.go_on(client, 3)
        client.send(m.encode(PING), b"\x00" * (MESSAGE_BYTES + 1))
        time.sleep(0.3)  # ZeroMQ reconnects by itself
        client.send(*session.window())
        session.settle([], client.hear())  # the session is the key's, not the connection's
        assert session.committed.ids.tolist()[:-1] == before


def test_a_prompt_and_a_large_window_at_once(pair) -> None:
    """The prompt is still being read when the window comes, and pieces end at odd places."""
    with SocketlessEdge(pair.target, window=128) as edge:
        edge.start()
        for length in (1, 60, 64, 65, 100, 127, 128, 129, 192, 200):
            for width in (0, 1, 33, 63, 64, 120, 128):
                if length + width + 1 > CONTEXT:
                    continue
                prompt = [(7 * i) % 50 for i in range(length)]
                session = RawSession()
                edge.deliver(session.begin(prompt))
                ids = [(3 * i) % 50 for i in range(width)]
                edge.deliver(session.window(ids))
                session.settle(ids, edge.reply())
                edge.deliver([m.encode(m.Close(session=session.id))])


# Whose session


def test_unknown_session(client: RawClient) -> None:
    session = RawSession()
    session.begin(PROMPT)
    client.send(*session.window([1]))
    failure = client.fails("unknown-session")
    assert failure.session == session.id
    client.send(*session.pull(1))
    client.fails("unknown-session")
    client.say(m.Cancel(session=session.id, generation=0))
    client.say(m.Close(session=session.id))
    assert client.settle() == []


def test_a_closed_session_is_unknown(client: RawClient, session: RawSession) -> None:
    client.say(m.Close(session=session.id))
    client.say(m.Close(session=session.id))
    client.send(*session.window([1]))
    client.fails("unknown-session")


def test_somebody_elses_session(locked_edge: EdgeServer, key_folders) -> None:
    alice_keys, bob_keys = (DeviceKeys.load(key_folders[name]) for name in ("alice", "bob"))
    with (
        RawClient(locked_edge.endpoint, alice_keys) as alice,
        RawClient(locked_edge.endpoint, bob_keys) as bob,
        RawClient(locked_edge.endpoint, alice_keys) as alice_again,
    ):
        session = RawSession()
        alice.send(*session.begin(PROMPT))
        wanted = session.go_on(alice, 6)
        alice.send(*session.begin(PROMPT))
        session.go_on(alice, 2)

        bob.send(*session.window([1]))
        bob.fails("unknown-session")
        bob.send(*session.pull(1))
        bob.fails("unknown-session")
        bob.send(*RawSession(session.id).begin([9, 9], generation=9))
        bob.fails("unknown-session")
        bob.send(*RawSession(session.id).begin([9], keep=len(PROMPT), hash=session.committed.hash))
        bob.fails("unknown-session")
        bob.say(m.Cancel(session=session.id, generation=session.generation))
        bob.say(m.Close(session=session.id))
        assert bob.settle() == []

        session.go_on(alice, 2)
        assert session.go_on(alice_again, 2) == wanted  # the key's, on any connection


def test_unlisted_key(locked_edge: EdgeServer, key_folders, pair) -> None:
    began = time.monotonic()
    with pytest.raises(AccessDeniedError, match="keys allow"):
        Device(pair.draft, locked_edge.endpoint, key_folders["eve"])
    assert time.monotonic() - began < 3
    with Device(pair.draft, locked_edge.endpoint, key_folders["alice"]) as device:
        assert device.generate(PROMPT, max_tokens=2).tokens


# How many, how often


def test_too_many_sessions(pair, undisturbed) -> None:
    with (
        EdgeServer(pair.target, sessions=3, sessions_per_client=2, idle=0.5, threads=1) as edge,
        RawClient(edge.endpoint) as one,
        RawClient(edge.endpoint) as two,
    ):
        a, b, c, d, e = (RawSession() for _ in range(5))
        one.send(*a.begin(PROMPT))
        one.send(*b.begin(PROMPT))
        one.send(*c.begin(PROMPT))
        assert "limit" in one.fails("too-many-sessions").message
        two.send(*d.begin(PROMPT))
        two.send(*e.begin(PROMPT))
        assert "All 3" in two.fails("too-many-sessions").message
        for client, session in ((one, a), (one, b), (two, d)):
            session.go_on(client, 2)
        time.sleep(0.6)
        for client, session in ((one, b), (two, d)):
            session.go_on(client, 1)
        two.send(*e.begin(PROMPT))  # in the place of a, which was idle
        wanted = e.go_on(two, 3)
        one.send(*a.window())
        one.fails("unknown-session")
        assert b.go_on(one, 0) == d.go_on(two, 0) == wanted


def test_a_stream_that_runs_is_not_idle(pair) -> None:
    with SocketlessEdge(pair.target, sessions=1, idle_s=0.2) as edge:
        busy = RawSession()
        edge.deliver(busy.begin(PROMPT, "stream"))
        edge.deliver(busy.pull(200))
        edge.start()
        deadline = time.monotonic() + 0.25
        while time.monotonic() < deadline:  # a slow target: one token at a time
            edge.replies.clear()
            time.sleep(0.02)
            edge.turn()
        edge.replies.clear()
        edge.deliver(RawSession().begin(PROMPT), client=b"another")
        assert any(
            isinstance(reply, m.Failure) and reply.code == "too-many-sessions"
            for _, reply, _ in edge.replies
        )


def test_thousands_of_sessions_opened_and_abandoned(pair) -> None:
    with EdgeServer(pair.target, sessions=4, idle=1, threads=1) as edge:
        with RawClient(edge.endpoint) as client:
            before = resident_mib(edge.pid)
            refused = 0
            for _ in range(50):  # in bursts, or the edge drops replies that nobody takes
                for _ in range(20):
                    client.send(*RawSession().begin(PROMPT))
                failures = client.settle()
                assert {failure.code for failure in failures} <= {"too-many-sessions"}
                refused += len(failures)
            assert refused > 900
            for _ in range(50):
                for _ in range(10):
                    session = RawSession()
                    client.send(*session.begin(PROMPT))
                    client.say(m.Close(session=session.id))
                client.settle()
        for _ in range(20):  # each from a connection of its own
            with RawClient(edge.endpoint) as client:
                client.send(*RawSession().begin(PROMPT))
                assert {failure.code for failure in client.settle()} <= {"too-many-sessions"}
        time.sleep(1.1)  # what was abandoned yields now
        with RawClient(edge.endpoint) as client:
            session = RawSession()
            client.send(*session.begin(PROMPT))
            session.go_on(client, 3)
        assert resident_mib(edge.pid) - before < 20


def test_rate_limit(pair) -> None:
    with (
        EdgeServer(pair.target, rate=50, threads=1) as edge,
        RawClient(edge.endpoint) as greedy,
        RawClient(edge.endpoint) as modest,
    ):
        began = time.monotonic()
        replies: list[m.Reply] = []
        for _ in range(10):  # in bursts, or the edge drops replies that nobody takes
            for _ in range(30):
                greedy.say(PING)
            replies += [greedy.hear() for _ in range(30)]
        answered = [reply for reply in replies if isinstance(reply, m.Pong)]
        refused = [reply for reply in replies if isinstance(reply, m.Failure)]
        assert 50 <= len(answered) <= 51 + 50 * (time.monotonic() - began)
        assert len(refused) > 100
        assert {failure.code for failure in refused} == {"rate-limited"}
        modest.say(PING)
        assert isinstance(modest.hear(), m.Pong)
        time.sleep(0.3)
        greedy.say(PING)
        assert isinstance(greedy.hear(), m.Pong)


# Those who do not play at all


def test_a_client_that_never_reads(pair) -> None:
    """What it does not take is dropped, not kept."""
    sent = 8000
    with (
        EdgeServer(pair.target, rate=1e9, threads=1) as edge,
        RawClient(edge.endpoint, queue=1, receive_bytes=4096) as deaf,
    ):
        session = RawSession()
        deaf.send(*session.begin(PROMPT, "stream"))
        deaf.send(*session.pull(2**31 - 1))
        before = resident_mib(edge.pid)
        for _ in range(sent):
            deaf.send(packed(["x" * 2000]))  # is refused at some length: 1 kB
        with RawClient(edge.endpoint) as client:
            other = RawSession()
            client.send(*other.begin(PROMPT))
            other.go_on(client, 3)
        assert resident_mib(edge.pid) - before < 20
        heard = 0
        while deaf.socket.poll(300):
            deaf.socket.recv_multipart()
            heard += 1
        assert heard < sent


def test_connections_that_never_shake_hands(edge: EdgeServer) -> None:
    at = urlsplit(edge.endpoint)
    idle = [socket.create_connection((at.hostname, at.port)) for _ in range(200)]
    openings = (b"", b"\x00", b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(100))
    for i, connection in enumerate(idle):
        connection.sendall(openings[i % len(openings)])
    with RawClient(edge.endpoint) as client:
        session = RawSession()
        client.send(*session.begin(PROMPT))
        session.go_on(client, 3)
    for connection in idle:
        connection.close()


def test_clients_that_hang_up_in_mid_pass(edge: EdgeServer) -> None:
    for _ in range(20):
        with RawClient(edge.endpoint) as client:
            session = RawSession()
            client.send(*session.begin([2] * 200, "stream"))
            client.send(*session.pull(50))
            client.socket.close(100)
    with RawClient(edge.endpoint) as client:
        assert client.settle() == []


def test_a_slot_that_is_reused_in_mid_pass_serves_the_next_session_well(edge: EdgeServer) -> None:
    """Close, or begin again, while the target works: the next text on that slot is untouched."""
    with RawClient(edge.endpoint) as client:
        session = RawSession()
        client.send(*session.begin(PROMPT))
        wanted = session.go_on(client, 5)
        client.say(m.Close(session=session.id))
        for turn in range(60):
            same_id = turn % 3 == 0
            victim = RawSession()
            client.send(*victim.begin([2 + turn % 7] * (20 + 3 * turn)))
            client.send(*victim.window([3] * (turn % 5)))
            time.sleep(0.0005 * (turn % 8))
            client.say(m.Close(session=victim.id))
            session = RawSession(victim.id if same_id else None)
            session_frames = session.begin(PROMPT)
            client.send(*session_frames)
            replies = client.settle()
            assert all(isinstance(reply, m.Verdict) for reply in replies)
            late_start = 20 + 3 * turn
            for _ in range(5):
                client.send(*session.window())
                reply = client.hear()
                while isinstance(reply, m.Verdict) and reply.start == late_start:
                    reply = client.hear()
                session.settle([], reply)
            assert session.committed.ids.tolist() == wanted
            client.say(m.Close(session=session.id))


def test_ids_frames_are_little_endian() -> None:
    assert ids_bytes([1]) == b"\x01\x00\x00\x00"
