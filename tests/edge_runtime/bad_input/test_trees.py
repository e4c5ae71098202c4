"""Token trees that are none: expansions, candidates and distributions that do not fit."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pilotfish import EdgeServer
from pilotfish.speculation.tree import nodes_at_most
from pilotfish.speculation.truncation import SparseRows
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.sparse import encode_sparse
from tests.conftest import CONTEXT, VOCAB
from tests.support.hostile import RawClient, RawSession, cpu_s, drafted, ids_bytes, peak_mib

EDGE_WINDOW = 64


@pytest.fixture
def protocol() -> str:
    return "tree"


def uniform(count: int, ids: range = range(VOCAB)) -> bytes:
    """``count`` equal distributions over these tokens."""
    ends = np.arange(1, count + 1) * len(ids)
    tokens = np.tile(np.array(ids, np.uint32), count)
    return encode_sparse(SparseRows(tokens, np.zeros(len(tokens), np.uint8), ends), VOCAB)


def inner_nodes(expansion: tuple[int, ...]) -> int:
    """Distributions that a tree without duplicates has."""
    return sum(math.prod(expansion[:level]) for level in range(len(expansion)))


def tree(session: RawSession, ids: list[int], expansion: tuple[int, ...], q: bytes) -> list[bytes]:
    """A window of these frames, right or wrong."""
    header = session.window()[0]
    return [header, ids_bytes(ids), bytes(expansion), q]


def go_on(client: RawClient, session: RawSession) -> None:
    """Honest rounds, which the edge must answer."""
    for expansion in ((2, 2, 1), (3,), (1, 1, 1), ()):
        draft = drafted("tree", expansion)
        client.send(*session.propose("tree", draft))
        session.follow(draft, client.receive())


def test_honest_trees_are_answered(client: RawClient, session: RawSession) -> None:
    for _ in range(3):
        go_on(client, session)


@pytest.mark.parametrize(
    ("expansion", "count"),
    [
        ((0,), 0),
        ((0,), 1),
        ((2, 0), 2),
        ((0, 2), 2),
        ((2, 0, 2), 6),
        ((), 1),
        ((), 64),
        ((2,), 0),
        ((2,), 1),
        ((2,), 3),
        ((2, 2), 4),
        ((2, 2), 5),
        ((2, 2), 7),
        ((1, 1, 1), 2),
        ((255,), 254),
        ((255, 255), 40),
        ((255,) * 128, 60),
        ((1,) * 129, 129),
        ((1,) * 5000, 64),
        ((255,) * 16_000, 64),
    ],
)
@pytest.mark.parametrize("distributions", [1, 3])
def test_expansions_that_do_not_fit_the_candidates(
    client: RawClient,
    session: RawSession,
    expansion: tuple[int, ...],
    count: int,
    distributions: int,
) -> None:
    ids = list(range(VOCAB))[:count] or []
    client.send(*tree(session, ids, expansion, uniform(distributions)))
    client.fails("malformed")
    go_on(client, session)


@pytest.mark.parametrize(
    ("ids", "expansion"),
    [
        ([1], b"\1" * (60 << 20)),
        ([1], b"\xff" * (60 << 20)),
        (list(range(60)) * 400, b"\x3c" + b"\1" * 127),  # 60 nodes a level
        (list(range(60)) * 200, b"\x3c\x3c" + b"\1" * 100),
    ],
)
def test_trees_that_cost_much_are_refused_for_little(
    edge: EdgeServer, client: RawClient, session: RawSession, ids: list[int], expansion: bytes
) -> None:
    """Before its distributions are decoded, and without a copy of what was sent."""
    header, frame, _, q = tree(session, ids, (), uniform(64))
    before = peak_mib(edge.pid)
    busy_s = cpu_s(edge.pid)
    client.send(header, frame, expansion, q)
    assert isinstance(client.receive(), m.Failure)
    assert cpu_s(edge.pid) - busy_s < 1.0
    assert peak_mib(edge.pid) - before < 150
    go_on(client, session)


@pytest.mark.parametrize("distributions", [0, 1, 2, 4, 7])
def test_too_few_and_too_many_distributions(
    client: RawClient, session: RawSession, distributions: int
) -> None:
    q = uniform(distributions) if distributions else b""
    client.send(*tree(session, [1, 2, 3, 4, 5, 6], (2, 2), q))  # three inner nodes
    client.fails("malformed")
    client.send(*tree(session, [1, 2, 3, 4, 5, 6], (2, 2), uniform(3)))
    assert isinstance(client.receive(), m.Verdict)


def test_duplicates_have_one_distribution(client: RawClient, session: RawSession) -> None:
    client.send(*tree(session, [1, 1, 3, 3], (2, 2), uniform(3)))
    client.fails("malformed")
    client.send(*tree(session, [1, 1, 3, 4, 3, 4], (2, 2), uniform(2)))
    client.fails("malformed")  # the second child is the first, and has no candidates of its own
    client.send(*tree(session, [1, 1, 3, 3], (2, 2), uniform(2)))
    assert isinstance(client.receive(), m.Verdict)


@pytest.mark.parametrize("at", range(6))
def test_a_candidate_that_its_node_excludes(
    client: RawClient, session: RawSession, at: int
) -> None:
    ids = [1, 2, 3, 4, 5, 6]
    ids[at] = 40
    client.send(*tree(session, ids, (2, 2), uniform(3, range(1, 20))))
    client.fails("bad-draft")
    go_on(client, session)


def test_every_candidate_may_be_the_same(client: RawClient, session: RawSession) -> None:
    """255 candidates a node, and one node a level: a legal tree, decided like any other."""
    for levels in (1, 4, 64):
        draft_ids = [9] * 255 * levels
        client.send(*tree(session, draft_ids, (255,) * levels, uniform(levels)))
        verdict = client.receive()
        assert isinstance(verdict, m.Verdict)
        session.settle([9] * levels, verdict)
    client.send(*tree(session, [9] * 255 * 65, (255,) * 65, uniform(65)))
    client.fails("too-large")
    go_on(client, session)


@pytest.mark.parametrize("expansion", [(64, 1), (5, 13), (1,) * 65, (4, 4, 4)])
def test_trees_beyond_the_window_limit(
    client: RawClient, session: RawSession, expansion: tuple[int, ...]
) -> None:
    count = nodes_at_most(expansion)
    assert count > EDGE_WINDOW
    ids = [token % VOCAB for token in range(count)]
    client.send(*tree(session, ids, expansion, uniform(inner_nodes(expansion))))
    client.fails("too-large")
    go_on(client, session)


def test_the_largest_tree(client: RawClient, session: RawSession) -> None:
    client.send(*tree(session, list(range(64)), (64,), uniform(1)))
    verdict = client.receive()
    assert isinstance(verdict, m.Verdict)
    assert verdict.accepted <= 64
    path = [verdict.accepted - 1] if verdict.accepted else []
    assert verdict.token is not None
    session.committed.extend([*path, verdict.token])
    go_on(client, session)


def test_more_candidates_than_any_tree(client: RawClient, session: RawSession) -> None:
    client.send(*tree(session, [1] * 1_000_000, (255,) * 128, uniform(1)))
    client.fails("too-large")
    go_on(client, session)


def test_a_tree_beyond_the_context(client: RawClient, session: RawSession) -> None:
    """Every node takes its place in the context, not only the longest path."""
    client.send(*session.begin([1] * (CONTEXT - 5), "tree"))
    client.send(*tree(session, [1, 2, 3, 4, 5], (5,), uniform(1)))
    client.fails("too-large")
    client.send(*tree(session, [1, 2, 3, 4], (4,), uniform(1)))
    assert isinstance(client.receive(), m.Verdict)


def test_a_tree_again_and_another_tree(client: RawClient, session: RawSession) -> None:
    ids = [1, 2, 3, 4, 5, 6]
    frames = tree(session, ids, (2, 2), uniform(3))
    others = [
        tree(session, ids, (2, 2), uniform(3, range(1, 20))),
        tree(session, [2, 1, 5, 6, 3, 4], (2, 2), uniform(3)),
        tree(session, ids, (6,), uniform(1)),
        tree(session, ids, (1,) * 6, uniform(6)),
    ]
    client.send(*frames)
    verdict = client.receive()
    for _ in range(2):
        client.send(*frames)
        assert client.receive() == verdict
    for other in others:
        client.send(*other)
        client.fails("conflict")
