"""Check an engine: run works of every kind, and compare each row of the output.

In: an empty engine (or chain of stages) with SLOTS slots and CONTEXT positions; the reference.
Out: pairs of outputs, the engine's and the reference's. The reference computes each row from a
chain in an empty slot. A check uses no feature that another check tests, so a faulty feature fails
only its own check. One exception: of a model that reads no trees, `keep` tests the same as
`rollback`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import Work, open_engine
from pilotfish.engines.language_model import Output
from pilotfish.lab.selftest.check_result import ComparedRows, Rows

SLOTS = 4
CONTEXT = 640  # positions of a slot; a GPU's cache grows twice before a slot is full
TEXT = np.random.default_rng(20).integers(0, 256, CONTEXT)
OTHER = np.random.default_rng(21).integers(0, 256, CONTEXT)
# Parent of each node (-1 for a root), in two trees with siblings, cousins and a path of six nodes.
PARENTS = np.array([-1, -1, 0, 0, 1, 2, 2, 5, 3, 7, 4, 9])

Tokens = NDArray[np.int64]


class SequenceRunner(Protocol):
    """What can be given whole sequences: an `Engine` or a `StageChain`."""

    def run(self, works: Sequence[Work]) -> Sequence[Output]:
        """Compute all works, at most one per slot; return an output for each."""
        ...

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        ...


class PlainReference:
    """The reference: an artifact on the CPU that reads only chains, each in an empty slot.

    Attributes:
        trees: whether the model reads trees. A model with recurrent states does not; then the
            checks of other features use chains.
    """

    def __init__(self, artifact: Artifact, threads: int | None = None) -> None:
        self.trees = artifact.manifest.states is None
        self._engine = open_engine(artifact, context=CONTEXT, threads=threads, provider="cpu")

    def answer_after(self, tokens: Any, rows: int) -> Output:
        """Read a chain into an empty slot; return the output at its last `rows` tokens."""
        self._engine.clear(0)
        return self._engine.run([Work(0, np.asarray(tokens, np.int64), rows)])[0]

    def answer_nodes(self, trunk: Tokens, nodes: Tokens, start: int, end: int) -> Rows:
        """Compute the output at nodes start … end − 1 of the tree PARENTS, which follows a trunk.

        Each node's path from its root is read as a chain.
        """
        paths = [nodes[path_to(index)] for index in range(start, end)]
        return np.concatenate(
            [self.answer_after([*trunk, *path], 1).logits.copy() for path in paths]
        )


def path_to(node: int) -> list[int]:
    """Return the path from the root to this node."""
    path = [node]
    while PARENTS[path[0]] >= 0:
        path.insert(0, int(PARENTS[path[0]]))
    return path


def logits(runner: SequenceRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Read one chain into an empty slot; compare logits and hidden states of every token."""
    got, wanted = runner.run([Work(0, TEXT[:48], 48)])[0], plain.answer_after(TEXT[:48], 48)
    yield ComparedRows("logits of 48 tokens", got.logits, wanted.logits)
    yield ComparedRows("hidden states of 48 tokens", got.hidden, wanted.hidden)


def chain(runner: SequenceRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Read a chain in several passes, of few and of many tokens."""
    end = 0
    for size in (1, 1, 2, 5, 16, 17, 1, 70):
        start, end = end, end + size
        got = runner.run([Work(1, TEXT[:end], size)])[0].logits
        yield ComparedRows(
            f"tokens {start} to {end - 1}", got, plain.answer_after(TEXT[:end], size).logits
        )


def tree(runner: SequenceRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Read a tree after a trunk (a chain), then more nodes of it.

    TreeError if a model reads no trees.
    """
    trunk, nodes = TEXT[:20], OTHER[: len(PARENTS)]
    runner.run([Work(1, trunk, 0)])
    for start, end in ((0, 7), (7, len(PARENTS))):
        work = Work(1, np.concatenate([trunk, nodes[:end]]), end - start, PARENTS[:end])
        got = runner.run([work])[0].logits
        yield ComparedRows(
            f"nodes {start} to {end - 1}", got, plain.answer_nodes(trunk, nodes, start, end)
        )


def rollback(runner: SequenceRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Read another text after the same first tokens, twice."""
    runner.run([Work(2, TEXT[:30], 0)])
    tokens = TEXT[:30]
    for length, following in ((12, OTHER[:9]), (20, OTHER[30:33])):
        tokens = np.concatenate([tokens[:length], following])
        got = runner.run([Work(2, tokens, len(following))])[0].logits
        wanted = plain.answer_after(tokens, len(following)).logits
        yield ComparedRows(f"after the first {length} tokens", got, wanted)


def keep(runner: SequenceRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Read a tree, and then a text that follows one path of it; twice.

    A model that reads no trees reads chains, and then a text that follows their first tokens.
    """
    tokens = TEXT[:20]
    runner.run([Work(1, tokens, 0)])
    parents = PARENTS if plain.trees else None
    for nodes, last, following in ((OTHER[:12], 11, TEXT[40:45]), (OTHER[20:32], 8, OTHER[50:53])):
        runner.run([Work(1, np.concatenate([tokens, nodes]), 0, parents)])
        path = path_to(last) if plain.trees else list(range(5))
        tokens = np.concatenate([tokens, nodes[path], following])
        got = runner.run([Work(1, tokens, len(following))])[0].logits
        wanted = plain.answer_after(tokens, len(following)).logits
        yield ComparedRows(f"after the path to node {last}", got, wanted)


def slots(runner: SequenceRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Read sequences of different lengths in one pass: chains, then a tree and a chain."""
    texts = [np.roll(TEXT, 31 * slot) for slot in range(SLOTS)]
    lengths = [3, 90, 0, 17]
    runner.run([Work(s, texts[s][: lengths[s]], 0) for s in range(SLOTS) if lengths[s]])
    for sizes in ((1, 1, 1, 1), (2, 0, 5, 1), (4, 4, 0, 0), (1, 3, 8, 2)):
        busy = [slot for slot in range(SLOTS) if sizes[slot]]
        works = [Work(s, texts[s][: lengths[s] + sizes[s]], sizes[s]) for s in busy]
        for work, answer in zip(works, runner.run(works), strict=True):
            lengths[work.slot] = len(work.tokens)
            wanted = plain.answer_after(work.tokens, work.rows)
            yield ComparedRows(f"slot {work.slot} of {sizes}", answer.logits, wanted.logits)
    if not plain.trees:
        return
    trunk, nodes = texts[0][: lengths[0]], OTHER[:7]
    chained = np.concatenate([texts[3][: lengths[3]], OTHER[:2]])
    works = [Work(0, np.concatenate([trunk, nodes]), 7, PARENTS[:7]), Work(3, chained, 2)]
    grown, other = runner.run(works)
    yield ComparedRows(
        "slot 0, which reads a tree", grown.logits, plain.answer_nodes(trunk, nodes, 0, 7)
    )
    wanted = plain.answer_after(chained, 2)
    yield ComparedRows("slot 3, in the same pass as slot 0's tree", other.logits, wanted.logits)


def growth(runner: SequenceRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Read a text so long that the keys and values must move into larger buffers."""
    runner.run([Work(0, OTHER[:40], 0)])
    for end in range(100, 601, 100):
        got = runner.run([Work(1, TEXT[:end], 2)])[0].logits
        if end % 200 == 0:
            yield ComparedRows(f"after {end} tokens", got, plain.answer_after(TEXT[:end], 2).logits)
    got = runner.run([Work(0, OTHER[:43], 3)])[0].logits
    yield ComparedRows(
        "the other slot, with a short text", got, plain.answer_after(OTHER[:43], 3).logits
    )


CHECKS: dict[str, Callable[[SequenceRunner, PlainReference], Iterator[ComparedRows]]] = {
    check.__name__: check for check in (logits, chain, tree, rollback, keep, slots, growth)
}


def empty_slots(runner: SequenceRunner) -> None:
    """Empty all slots."""
    for slot in range(SLOTS):
        runner.clear(slot)
