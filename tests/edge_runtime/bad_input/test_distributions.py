"""Windows that no device can have drafted: ids and distributions."""

from __future__ import annotations

import numpy as np
import pytest

from pilotfish.wire import messages as m
from tests.conftest import PADDED_VOCAB, VOCAB
from tests.support.hostile import PROMPT, RawClient, RawSession


def honest_q(ids: list[int], vocab: int = VOCAB) -> np.ndarray:
    q = np.full((len(ids), vocab), 0.5 / (vocab - 1), dtype="<f4")
    q[np.arange(len(ids)), ids] = 0.5
    return q


@pytest.mark.parametrize("token", [VOCAB, PADDED_VOCAB - 1, PADDED_VOCAB, 2**15, 2**16 - 1])
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
def test_distributions_without_the_drafted_tokens(client: RawClient, kind: str) -> None:
    session = RawSession()
    client.send(*session.begin(PROMPT, "dsd"))
    client.send(*session.window([7, 9], bad_q(kind).tobytes()))
    failure = client.fails("bad-draft")
    assert (failure.session, failure.start) == (session.id, len(PROMPT))
    # the round is still open for an honest window
    client.send(*session.window([7, 9], honest_q([7, 9]).tobytes()))
    session.settle([7, 9], client.receive())


@pytest.mark.parametrize("number", [-0.25, -0.0, np.inf, -np.inf, np.nan, 0.25])
def test_halves_that_are_no_probabilities(client: RawClient, number: float) -> None:
    session = RawSession()
    client.send(*session.begin(PROMPT, "dsd"))
    q = honest_q([7, 9]).astype("<f2")
    q[1, 3] = number  # 0.25 makes the sum wrong
    client.send(*session.window([7, 9], q.tobytes()))
    client.fails("bad-draft")
    q = honest_q([7, 9]).astype("<f2")
    q[0, 7] = 0.0
    q[0, 8] = 0.5
    client.send(*session.window([7, 9], q.tobytes()))
    client.fails("bad-draft")
    client.send(*session.window([7, 9], honest_q([7, 9]).astype("<f2").tobytes()))
    session.settle([7, 9], client.receive())


def test_the_tiniest_probability_is_allowed(client: RawClient) -> None:
    q = honest_q([7])
    q[0, 9] += q[0, 7]
    q[0, 7] = np.float32(1e-45)  # denormal: p/q overflows, which means "accept"
    session = RawSession()
    client.send(*session.begin(PROMPT, "dsd"))
    client.send(*session.window([7], q.tobytes()))
    session.settle([7], client.receive())
    assert session.committed.ids[len(PROMPT)] == 7


@pytest.mark.parametrize("cut", [1, 4, VOCAB * 4 - 2])
def test_truncated_distributions(client: RawClient, session: RawSession, cut: int) -> None:
    client.send(*session.begin(PROMPT, "dsd"))
    client.send(*session.window([1, 2], honest_q([1, 2]).tobytes()[:-cut]))
    client.fails("malformed")
    client.send(*session.window([1, 2], honest_q([1, 2]).tobytes()))
    assert isinstance(client.receive(), m.Verdict)
