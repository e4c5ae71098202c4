"""`dssd`: what a device may not do with the token that it samples itself, and with the weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pilotfish.wire import messages as m
from pilotfish.wire.codecs.counts import decode_counts
from pilotfish.wire.codecs.ids import encode_ids
from pilotfish.wire.protocols import Draft
from pilotfish.wire.protocols.dssd import P_BITS, Q_BITS, SplitDraft
from tests.conftest import PADDED_VOCAB, VOCAB
from tests.support.hostile import RawClient, RawSession, drafted, ids_bytes

Round = tuple[Draft, list[bytes], m.Verdict, list[bytes]]


@pytest.fixture
def protocol() -> str:
    return "dssd"


def weights(*numbers: int) -> bytes:
    """A frame of weights."""
    return bytes(encode_ids(np.array(numbers) - 1, 2**Q_BITS))


def one_round(client: RawClient, session: RawSession, draft: Draft, sampled: int = 7) -> Round:
    """An honest round: what went up and what came down."""
    frames = session.propose("dssd", draft)
    client.send(*frames)
    verdict, answer = client.receive_all()
    session.follow(draft, verdict, sampled)
    assert isinstance(verdict, m.Verdict)
    return draft, frames, verdict, answer


def sure(ids: Sequence[int], weight: int) -> SplitDraft:
    """A window whose tokens have this weight in q: 1 is always accepted, unless p̃ is 0."""
    return SplitDraft(np.array(ids, np.uint32), np.full(len(ids), weight))


def until(client: RawClient, session: RawSession, *, rejected: bool) -> Round:
    """Rounds until one ends with a rejection, or without one."""
    for seed in range(100):
        result = one_round(client, session, drafted("dssd", (1, 1) if rejected else (1,), seed))
        if (result[2].token is None) == rejected:
            return result
    pytest.fail("chance is against us")


def go_on(client: RawClient, session: RawSession) -> None:
    """Rounds of both endings, which the edge must follow."""
    until(client, session, rejected=True)
    until(client, session, rejected=False)


def test_rejections_send_a_distribution_and_nothing_else_does(
    client: RawClient, session: RawSession
) -> None:
    for _ in range(3):
        verdict, answer = until(client, session, rejected=True)[2:]
        assert decode_counts(answer[0], VOCAB, P_BITS).sum() == 2**P_BITS
        assert verdict.accepted < 2
        verdict, answer = until(client, session, rejected=False)[2:]
        assert answer == []


# Weights


@pytest.mark.parametrize(
    "frame",
    [b"", weights(5), weights(5) + b"\0", weights(5, 5)[:-1], weights(5, 5, 5), weights(*[5] * 60)],
)
def test_weights_that_do_not_fit_the_window(
    client: RawClient, session: RawSession, frame: bytes
) -> None:
    header, ids = session.window([3, 4])
    client.send(header, ids, frame)
    # one weight fewer than ids makes the first one pending, which is not due
    client.fails("diverged" if frame == weights(5) else "malformed")
    go_on(client, session)


@pytest.mark.parametrize("weight", [1, 2, 2**16, 2**Q_BITS])
def test_any_weight_may_be_true(client: RawClient, session: RawSession, weight: int) -> None:
    one_round(client, session, sure([3, 4], weight))
    go_on(client, session)


# The pending token


def text(session: RawSession, start: int, digest: bytes, *frames: bytes) -> list[bytes]:
    """A window wherever one likes."""
    return [session.window(start=start, hash=digest)[0], *frames]


def test_two_pending_tokens(client: RawClient, session: RawSession) -> None:
    until(client, session, rejected=True)
    start, digest = len(session.committed), session.committed.hash_at(len(session.committed) - 1)
    client.send(*text(session, start, digest, ids_bytes([7, 8, 1]), weights(5)))
    client.fails("malformed")
    client.send(*text(session, start + 1, digest, ids_bytes([7, 8]), b""))
    client.fails("malformed")
    go_on(client, session)


@pytest.mark.parametrize("token", [VOCAB, PADDED_VOCAB, 2**16 - 1])
def test_a_pending_token_out_of_range(client: RawClient, session: RawSession, token: int) -> None:
    until(client, session, rejected=True)
    header, ids, frame = session.propose("dssd", sure([1], 5))
    client.send(header, ids_bytes([token]) + ids[2:], frame)
    client.fails("token-out-of-range")
    go_on(client, session)


@pytest.mark.parametrize("first", [True, False])
def test_a_pending_token_that_is_not_due(
    client: RawClient, session: RawSession, first: bool
) -> None:
    """The edge has sampled the token itself, or none is due yet: nothing may slip in between."""
    if not first:
        until(client, session, rejected=False)
    committed = session.committed
    start = len(committed)
    both = ids_bytes([7, 1]), weights(5)
    client.send(*text(session, start + 1, committed.hash, *both))  # one more
    client.fails("diverged")
    client.send(*text(session, start, committed.hash_at(start - 1), *both))  # another
    client.fails("diverged")
    client.send(*text(session, start, committed.hash, *both))
    client.fails("diverged")
    client.send(*text(session, start + 1, committed.hash, ids_bytes([7]), b""))
    client.fails("diverged")
    assert len(session.committed) == start
    go_on(client, session)


def test_a_pending_token_that_is_withheld(client: RawClient, session: RawSession) -> None:
    """A device may not have the residual's token drawn again."""
    seen: set[int] = set()
    while seen != {0, 1}:  # the rejected token stands where the window began, or behind that
        accepted = until(client, session, rejected=True)[2].accepted
        seen.add(accepted)
        start = len(session.committed)
        digest = session.committed.hash_at(start - 1)
        client.send(*text(session, start - 1, digest, ids_bytes([1]), weights(5)))
        reply = client.receive()
        assert isinstance(reply, m.Failure)
        assert reply.code in ({"diverged"} if accepted else {"diverged", "conflict"})
        client.send(*text(session, start, session.committed.hash, ids_bytes([1]), weights(5)))
        client.fails("diverged")
        go_on(client, session)


def test_a_window_of_nothing_but_the_pending_token(client: RawClient, session: RawSession) -> None:
    until(client, session, rejected=True)
    length = len(session.committed)
    verdict = one_round(client, session, sure([], 1))[2]
    assert (verdict.start, verdict.accepted) == (length, 0)
    assert verdict.token is not None
    go_on(client, session)


def test_a_new_beginning_takes_the_pending_token_along(
    client: RawClient, session: RawSession
) -> None:
    until(client, session, rejected=True)
    everything = session.committed.ids.tolist()
    client.send(*session.begin(everything, "dssd"))
    digest = session.committed.hash_at(len(everything) - 1)
    both = ids_bytes([everything[-1], 1]), weights(5)
    client.send(*text(session, len(everything), digest, *both))  # not pending any more
    client.fails("diverged")
    go_on(client, session)


# Retries


def test_a_rejection_again_brings_the_same_verdict_and_the_same_distribution(
    client: RawClient, session: RawSession
) -> None:
    for _ in range(3):
        _, frames, verdict, answer = until(client, session, rejected=True)
        for _ in range(3):
            client.send(*frames)
            assert client.receive_all() == (verdict, answer)
    go_on(client, session)


def test_another_window_where_one_is_decided_on(client: RawClient, session: RawSession) -> None:
    _, (header, ids, frame), verdict, answer = until(client, session, rejected=True)
    for changed in (
        (ids_bytes([1, 2]), weights(5, 6)),
        (ids_bytes([1]), weights(5)),
        (ids, weights(5, 6)),
        (b"", b""),
    ):
        client.send(header, *changed)
        client.fails("conflict")
    client.send(header, ids, frame)
    assert client.receive_all() == (verdict, answer)
    go_on(client, session)


def test_another_pending_token_at_a_window_decided_on(
    client: RawClient, session: RawSession
) -> None:
    until(client, session, rejected=True)
    _, (header, ids, frame), verdict, answer = one_round(client, session, drafted("dssd", (1,)))
    client.send(header, ids_bytes([8]) + ids[2:], frame)
    client.fails("conflict")
    client.send(header, ids, frame)
    assert client.receive_all() == (verdict, answer)
    go_on(client, session)


def test_a_retry_on_another_past(client: RawClient, session: RawSession) -> None:
    _, frames, verdict, _ = until(client, session, rejected=True)
    client.send(*text(session, verdict.start, b"12345678", *frames[1:]))
    client.fails("diverged")
    go_on(client, session)


@pytest.mark.parametrize("shift", [-2, -1, 1, 2, 2**30])
def test_a_start_that_is_not_behind_the_pending_token(
    client: RawClient, session: RawSession, shift: int
) -> None:
    until(client, session, rejected=True)
    at = len(session.committed) + shift
    frames = session.propose("dssd", sure([1], 5), start=at)
    client.send(*frames)
    reply = client.receive()
    assert isinstance(reply, m.Failure)
    assert reply.code in ({"diverged"} if shift > 0 else {"diverged", "conflict"})
    go_on(client, session)
