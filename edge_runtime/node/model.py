"""A whole model on a node: items in, the answers to the rows that they want out."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.edge_runtime.node.slots import NodeSlots
from pilotfish.engines.decoder import Decoder, Output, Pass
from pilotfish.wire.errors import MalformedError
from pilotfish.wire.messages import Buffer
from pilotfish.wire.nodes import Item


class ModelSlots:
    """A decoder, run by items; ``breathe`` is called between the passes of a long one."""

    def __init__(self, decoder: Decoder, breathe: Callable[[], None] = lambda: None) -> None:
        self.decoder = decoder
        self._breathe = breathe
        self._slots = NodeSlots(decoder)

    def forget(self) -> None:
        """Empty all slots."""
        self._slots.forget()

    def run(
        self, items: Sequence[Item], tokens: NDArray[np.int64], parents: Buffer
    ) -> list[Output]:
        """An answer for each item, good until the next call; tokens: i64 [Σ size].

        Raises `MalformedError` for what does not fit, `CapacityError` for more tokens than a slot
        has room for.
        """
        passes = self._slots.passes(items, tokens, parents)
        try:
            if all(len(each) == 1 for each in passes):
                return self.decoder.forward([one for (one,) in passes])
            return [_joined([self._piece(piece) for piece in each]) for each in passes]
        except ValueError as error:
            raise MalformedError(f"A step does not fit: {error}.") from error

    def _piece(self, piece: Pass) -> Output:
        """The answer to a part of an item, which the next forward does not overwrite."""
        self._breathe()
        (output,) = self.decoder.forward([piece])
        return Output(output.logits.copy(), output.hidden.copy())


def _joined(pieces: Sequence[Output]) -> Output:
    return Output(
        np.concatenate([piece.logits for piece in pieces]),
        np.concatenate([piece.hidden for piece in pieces]),
    )
