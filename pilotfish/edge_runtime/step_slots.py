"""Run steps on the slots of a model or a stage, on a node or as stage 1 on the edge.

In:  the step's items, their tokens or states, and the parents of all trees.
Out: outputs of the items.

An item runs in one pass, or in several passes if its slot lacks many tokens. Its ``start`` is the
position in the slot from which it continues. Contradictions raise `MalformedError`.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError, TooLargeError
from pilotfish.engines.language_model import LanguageModel, Output
from pilotfish.engines.passes import Pass
from pilotfish.engines.slots import Slots
from pilotfish.engines.stage import Stage
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.messages import Buffer
from pilotfish.wire.nodes import Item

CHUNK = 128  # upper limit of a slot's tokens in one pass

States = NDArray[np.float32]


class StepSlots:
    """Converts a step's items to passes of a decoder or a stage, and rolls back its slots."""

    def __init__(self, engine: Slots | LanguageModel) -> None:
        self._engine = engine
        self.forget()

    def forget(self) -> None:
        """Empty all slots."""
        for slot in range(self._engine.slots):
            self._engine.rollback(slot, 0)
        # number of tokens before the tree in each slot's last pass
        self._chains = [0] * self._engine.slots

    def passes(
        self, items: Sequence[Item], tokens: NDArray[np.int64], parents: Buffer
    ) -> list[list[Pass]]:
        """Roll each slot back to its item's start; return the passes of each item.

        tokens: i64 [Σ size]. Raises `MalformedError` if items, frames and the slots' content
        contradict each other, `TooLargeError` if a slot has too few positions.
        """
        trees = read_numbers(parents, "<i2")
        check_items(items, len(tokens), trees, self._engine.slots, self._engine.context)
        passes = []
        begin = tree_begin = 0
        for item in items:
            end, tree_end = begin + item.size, tree_begin + item.nodes
            try:
                self._roll_back(item)
            except ValueError as error:
                raise MalformedError(f"A step does not fit: {error}.") from error
            passes.append(self._split(item, tokens[begin:end], trees[tree_begin:tree_end]))
            begin, tree_begin = end, tree_end
        return passes

    def _split(self, item: Item, tokens: NDArray[np.int64], tree: NDArray[np.int64]) -> list[Pass]:
        """Split an item into passes of at most `CHUNK` tokens."""
        # the tree's pass has a short chain, since a decoder treats the chain as a part of the tree,
        # at quadratic cost
        far = item.nodes and item.size > CHUNK
        head = item.size - max(item.rows, item.nodes + 1) if far else 0
        chain = item.size - item.nodes - head
        self._chains[item.slot] = chain
        parents = np.concatenate([np.arange(-1, chain - 1), tree + chain]) if item.nodes else None
        passes = [Pass(item.slot, tokens[:head], 0)] if head else []
        passes.append(Pass(item.slot, tokens[head:], item.rows, parents))
        return [piece for each in passes for piece in each.pieces(CHUNK)]

    def _roll_back(self, item: Item) -> None:
        if item.kept_nodes is not None:
            chain = self._chains[item.slot]
            path = [*range(chain), *(chain + node for node in item.kept_nodes)]
            self._engine.keep_path(item.slot, path)
        self._engine.rollback(item.slot, item.start)


class ModelSlots:
    """Runs items on a decoder.

    feed_watchdog: function to call between the passes of a long item.
    """

    def __init__(
        self, decoder: LanguageModel, feed_watchdog: Callable[[], None] = lambda: None
    ) -> None:
        self.decoder = decoder
        self._feed_watchdog = feed_watchdog
        self._slots = StepSlots(decoder)

    def forget(self) -> None:
        """Empty all slots."""
        self._slots.forget()

    def run(
        self, items: Sequence[Item], tokens: NDArray[np.int64], parents: Buffer
    ) -> list[Output]:
        """Run the items; return an output for each item, valid until the next call.

        tokens: i64 [Σ size]. Raises `MalformedError` for contradictions, `CapacityError` if a slot
        has too few positions.
        """
        passes = self._slots.passes(items, tokens, parents)
        try:
            if all(len(each) == 1 for each in passes):
                return self.decoder.forward([single for (single,) in passes])
            return [_concatenate([self._piece(piece) for piece in each]) for each in passes]
        except ValueError as error:
            raise MalformedError(f"A step does not fit: {error}.") from error

    def _piece(self, piece: Pass) -> Output:
        """Run one pass of an item; return a copy of the output."""
        self._feed_watchdog()
        (output,) = self.decoder.forward([piece])
        return Output(output.logits.copy(), output.hidden.copy())


def _concatenate(pieces: Sequence[Output]) -> Output:
    return Output(
        np.concatenate([piece.logits for piece in pieces]),
        np.concatenate([piece.hidden for piece in pieces]),
    )


class StageSlots:
    """Runs items on a stage.

    feed_watchdog: function to call between the passes of a long item.
    """

    def __init__(self, stage: Stage, feed_watchdog: Callable[[], None] = lambda: None) -> None:
        self.stage = stage
        self._feed_watchdog = feed_watchdog
        self._slots = StepSlots(stage)

    def forget(self) -> None:
        """Empty all slots."""
        self._slots.forget()

    def run(
        self, items: Sequence[Item], states: "States | NDArray[np.int64]", parents: Buffer
    ) -> States:
        """Run the items; return states f32 [Σ size, width], valid until the next call.

        The last stage returns hidden states f32 [Σ rows, answer_width] instead. states: input f32
        [Σ size, width]; of the first stage, tokens i64 [Σ size]. Raises `MalformedError` for
        contradictions, `CapacityError` if a slot has too few positions.
        """
        tokens = states if self.stage.first else np.zeros(len(states), np.int64)
        passes = self._slots.passes(items, tokens.astype(np.int64, copy=False), parents)
        inputs = None if self.stage.first else states.astype(np.float32, copy=False)
        try:
            if all(len(each) == 1 for each in passes):
                return self.stage.forward([single for (single,) in passes], inputs)
            outputs, end = [], 0
            for each in passes:
                for piece in each:
                    self._feed_watchdog()
                    start, end = end, end + len(piece.tokens)
                    output = self.stage.forward(
                        [piece], None if inputs is None else inputs[start:end]
                    )
                    outputs.append(output.copy())
            return np.concatenate(outputs)
        except ValueError as error:
            raise MalformedError(f"A step does not fit: {error}.") from error


def read_numbers(frame: Buffer, dtype: str) -> NDArray[np.int64]:
    """Read a frame of numbers of type ``dtype``; return them as i64 [n]."""
    if len(frame) % np.dtype(dtype).itemsize:
        raise MalformedError(
            f"A frame of {len(frame)} bytes does not hold whole numbers of type {dtype}."
        )
    return np.frombuffer(frame, dtype).astype(np.int64)


def check_items(
    items: Sequence[Item], total: int, trees: NDArray[np.int64], slots: int, context: int
) -> None:
    """Raise `MalformedError` or `TooLargeError` if the items of a step are invalid.

    total: number of tokens that came with the step. trees: parents of all trees.
    """
    if sum(item.size for item in items) != total:
        raise MalformedError(
            f"The items of a step do not add up to the {total} tokens that were sent."
        )
    if sum(item.nodes for item in items) != len(trees) or (trees < -1).any():
        raise MalformedError("The parents in a step do not belong to its trees.")
    if len({item.slot for item in items}) < len(items):
        raise MalformedError("A step has two items for one slot.")
    for item in items:
        if item.slot >= slots:
            raise MalformedError(f"There is no slot {item.slot}: this node has {slots}.")
        if item.rows > item.size or item.nodes > item.size:
            raise MalformedError(
                "An item of a step has more output rows or tree nodes than tokens."
            )
        if (end := item.start + item.size) > context:
            raise TooLargeError(
                f"{end} tokens do not fit into this node's slots, which have {context} positions."
            )
        try:
            Sampling(temperature=item.temperature)
        except ValueError as error:
            raise MalformedError(f"A step is not valid: {error}.") from error
