"""Steps that contradict themselves, or what a worker's slots hold: refused by name."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pilotfish import EdgeServer
from pilotfish.base.errors import MalformedError
from pilotfish.edge_runtime.steps import check_items
from pilotfish.engines.contents import SlotContents
from pilotfish.wire.codecs.topk import decode_topk
from pilotfish.wire.messages import MAX_WINDOW, encode
from pilotfish.wire.nodes import MAX_ITEMS, Attach, Item, Refused, Scored, Step
from tests.conftest import CONTEXT, VOCAB
from tests.support.federating import SESSIONS, Cast, worker
from tests.support.hostile import packed
from tests.support.raw_edge import CODES, KEPT, RawEdge, Tenant, expected_of, ids, item, parents


@pytest.fixture(scope="module")
def lone(cast: Cast) -> Iterator[EdgeServer]:
    with worker(cast.a) as held:
        yield held


@pytest.fixture
def attached(lone: EdgeServer) -> Iterator[Tenant]:
    with RawEdge(lone.endpoint) as edge:
        yield Tenant(edge)


@pytest.fixture(scope="module")
def expected(cast: Cast) -> NDArray[np.float32]:
    return expected_of(cast.a)


def test_a_step_with_two_items_for_one_slot_is_refused_before_it_is_run() -> None:
    """A slot's own passes would say so too, but where items are run in parts they might not."""
    none, contents = np.empty(0, np.int64), SlotContents(SESSIONS, CONTEXT)
    check_items([item(), item(slot=1)], 2, none, contents)
    for doubled in ([item(), item()], [item(slot=1), item(), item(slot=1, start=1)]):
        with pytest.raises(MalformedError, match="two items for one slot"):
            check_items(doubled, len(doubled), none, contents)


CHAIN = ([item(size=4, rows=0)], ids(1, 2, 3, 4), b"")
TREE = ([item(size=4, rows=4, nodes=3)], ids(1, 2, 3, 4), parents(-1, 0, -1))
LONG = ([item(size=CONTEXT - 1, rows=1)], ids(*[1] * (CONTEXT - 1)), b"")
PATH_ONCE = ([item(start=1, path=2)], ids(2, 3, 1), b"")
Taken = tuple[Sequence[Item], bytes, bytes]
CONTRADICTIONS: dict[str, tuple[list[Taken], Sequence[Item], tuple[bytes, ...]]] = {
    "beyond an empty slot": ([], [item(start=1)], (ids(1), b"")),
    "beyond what a slot holds": ([CHAIN], [item(start=5)], (ids(1), b"")),
    "beyond another slot": ([CHAIN], [item(slot=1, start=2)], (ids(1), b"")),
    "no such slot": ([], [item(slot=SESSIONS)], (ids(1), b"")),
    "a slot far away": ([], [item(slot=2**31 - 1)], (ids(1), b"")),
    "a slot twice": ([], [item(), item()], (ids(1, 2), b"")),
    "a path of an empty slot": ([], [item(path=1)], (ids(1, 1), b"")),
    "a path after nothing": ([TREE], [item(path=1)], (ids(2, 1), b"")),
    "a path of a chain": ([CHAIN], [item(start=4, path=1)], (ids(5, 1), b"")),
    "a path within a chain": ([CHAIN], [item(start=2, path=1)], (ids(3, 1), b"")),
    "a path of another slot's tree": ([TREE], [item(slot=1, start=1, path=1)], (ids(2, 1), b"")),
    "a path twice": ([TREE, PATH_ONCE], [item(start=1, path=1)], (ids(2, 1), b"")),
    "a path beyond the tree": ([TREE], [item(start=1, path=3)], (ids(2, 3, 4, 1), b"")),
    "a path of a tree's other tokens": ([TREE], [item(start=1, path=1)], (ids(3, 1), b"")),
    "a path upwards": ([TREE], [item(start=1, path=2)], (ids(3, 2, 1), b"")),
    "a path across": ([TREE], [item(start=1, path=2)], (ids(2, 4, 1), b"")),
    "a path of no token": ([TREE], [item(start=1, path=1)], (ids(1), b"")),
    "more of a path than came": ([TREE], [item(start=1, path=2)], (ids(2, 1), b"")),
    "beyond what a path left": ([TREE, PATH_ONCE], [item(start=5)], (ids(1), b"")),
    "new tokens that a chain holds": ([CHAIN], [item(start=1, size=3)], (ids(2, 3, 9), b"")),
    "new tokens that a path holds": ([TREE], [item(start=1, size=2)], (ids(2, 9), b"")),
    "a tree that the slot holds": (
        [TREE], [item(start=1, size=4, rows=1, nodes=4)], (ids(2, 3, 4, 5), parents(-1, 0, -1, 0))),
    "more tokens than came": ([], [item(size=2)], (ids(1), b"")),
    "far more tokens than came": ([], [item(size=2**31 - 1)], (ids(1), b"")),
    "fewer tokens than came": ([], [item()], (ids(1, 2), b"")),
    "no tokens": ([], [item()], (b"", b"")),
    "half a token": ([], [item()], (ids(1)[:3], b"")),
    "an id beyond": ([], [item()], (ids(VOCAB), b"")),
    "an id of padding": ([], [item()], (ids(VOCAB + 3), b"")),
    "an id far beyond": ([], [item()], (ids(2**32 - 1), b"")),
    "more rows than tokens": ([], [item(rows=2)], (ids(1), b"")),
    "more nodes than tokens": ([], [item(nodes=2)], (ids(1), parents(-1, 0))),
    "a tree without parents": ([], [item(size=3, nodes=2)], (ids(1, 2, 3), b"")),
    "parents without a tree": ([], [item(size=3)], (ids(1, 2, 3), parents(-1))),
    "half a parent": ([], [item(size=2, nodes=1)], (ids(1, 2), parents(-1)[:1])),
    "its own parent": ([], [item(size=3, nodes=2)], (ids(1, 2, 3), parents(-1, 1))),
    "a later parent": ([], [item(size=3, nodes=2)], (ids(1, 2, 3), parents(1, -1))),
    "a parent before the tree": ([], [item(size=3, nodes=1)], (ids(1, 2, 3), parents(-2))),
    "a parent far away": ([], [item(size=3, nodes=2)], (ids(1, 2, 3), parents(-1, 32767))),
    "beyond the context": ([LONG], [item(start=CONTEXT - 1, size=2)], (ids(1, 2), b"")),
    "beyond the context at once": ([], [item(size=CONTEXT + 1)], (ids(*[1] * (CONTEXT + 1)), b"")),
    "too hot": ([], [item(temperature=1e3)], (ids(1), b"")),
    "infinitely hot": ([], [item(temperature=float("inf"))], (ids(1), b"")),
    "next to nothing": ([], [item(temperature=1e-300)], (ids(1), b"")),
    "one frame": ([], [item()], (ids(1),)),
    "no frame": ([], [item()], ()),
    "three frames": ([], [item()], (ids(1), b"", b"")),
}  # fmt: skip


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_step_that_contradicts_itself_or_the_slots_ends_the_attachment(
    attached: Tenant, expected: NDArray[np.float32], what: str
) -> None:
    """By a typed refusal; after that nothing of it is left."""
    before, items, frames = CONTRADICTIONS[what]
    for taken in before:
        reply, _ = attached.step(*taken)
        assert isinstance(reply, Scored), reply
    reply, _ = attached.step(items, *frames)
    assert isinstance(reply, Refused), reply
    assert reply.incarnation == attached.incarnation
    assert reply.code in CODES - {"unsupported", "conflict"}
    reply, _ = attached.step([item()], ids(1), b"")
    assert isinstance(reply, Refused)
    assert reply.code == "conflict"
    attached.attach()
    attached.proves(expected)


@pytest.mark.parametrize(
    "odd",
    [
        {"size": 0}, {"size": -1}, {"size": 2**31}, {"slot": -1}, {"start": -1}, {"rows": -1},
        {"rows": MAX_WINDOW + 2}, {"nodes": MAX_WINDOW + 1}, {"nodes": -1}, {"path": -1},
        {"path": MAX_WINDOW + 1}, {"path": [0]}, {"temperature": -1.0},
        {"temperature": float("nan")}, {"temperature": "hot"}, {"slot": 1.5}, {"slot": None},
    ],
    ids=lambda odd: str(odd)[:20],
)  # fmt: skip
def test_a_step_that_is_none_is_refused_and_costs_nothing(
    attached: Tenant, expected: NDArray[np.float32], odd: dict[str, Any]
) -> None:
    """Its header is not taken apart as far as its incarnation: the attachment stands."""
    fields = {"slot": 0, "start": 0, "size": 1, "rows": 1, "nodes": 0, "path": 0}
    fields |= {"temperature": 0.0} | odd
    header = ["step", attached.incarnation, 1, [list(fields.values())], []]
    attached.edge.send(packed(header), ids(1), b"")
    assert attached.edge.refused("malformed").incarnation is None
    attached.proves(expected)


def test_steps_with_no_items_or_too_many(attached: Tenant, expected: NDArray[np.float32]) -> None:
    for count in (0, MAX_ITEMS + 1):
        step = Step(incarnation=attached.incarnation, number=1, items=[item()] * count)
        attached.edge.send(encode(step), ids(*[1] * count), b"")
        attached.edge.refused("malformed")
    attached.proves(expected)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"values": "fp64"}, "unsupported"),
        ({"values": ""}, "unsupported"),
        ({"top_k": 0}, "unsupported"),
        ({"incarnation": b"x" * 15}, "malformed"),
        ({"incarnation": b"x" * 17}, "malformed"),
        ({"top_k": 2**31}, "malformed"),
        ({"values": "x" * 65}, "malformed"),
        ({"next_key": b"x" * 41}, "malformed"),
    ],
)
def test_attachments_that_are_none(attached: Tenant, changes: dict[str, Any], code: str) -> None:
    attach = Attach(incarnation=secrets.token_bytes(16), top_k=KEPT, values="fp16")
    fields = msgspec.structs.asdict(attach) | changes
    attached.edge.send(packed(["attach", *fields.values()]))
    attached.edge.refused(code)


def test_a_worker_tells_no_more_than_it_has(lone: EdgeServer) -> None:
    """K beyond the vocabulary is all of it."""
    with RawEdge(lone.endpoint) as edge:
        held = Tenant(edge)
        attach = Attach(incarnation=held.incarnation, top_k=2**31 - 1, values="fp32")
        edge.order(attach)
        reply, frames = held.step([item()], ids(1), b"")
        assert isinstance(reply, Scored)
        assert decode_topk(frames[0], 1, 2**31 - 1, VOCAB).k == VOCAB
