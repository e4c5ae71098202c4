"""Steps that contradict themselves, or what a stage's slots hold: refused by name."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError, PilotfishError
from pilotfish.edge_runtime.client_errors import is_client_error
from pilotfish.edge_runtime.node.stage import StageWork
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import StageEngine
from pilotfish.engines.stage import Stage
from pilotfish.wire.messages import encode
from pilotfish.wire.nodes import Attach, Item, Step, decode_order
from tests.conftest import VOCAB
from tests.support.pipelines import cut, made_pair
from tests.support.raw_edge import ids, item, parents

SLOTS, CONTEXT = 2, 64
TEXT = np.random.default_rng(8).integers(0, VOCAB - 3, 40).astype(np.uint32)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("stage")
    stages = cut(made_pair(folder, CONTEXT).target, folder / "cut", 2)
    return Artifact.open(stages / "stage-2", stage=True)


@pytest.fixture
def work(artifact: Artifact) -> StageWork:
    """The last stage, attached."""
    result = StageWork(
        StageEngine(Stage(artifact, slots=SLOTS, context=CONTEXT, threads=1)), keys=None
    )
    attach(result)
    return result


def attach(work: StageWork) -> None:
    work.attach(Attach(incarnation=secrets.token_bytes(16), states="fp32"))


def states(work: StageWork, tokens: Sequence[int]) -> bytes:
    """The states that the stage before would send: here a function of the token."""
    rows = [
        np.random.default_rng(token).standard_normal(work.ready.hidden_size) for token in tokens
    ]
    return np.array(rows, "<f4").tobytes()


def run(work: StageWork, items: Sequence[Item], *frames: bytes) -> Any:
    step = Step(incarnation=b"i" * 16, number=1, items=list(items))
    return work.run_step(step, frames)


def answer(work: StageWork, sent: Item, tokens: Sequence[int], *tree: int) -> NDArray[np.float32]:
    """Hidden states [rows, d] of a step that fits."""
    new = tokens[sent.path :]
    (frame,) = run(work, [sent], ids(*tokens), parents(*tree), states(work, new))
    return np.frombuffer(frame, "<f4").reshape(sent.rows, work.ready.hidden_size)


def test_a_stage_finds_what_it_holds_as_the_edge_does(work: StageWork, artifact: Artifact) -> None:
    """Of a tree the path goes on; the hidden states are those of a fresh computation."""
    text = TEXT.tolist()
    answer(work, item(size=20, rows=1), text[:20])
    tree = [text[19], 1, 2, 3, 4]
    answer(work, item(start=19, size=5, rows=5, nodes=4), tree, -1, -1, 0, 2)
    sequence = [*text[:20], 1, 3, 4, 9, 8]
    got = answer(work, item(start=20, path=3, size=2, rows=2), sequence[20:])
    attach(work)
    wanted = answer(work, item(size=len(sequence), rows=2), sequence)
    np.testing.assert_allclose(got, wanted, atol=1e-5)


CHAIN = (item(size=4, rows=0), (1, 2, 3, 4), ())
TREE = (item(size=4, rows=4, nodes=3), (1, 2, 3, 4), (-1, 0, -1))
CONTRADICTIONS: dict[str, tuple[Any, Item, Sequence[int], Sequence[int]]] = {
    "beyond an empty slot": (None, item(start=1), (1,), ()),
    "beyond what a slot holds": (CHAIN, item(start=5), (1,), ()),
    "no such slot": (None, item(slot=SLOTS), (1,), ()),
    "a path of a chain": (CHAIN, item(start=4, path=1), (5, 1), ()),
    "a path of other tokens": (TREE, item(start=1, path=2), (2, 4, 1), ()),
    "new tokens that a chain holds": (CHAIN, item(start=1, size=3), (2, 3, 9), ()),
    "new tokens that a path holds": (TREE, item(start=1, size=2), (2, 9), ()),
    "an id beyond": (None, item(), (VOCAB,), ()),
    "an id far beyond": (None, item(), (2**32 - 1,), ()),
    "an id beyond in a path": (TREE, item(start=1, path=1), (VOCAB, 1), ()),
    "more tokens than came": (None, item(size=2), (1,), ()),
    "more nodes than tokens": (None, item(nodes=2), (1,), (-1, 0)),
    "a later parent": (None, item(size=3, rows=3, nodes=2), (1, 2, 3), (1, -1)),
    "a parent before the tree": (None, item(size=3, rows=2, nodes=1), (1, 2, 3), (-2,)),
    "beyond the context": (None, item(size=CONTEXT + 1), (1,) * (CONTEXT + 1), ()),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_step_that_contradicts_itself_or_the_slots(work: StageWork, what: str) -> None:
    before, sent, tokens, tree = CONTRADICTIONS[what]
    if before is not None:
        answer(work, before[0], before[1], *before[2])
    with pytest.raises(PilotfishError) as raised:
        answer(work, sent, tokens, *tree)
    assert is_client_error(raised.value), raised.value


@pytest.mark.parametrize(
    "frames",
    [
        (),
        (ids(5),),
        (ids(5), b""),
        (ids(5), b"", b""),
        (ids(5), b"", b"x"),
        (ids(5), b"", None, b""),
        (b"", b"", None),
        (None, b"", ids(5)),
        (ids(5)[:3], b"", None),
        (ids(5, 6), b"", None),
        (ids(5), parents(-1), None),
        (ids(5), b"", np.float32("nan")),
        (ids(5), b"", np.float32("inf")),
        (ids(5), b"", np.float32(3e38)),
    ],
    ids=lambda frames: f"{len(frames)} frames: {frames!r}"[:48],
)  # fmt: skip
def test_frames_that_are_no_step(work: StageWork, frames: Sequence[Any]) -> None:
    """None: valid states; a number: states that are all this number."""
    width = work.ready.hidden_size
    sent = [
        states(work, [5]) if frame is None
        else np.full(width, frame, "<f4").tobytes() if isinstance(frame, np.float32)
        else frame
        for frame in frames
    ]  # fmt: skip
    wanted = answer(work, item(), [5]).copy()
    attach(work)
    with pytest.raises(MalformedError):
        run(work, [item()], *sent)
    attach(work)
    np.testing.assert_array_equal(answer(work, item(), [5]), wanted)


def test_an_item_of_version_1_is_malformed() -> None:
    """It had node numbers, or nil, in the place of the path's length."""
    step = msgspec.msgpack.decode(encode(Step(incarnation=b"i" * 16, number=1, items=[item()])))
    for numbers in (None, [], [0, 2]):
        step[3][0][5] = numbers
        with pytest.raises(MalformedError):
            decode_order(msgspec.msgpack.encode(step))
