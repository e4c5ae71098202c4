"""Steps to nodes: the edge's half makes them from works, the node's half reads the works back.

In:  works, with whole sequences; and what the node's slots hold.
Out: items, and the tokens that the node's chains lack; at the node, the same works.

Law: a node runs its steps in order, so its contents after a step are known when the step is sent.
The edge has a record of them, the same `SlotContents` as in the node's engine. An item that starts
at 0 empties its slot, so the two records agree again after the edge has emptied its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError, TokenOutOfRangeError, TooLargeError
from pilotfish.engines.contents import Held, SlotContents
from pilotfish.engines.engine import Engine, StageEngine, Work
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.messages import Buffer
from pilotfish.wire.nodes import Item


class WorkFrames(NamedTuple):
    """Works in the form in which a step carries them.

    tokens: u32, path and new tokens of all items. parents: i16, of all trees' nodes.
    """

    items: Sequence[Item]
    tokens: Buffer
    parents: Buffer

    @property
    def size(self) -> int:
        """Number of new tokens, which the node computes."""
        return sum(item.size for item in self.items)


# The edge's half


def encode_works(works: Sequence[Work], contents: SlotContents) -> WorkFrames:
    """Make the items of works, and their frames, for a node whose slots have these contents."""
    items, tokens = [], []
    for work in works:
        held = _find(contents, work)
        assert not held.grown, "a tree has an output row for each node"
        items.append(
            Item(
                slot=work.slot,
                start=held.chain,
                size=len(work.tokens) - held.tokens,
                rows=work.rows,
                nodes=work.nodes,
                path=len(held.path),
                temperature=work.temperature,
            )
        )
        tokens.append(work.tokens[held.chain :].astype("<u4"))
    trees = [work.parents.astype("<i2") for work in works if work.parents is not None]
    parents = np.concatenate(trees).tobytes() if trees else b""
    return WorkFrames(items, np.concatenate(tokens).tobytes(), parents)


def record_works(works: Sequence[Work], contents: SlotContents) -> None:
    """Record in the edge's copy of a node's contents that these works were sent."""
    for work in works:
        held = _find(contents, work)
        contents.keep(work.slot, held)
        contents.append(work.slot, work.tokens[held.tokens :], work.parents)


def _find(contents: SlotContents, work: Work) -> Held:
    return contents.find(work.slot, work.tokens, work.rows, work.parents)


# The node's half


def decode_works(frames: WorkFrames, engine: Engine | StageEngine, vocab: int) -> list[Work]:
    """Rebuild the works of a step from an engine's contents and the tokens that came.

    vocab: number of valid token ids. Of each item, the engine will compute exactly the last
    ``size`` tokens that came.

    Raises:
        MalformedError: if items, frames and contents contradict each other.
        TokenOutOfRangeError: if a token id is not valid.
        TooLargeError: if a slot has too few positions.
    """
    tokens = _read_numbers(frames.tokens, "<u4")
    trees = _read_numbers(frames.parents, "<i2").astype(np.int64)
    check_items(frames.items, len(tokens), trees, engine.contents)
    if len(tokens) and int(tokens.max()) >= vocab:
        raise TokenOutOfRangeError(f"This model has no token {tokens.max()}.")
    works = []
    end = tree_end = 0
    for item in frames.items:
        if item.start == 0:
            engine.clear(item.slot)
        begin, end = end, end + item.path + item.size
        tree_begin, tree_end = tree_end, tree_end + item.nodes
        parents = trees[tree_begin:tree_end] if item.nodes else None
        works.append(_decode_work(item, tokens[begin:end], parents, engine.contents))
    return works


def _decode_work(
    item: Item,
    tokens: NDArray[np.uint32],
    parents: NDArray[np.int64] | None,
    contents: SlotContents,
) -> Work:
    chain = contents.chain(item.slot)[: item.start]
    work = Work(item.slot, np.concatenate([chain, tokens]), item.rows, parents, item.temperature)
    held = _find(contents, work)
    if (held.chain, len(held.path), held.grown) != (item.start, item.path, 0):
        raise MalformedError(
            f"A step does not fit: slot {item.slot} holds other tokens than the step continues."
        )
    return work


def check_items(
    items: Sequence[Item], total: int, trees: NDArray[np.int64], contents: SlotContents
) -> None:
    """Raise `MalformedError` or `TooLargeError` if the items of a step are invalid.

    total: number of tokens that came with the step. trees: parents of all trees.
    """
    if sum(item.path + item.size for item in items) != total:
        raise MalformedError(
            f"The items of a step do not add up to the {total} tokens that were sent."
        )
    if sum(item.nodes for item in items) != len(trees) or (trees < -1).any():
        raise MalformedError("The parents in a step do not belong to its trees.")
    if len({item.slot for item in items}) < len(items):
        raise MalformedError("A step has two items for one slot.")
    for item in items:
        if item.slot >= contents.slots:
            raise MalformedError(f"There is no slot {item.slot}: this node has {contents.slots}.")
        if item.rows > item.size or item.nodes > item.size:
            raise MalformedError(
                "An item of a step has more output rows or tree nodes than tokens."
            )
        if (end := item.start + item.path + item.size) > contents.context:
            raise TooLargeError(
                f"{end} tokens do not fit into this node's slots, which have {contents.context} "
                "positions."
            )
        try:
            Sampling(temperature=item.temperature)
        except ValueError as error:
            raise MalformedError(f"A step is not valid: {error}.") from error


def _read_numbers(frame: Buffer, dtype: str) -> NDArray[Any]:
    """Read a frame of numbers [n] of type ``dtype``."""
    if len(frame) % np.dtype(dtype).itemsize:
        raise MalformedError(
            f"A frame of {len(frame)} bytes does not hold whole numbers of type {dtype}."
        )
    return np.frombuffer(frame, dtype)


@contextmanager
def engine_refusals() -> Iterator[None]:
    """Turn an engine's refusal of malformed works or states into `MalformedError`."""
    try:
        yield
    except ValueError as error:
        raise MalformedError(f"A step does not fit: {error}.") from error
