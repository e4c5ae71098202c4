"""The checks of a decoder: passes of every kind, and the expected value of each of their rows.

In: an empty decoder (or chain of stages) with SLOTS slots and CONTEXT positions; and the reference.
Out: answers together with those of the reference, which computes each as one chain from an empty
slot. No check depends on a feature that another one checks, so a fault shows in its own check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder, Output, Pass
from pilotfish.selftest.check_result import ComparedRows, Rows

SLOTS = 4
CONTEXT = 640  # a GPU's cache grows twice before this is full
TEXT = np.random.default_rng(20).integers(0, 256, CONTEXT)
OTHER = np.random.default_rng(21).integers(0, 256, CONTEXT)
# Two roots; siblings and cousins; a path of five.
PARENTS = np.array([-1, -1, 0, 0, 1, 2, 2, 5, 3, 7, 4, 9])

Tokens = NDArray[np.int64]


class PassRunner(Protocol):
    """Runs passes: a `Decoder` or a `StageChain`."""

    def forward(self, passes: Sequence[Pass]) -> Sequence[Output]:
        """Append each pass to its slot and answer it."""
        ...

    def rollback(self, slot: int, length: int) -> None:
        """Drop all but the first `length` tokens of a slot."""
        ...

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Keep only the nodes at `path` of the last tree."""
        ...


class PlainReference:
    """The reference: an artifact on the CPU, used in the plainest way.

    Attributes:
        trees: whether the model reads trees. For a model with states, checks of other features use
            chains instead.
    """

    def __init__(self, artifact: Artifact, threads: int | None = None) -> None:
        self.trees = artifact.manifest.states is None
        self._decoder = Decoder(artifact, context=CONTEXT, threads=threads, provider="cpu")

    def answer_after(self, tokens: Any, rows: int | None = None) -> Output:
        """Answer the last `rows` tokens (None: all) of a chain from an empty slot."""
        decoder = self._decoder
        decoder.rollback(0, 0)
        return decoder.forward([Pass(0, np.asarray(tokens, np.int64), rows)])[0]

    def answer_nodes(self, trunk: Tokens, nodes: Tokens, start: int, end: int) -> Rows:
        """Answer nodes start … end − 1 of the tree PARENTS, each by its own path."""
        paths = [nodes[path_to(index)] for index in range(start, end)]
        return np.concatenate(
            [self.answer_after([*trunk, *path], 1).logits.copy() for path in paths]
        )


def path_to(node: int) -> list[int]:
    """Return the nodes from a root to this one."""
    path = [node]
    while PARENTS[path[0]] >= 0:
        path.insert(0, int(PARENTS[path[0]]))
    return path


def logits(runner: PassRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """One chain into an empty slot: logits and hidden states of every token."""
    got, wanted = runner.forward([Pass(0, TEXT[:48])])[0], plain.answer_after(TEXT[:48])
    yield ComparedRows("logits of 48 tokens", got.logits, wanted.logits)
    yield ComparedRows("hidden states of 48 tokens", got.hidden, wanted.hidden)


def chain(runner: PassRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """A text in pieces, narrow and wide."""
    end = 0
    for size in (1, 1, 2, 5, 16, 17, 1, 70):
        start, end = end, end + size
        got = runner.forward([Pass(1, TEXT[start:end])])[0].logits
        yield ComparedRows(
            f"tokens {start} to {end - 1}", got, plain.answer_after(TEXT[:end], size).logits
        )


def tree(runner: PassRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """A tree after a trunk, then the same tree grown; a model without trees raises TreeError."""
    trunk, nodes = TEXT[:20], OTHER[: len(PARENTS)]
    runner.forward([Pass(1, trunk, 0)])
    for start, end in ((0, 7), (7, len(PARENTS))):
        got = runner.forward([Pass(1, nodes[start:end], parents=PARENTS[:end])])[0].logits
        yield ComparedRows(
            f"nodes {start} to {end - 1}", got, plain.answer_nodes(trunk, nodes, start, end)
        )


def rollback(runner: PassRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Another text after a rollback to the first tokens, twice."""
    runner.forward([Pass(2, TEXT[:30], 0)])
    tokens = TEXT[:30]
    for length, following in ((12, OTHER[:9]), (20, OTHER[30:33])):
        runner.rollback(2, length)
        tokens = np.concatenate([tokens[:length], following])
        got = runner.forward([Pass(2, following)])[0].logits
        wanted = plain.answer_after(tokens, len(following)).logits
        yield ComparedRows(f"after the first {length} tokens", got, wanted)


def keep(runner: PassRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """A path of a tree is kept, then a part of a chain."""
    trunk, nodes = TEXT[:20], OTHER[: len(PARENTS)]
    runner.forward([Pass(1, trunk, 0)])
    runner.forward([Pass(1, nodes, 0, PARENTS if plain.trees else None)])
    path = path_to(len(PARENTS) - 1) if plain.trees else list(range(5))
    runner.keep_path(1, path)
    tokens = [*trunk, *nodes[path]]
    got = runner.forward([Pass(1, TEXT[40:45])])[0].logits
    yield ComparedRows("after a path", got, plain.answer_after([*tokens, *TEXT[40:45]], 5).logits)
    runner.keep_path(1, [0, 1])
    tokens += [*TEXT[40:42], *OTHER[50:53]]
    got = runner.forward([Pass(1, OTHER[50:53])])[0].logits
    yield ComparedRows("after a part of a chain", got, plain.answer_after(tokens, 3).logits)


def slots(runner: PassRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Sequences of different lengths share passes: chains, then a tree next to a chain."""
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
    yield ComparedRows("slot 0, a tree", grown.logits, plain.answer_nodes(trunk, nodes, 0, 7))
    wanted = plain.answer_after([*texts[3][: lengths[3]], *OTHER[:2]], 2)
    yield ComparedRows("slot 3 next to the tree", other.logits, wanted.logits)


def growth(runner: PassRunner, plain: PlainReference) -> Iterator[ComparedRows]:
    """Keys and values outgrow their buffers, and their content moves into longer ones."""
    runner.forward([Pass(0, OTHER[:40], 0)])
    for end in range(100, 601, 100):
        got = runner.forward([Pass(1, TEXT[end - 100 : end], 2)])[0].logits
        if end % 200 == 0:
            yield ComparedRows(f"after {end} tokens", got, plain.answer_after(TEXT[:end], 2).logits)
    got = runner.forward([Pass(0, OTHER[40:43])])[0].logits
    yield ComparedRows("the other, short slot", got, plain.answer_after(OTHER[:43], 3).logits)


CHECKS: dict[str, Callable[[PassRunner, PlainReference], Iterator[ComparedRows]]] = {
    check.__name__: check for check in (logits, chain, tree, rollback, keep, slots, growth)
}


def empty_slots(runner: PassRunner) -> None:
    """Empty all slots."""
    for slot in range(SLOTS):
        runner.rollback(slot, 0)
