"""Check a decoder: run passes of every kind, and compare each row of the output.

In: an empty decoder (or chain of stages) with SLOTS slots and CONTEXT positions; the reference.
Out: pairs of outputs, the decoder's and the reference's. The reference computes each row from a
chain in an empty slot. A check uses no feature that another check tests, so a faulty feature fails
only its own check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder, Output, Pass
from pilotfish.lab.selftest.check_result import ComparedRows, Rows

SLOTS = 4
CONTEXT = 640  # positions of a slot; a GPU's cache grows twice before a slot is full
TEXT = np.random.default_rng(20).integers(0, 256, CONTEXT)
OTHER = np.random.default_rng(21).integers(0, 256, CONTEXT)
# Parent of each node (-1 for a root), in two trees with siblings, cousins and a path of six nodes.
PARENTS = np.array([-1, -1, 0, 0, 1, 2, 2, 5, 3, 7, 4, 9])

Tokens = NDArray[np.int64]


class PassRunner(Protocol):
    """What can run passes: a `Decoder` or a `StageChain`."""

    def forward(self, passes: Sequence[Pass]) -> Sequence[Output]:
        """Append each pass to its slot, and return its output."""
        ...

    def rollback(self, slot: int, length: int) -> None:
        """Drop all tokens of a slot after the first `length`."""
        ...

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Drop all nodes of the slot's last tree that are not on `path`."""
        ...


class PlainReference:
    """The reference: an artifact on the CPU that reads only chains, each in an empty slot.

    Attributes:
        trees: whether the model reads trees. A model with recurrent states does not; then the
            checks of other features use chains.
    """

    def __init__(self, artifact: Artifact, threads: int | None = None) -> None:
        self.trees = artifact.manifest.states is None
        self._decoder = Decoder(artifact, context=CONTEXT, threads=threads, provider="cpu")

    def answer_after(self, tokens: Any, rows: int | None = None) -> Output:
        """Read a chain into an empty slot; return the output at its last `rows` tokens (or all)."""
        decoder = self._decoder
        decoder.rollback(0, 0)
        return decoder.forward([Pass(0, np.asarray(tokens, np.int64), rows)])[0]

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


def logits(runner: PassRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Read one chain into an empty slot; compare logits and hidden states of every token."""
    got, wanted = runner.forward([Pass(0, TEXT[:48])])[0], plain.answer_after(TEXT[:48])
    yield ComparedRows("logits of 48 tokens", got.logits, wanted.logits)
    yield ComparedRows("hidden states of 48 tokens", got.hidden, wanted.hidden)


def chain(runner: PassRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Read a chain in several passes, of few and of many tokens."""
    end = 0
    for size in (1, 1, 2, 5, 16, 17, 1, 70):
        start, end = end, end + size
        got = runner.forward([Pass(1, TEXT[start:end])])[0].logits
        yield ComparedRows(
            f"tokens {start} to {end - 1}", got, plain.answer_after(TEXT[:end], size).logits
        )


def tree(runner: PassRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Read a tree after a trunk (a chain), then more nodes of it.

    TreeError if a model reads no trees.
    """
    trunk, nodes = TEXT[:20], OTHER[: len(PARENTS)]
    runner.forward([Pass(1, trunk, 0)])
    for start, end in ((0, 7), (7, len(PARENTS))):
        got = runner.forward([Pass(1, nodes[start:end], parents=PARENTS[:end])])[0].logits
        yield ComparedRows(
            f"nodes {start} to {end - 1}", got, plain.answer_nodes(trunk, nodes, start, end)
        )


def rollback(runner: PassRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Roll back to the first tokens and read another text, twice."""
    runner.forward([Pass(2, TEXT[:30], 0)])
    tokens = TEXT[:30]
    for length, following in ((12, OTHER[:9]), (20, OTHER[30:33])):
        runner.rollback(2, length)
        tokens = np.concatenate([tokens[:length], following])
        got = runner.forward([Pass(2, following)])[0].logits
        wanted = plain.answer_after(tokens, len(following)).logits
        yield ComparedRows(f"after the first {length} tokens", got, wanted)


def keep(runner: PassRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Read a tree and keep one path of it; then read a chain and keep a part of it."""
    trunk, nodes = TEXT[:20], OTHER[: len(PARENTS)]
    runner.forward([Pass(1, trunk, 0)])
    runner.forward([Pass(1, nodes, 0, PARENTS if plain.trees else None)])
    path = path_to(len(PARENTS) - 1) if plain.trees else list(range(5))
    runner.keep_path(1, path)
    tokens = [*trunk, *nodes[path]]
    got = runner.forward([Pass(1, TEXT[40:45])])[0].logits
    yield ComparedRows(
        "after the kept path of a tree", got, plain.answer_after([*tokens, *TEXT[40:45]], 5).logits
    )
    runner.keep_path(1, [0, 1])
    tokens += [*TEXT[40:42], *OTHER[50:53]]
    got = runner.forward([Pass(1, OTHER[50:53])])[0].logits
    yield ComparedRows("after the kept part of a chain", got, plain.answer_after(tokens, 3).logits)


def slots(runner: PassRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Read sequences of different lengths in one pass: chains, then a tree and a chain."""
    texts = [np.roll(TEXT, 31 * slot) for slot in range(SLOTS)]
    lengths = [3, 90, 0, 17]
    runner.forward([Pass(s, texts[s][: lengths[s]], 0) for s in range(SLOTS) if lengths[s]])
    for sizes in ((1, 1, 1, 1), (2, 0, 5, 1), (4, 4, 0, 0), (1, 3, 8, 2)):
        busy = [slot for slot in range(SLOTS) if sizes[slot]]
        passes = [Pass(s, texts[s][lengths[s] : lengths[s] + sizes[s]]) for s in busy]
        for item, answer in zip(passes, runner.forward(passes), strict=True):
            lengths[item.slot] += len(item.tokens)
            wanted = plain.answer_after(texts[item.slot][: lengths[item.slot]], len(item.tokens))
            yield ComparedRows(f"slot {item.slot} of {sizes}", answer.logits, wanted.logits)
    if not plain.trees:
        return
    nodes, trunk = OTHER[:7], texts[0][: lengths[0]]
    passes = [Pass(0, nodes, parents=PARENTS[:7]), Pass(3, OTHER[:2])]
    grown, other = runner.forward(passes)
    yield ComparedRows(
        "slot 0, which reads a tree", grown.logits, plain.answer_nodes(trunk, nodes, 0, 7)
    )
    wanted = plain.answer_after([*texts[3][: lengths[3]], *OTHER[:2]], 2)
    yield ComparedRows("slot 3, in the same pass as slot 0's tree", other.logits, wanted.logits)


def growth(runner: PassRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Read a text so long that the keys and values must move into larger buffers."""
    runner.forward([Pass(0, OTHER[:40], 0)])
    for end in range(100, 601, 100):
        got = runner.forward([Pass(1, TEXT[end - 100 : end], 2)])[0].logits
        if end % 200 == 0:
            yield ComparedRows(f"after {end} tokens", got, plain.answer_after(TEXT[:end], 2).logits)
    got = runner.forward([Pass(0, OTHER[40:43])])[0].logits
    yield ComparedRows(
        "the other slot, with a short text", got, plain.answer_after(OTHER[:43], 3).logits
    )


CHECKS: dict[str, Callable[[PassRunner, PlainReference], Iterator[ComparedRows]]] = {
    check.__name__: check for check in (logits, chain, tree, rollback, keep, slots, growth)
}


def empty_slots(runner: PassRunner) -> None:
    """Empty all slots."""
    for slot in range(SLOTS):
        runner.rollback(slot, 0)
