"""Windows whose frames are coded: missing, surplus, cut, spoilt, impossible, and far too large."""

from __future__ import annotations

import numpy as np
import pytest

from pilotfish import EdgeServer
from pilotfish.speculation.truncation import MAX_LEVEL, SparseRows
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.sparse import encode_sparse
from pilotfish.wire.protocols import Draft
from pilotfish.wire.protocols.tslt import SparseDraft
from tests.conftest import CONTEXT, VOCAB
from tests.support.hostile import PROMPT, RawClient, RawSession, cpu_s, drafted, ids_bytes, peak_mib

SHAPES = {"tslt": (1, 1, 1), "tree": (2, 2, 1), "dssd": (1, 1, 1), "coupled": (1, 1, 1)}
CODED = ["tslt", "tree", "dssd"]
SPOILT = {"malformed", "token-out-of-range", "bad-draft", "diverged"}
MEBIBYTE = 2**20


@pytest.fixture(params=SHAPES)
def protocol(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def draft(protocol: str) -> Draft:
    return drafted(protocol, SHAPES[protocol])


def go_on(client: RawClient, session: RawSession, protocol: str, rounds: int = 2) -> None:
    """Honest rounds, which the edge must answer."""
    for seed in range(rounds):
        draft = drafted(protocol, SHAPES[protocol], seed)
        client.send(*session.propose(protocol, draft))
        session.follow(draft, client.receive(), sampled=seed)


def refused(client: RawClient, frames: list[bytes]) -> str:
    """The code of the failure that this window gets."""
    client.send(*frames)
    reply = client.receive()
    assert isinstance(reply, m.Failure), reply
    return reply.code


def test_honest_windows_are_answered(client: RawClient, session: RawSession, protocol: str) -> None:
    go_on(client, session, protocol, rounds=20)


def test_missing_frames(
    client: RawClient, session: RawSession, protocol: str, draft: Draft
) -> None:
    frames = session.propose(protocol, draft)
    for count in range(1, len(frames)):
        assert refused(client, frames[:count]) == "malformed"
    go_on(client, session, protocol)


def test_surplus_frames(
    client: RawClient, session: RawSession, protocol: str, draft: Draft
) -> None:
    frames = session.propose(protocol, draft)
    for surplus in (b"", frames[-1], b"1234"):
        assert refused(client, [*frames, surplus]) == "malformed"
    go_on(client, session, protocol)


@pytest.mark.parametrize("protocol", CODED)
def test_frames_in_another_order(
    client: RawClient, session: RawSession, protocol: str, draft: Draft
) -> None:
    header, *frames = session.propose(protocol, draft)
    assert refused(client, [header, *frames[::-1]]) in SPOILT
    assert refused(client, [header, *frames[1:], frames[0]]) in SPOILT
    go_on(client, session, protocol)


@pytest.mark.parametrize("protocol", CODED)
def test_every_truncation_of_every_frame(
    client: RawClient, session: RawSession, protocol: str, draft: Draft
) -> None:
    frames = session.propose(protocol, draft)
    for place in range(1, len(frames)):
        for size in range(len(frames[place])):
            cut = [*frames[:place], frames[place][:size], *frames[place + 1 :]]
            assert refused(client, cut) in SPOILT
    go_on(client, session, protocol)


@pytest.mark.parametrize("protocol", CODED)
def test_every_bit_of_every_frame(
    client: RawClient, session: RawSession, protocol: str, draft: Draft
) -> None:
    """Turned over, it makes a frame that is refused, or another window."""
    refusals = 0
    for place in range(1, len(session.propose(protocol, draft))):
        for bit in range(8 * len(session.propose(protocol, draft)[place])):
            client.send(*session.begin(PROMPT, protocol))
            frames = session.propose(protocol, draft)
            spoilt = bytearray(frames[place])
            spoilt[bit // 8] ^= 1 << bit % 8
            frames[place] = bytes(spoilt)
            client.send(*frames)
            reply = client.receive()
            if isinstance(reply, m.Failure):
                assert reply.code in SPOILT
                refusals += 1
    assert refusals > 20
    client.send(*session.begin(PROMPT, protocol))
    go_on(client, session, protocol)


def rows(*pairs: tuple[list[int], list[int]]) -> SparseRows:
    """Distributions by the ids and levels of each."""
    ids, levels = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    ends = np.cumsum([len(row) for row, _ in pairs])
    return SparseRows(ids.astype(np.uint32), levels.astype(np.uint8), ends)


@pytest.mark.parametrize(
    ("q", "code"),
    [
        (rows(([7, VOCAB], [0, 1]), ([9], [0])), "malformed"),
        (rows(([7], [0]), ([9, 2**16 - 1], [0, 0])), "malformed"),
        (rows(([7, 8], [0, MAX_LEVEL + 1]), ([9], [0])), "malformed"),
        (rows(([7, 8], [0, 255]), ([9], [0])), "malformed"),
        (rows(([7], [0])), "malformed"),  # one row is missing
        (rows(([7], [0]), ([9], [0]), ([9], [0])), "malformed"),
        (rows(([9], [0]), ([7], [0])), "bad-draft"),
        (rows(([7, 8], [0, 1]), ([8, 10], [0, 1])), "bad-draft"),
        (rows(([7, 8], [0, 1]), (list(range(10, VOCAB)), [0] * (VOCAB - 10))), "bad-draft"),
    ],
)
@pytest.mark.parametrize("protocol", ["tslt"])
def test_distributions_without_the_drafted_tokens(
    client: RawClient, session: RawSession, protocol: str, q: SparseRows, code: str
) -> None:
    frames = session.window([7, 9], encode_sparse(q, VOCAB))
    assert refused(client, frames) == code
    go_on(client, session, protocol)


@pytest.mark.parametrize("protocol", ["tslt"])
def test_the_lightest_token_may_have_been_drafted(
    client: RawClient, session: RawSession, protocol: str
) -> None:
    everything = (list(range(VOCAB)), [0] * (VOCAB - 1) + [MAX_LEVEL])
    draft = SparseDraft(np.array([VOCAB - 1], np.uint32), rows(everything))
    client.send(*session.propose(protocol, draft))
    session.follow(draft, client.receive())
    assert session.committed.ids[len(PROMPT)] == VOCAB - 1  # p/q̂ is huge: accepted


def test_tokens_beyond_the_vocabulary(
    client: RawClient, session: RawSession, protocol: str, draft: Draft
) -> None:
    header, ids, *others = session.propose(protocol, draft)
    for token in (VOCAB, 2**16 - 1):
        spoilt = ids_bytes([token]) + ids[2:]
        assert refused(client, [header, spoilt, *others]) == "token-out-of-range"
    go_on(client, session, protocol)


def test_windows_beyond_the_limit(client: RawClient, session: RawSession, protocol: str) -> None:
    frames = session.propose(protocol, drafted(protocol, (1,) * 65))
    assert refused(client, frames) == "too-large"
    largest = drafted(protocol, (1,) * 64)
    client.send(*session.propose(protocol, largest))
    session.follow(largest, client.receive())
    client.send(*session.propose(protocol, largest))  # `dssd` may have a pending token besides
    session.follow(largest, client.receive())


def test_windows_beyond_the_context(client: RawClient, session: RawSession, protocol: str) -> None:
    """Room is kept for the token that follows; the last round of all has an empty window."""
    client.send(*session.begin([1] * (CONTEXT - 10), protocol))
    while (room := CONTEXT - len(session.committed) - 1) >= 0:
        frames = session.propose(protocol, drafted(protocol, (1,) * (room + 1)))
        assert refused(client, frames) == "too-large"
        draft = drafted(protocol, (1,) * room)
        client.send(*session.propose(protocol, draft))
        session.follow(draft, client.receive())


BOMBS = {
    "a distribution of ones": lambda frames: [*frames[:-1], frames[-1] + b"\xff" * 60 * MEBIBYTE],
    "a distribution of zeros": lambda frames: [*frames[:-1], frames[-1] + bytes(60 * MEBIBYTE)],
    "a window of many tokens": lambda frames: [
        frames[0], b"\1\0" * 20 * MEBIBYTE, *frames[2:],
    ],
    "many tokens and their distributions": lambda frames: [
        frames[0], b"\1\0" * 12 * MEBIBYTE, *frames[2:-1], b"\xff" * 39 * MEBIBYTE,
    ],
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_bombs(
    edge: EdgeServer, client: RawClient, session: RawSession, protocol: str, draft: Draft, bomb
) -> None:
    """A message within the limit never costs much more memory or time than to receive it."""
    frames = bomb(session.propose(protocol, draft))
    before = peak_mib(edge.pid)
    busy_s = cpu_s(edge.pid)
    assert refused(client, frames) in {*SPOILT, "too-large"}
    assert cpu_s(edge.pid) - busy_s < 2
    assert peak_mib(edge.pid) - before < 250
    go_on(client, session, protocol)
