"""Recurrent states of layers that have no keys and values: convolutions, linear attention.

A recurrent state cannot forget a token: a lower length does not roll it back. So each slot has

    a trail: the inputs of its last tokens at each of these layers, f32 [layers, TRAIL, width]
    snapshots: the states at some positions, dense near the end, sparse further back

A run starts from the last snapshot at or before the slot's end. The graph reads the inputs of the
tokens after the snapshot from the trail, adds them to the state, and then processes the new tokens
(export.recurrent). So a rollback within the trail costs nothing at once, and little in the next
run. After a longer rollback the slot continues from an older snapshot, or from the start, and
`Slots` runs the tokens after it again, which is slow. The state of a convolution consists of its
last inputs, so it needs no snapshot within the trail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.manifest import RecurrentStates

WINDOW = 16  # maximum tokens of a rollback after which no other token has to run again
# length (tokens) of the trail; longer than WINDOW, because not every position has a snapshot
TRAIL = 64
SNAPSHOTS = 8  # number of snapshots per slot

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Snapshot:
    """A slot's states after its first `position` tokens.

    Attributes:
        inputs: f32 [layers, taps − 1, width], the convolutions' inputs of the last taps − 1 tokens.
        state: f32 [layers, heads, key_dim, value_dim]; None if layers have only convolutions.
    """

    position: int
    inputs: Floats
    state: Floats | None


@dataclass(frozen=True)
class StateStep:
    """The arrays that a run reads and writes; layers in the order of `RecurrentStates.layers`.

    Attributes:
        earlier: f32 [layers, M, width], read: inputs of the tokens before the run that are not yet
        in the state, and of the taps − 1 tokens before these.
        inputs: f32 [layers, T, width], written: inputs of the run's T tokens.
        past: f32 [layers, heads, key_dim, value_dim], read: state of the snapshot. `past`,
            `settled` and `present` are None if layers have only convolutions.
        settled: f32 [layers, heads, key_dim, value_dim], written: state just before the run's
            tokens.
        present: f32 [layers, heads, key_dim, value_dim], written: state after the run's tokens.
    """

    earlier: Floats
    inputs: Floats
    past: Floats | None = None
    settled: Floats | None = None
    present: Floats | None = None


class StateCache:
    """The trails and snapshots of all slots; states are allocated on use, in bounded number.

    Args:
        layout: shape of the layers' states.
        slots: number of sequences.
    """

    def __init__(self, layout: RecurrentStates, slots: int) -> None:
        self.layout = layout
        self._slots = [_SlotStates(layout) for _ in range(slots)]

    def resume(self, slot: int, length: int) -> int:
        """Cut a slot to `length` tokens; return the length from which the next run can start.

        The result is less than `length` after a rollback beyond the trail: the caller must run the
        tokens between the two lengths again.
        """
        return self._slots[slot].resume(length)

    def step(self, slot: int, count: int) -> StateStep:
        """Prepare the arrays for a run of `count` tokens from the length returned by `resume`."""
        return self._slots[slot].step(count)

    def take_in(self, slot: int, step: StateStep) -> None:
        """Store the arrays that a run has written."""
        self._slots[slot].take_in(step)


class _SlotStates:
    """The trail and the snapshots of one slot.

    The trail holds the inputs at positions low … high − 1; inputs at negative positions are zeros.
    """

    def __init__(self, layout: RecurrentStates) -> None:
        layers, self._back = len(layout.layers), layout.taps - 1
        shape = (layers, layout.heads, layout.key_dim, layout.value_dim)
        self._shape = shape if layout.heads else None
        self._trail = np.zeros((layers, TRAIL, layout.width), np.float32)
        state = np.zeros(shape, np.float32) if layout.heads else None
        self._empty = Snapshot(0, np.zeros((layers, self._back, layout.width), np.float32), state)
        self._snapshots: list[Snapshot] = []
        self._spare: list[Floats] = []
        self._low, self._high = -self._back, 0

    def resume(self, length: int) -> int:
        while self._snapshots and self._snapshots[-1].position > length:
            self._recycle(self._snapshots.pop().state)
        self._high = min(self._high, length)
        if self._start - self._back < self._low:
            last = self._last
            self._low = last.position - self._back
            self._write(self._low, last.inputs)
        return self._high

    def step(self, count: int) -> StateStep:
        earlier = self._inputs(self._start - self._back, self._high)
        inputs = np.empty((len(earlier), count, earlier.shape[2]), np.float32)
        if self._shape is None:
            return StateStep(earlier, inputs)
        return StateStep(earlier, inputs, self._last.state, self._new_state(), self._new_state())

    def take_in(self, step: StateStep) -> None:
        # the run has computed the state at `_high`, which had no snapshot
        if self._start < self._high:
            inputs = self._inputs(self._high - self._back, self._high)
            self._snapshots.append(Snapshot(self._high, inputs, step.settled))
        else:
            self._recycle(step.settled)
        end = self._high + step.inputs.shape[1]
        tail = step.inputs[:, -TRAIL:]
        self._write(end - tail.shape[1], tail)
        self._low = max(self._low, end - TRAIL)
        self._snapshots.append(Snapshot(end, self._inputs(end - self._back, end), step.present))
        while len(self._snapshots) > SNAPSHOTS:
            positions = [snapshot.position for snapshot in self._snapshots]
            place = dispensable(positions, TRAIL - WINDOW - self._back)
            self._recycle(self._snapshots.pop(place).state)

    @property
    def _last(self) -> Snapshot:
        return self._snapshots[-1] if self._snapshots else self._empty

    @property
    def _start(self) -> int:
        """The position where a run starts: the last snapshot's, or the end for convolutions."""
        return self._high if self._shape is None else self._last.position

    def _inputs(self, start: int, end: int) -> Floats:
        """Copy the inputs of positions start … end − 1; f32 [layers, end − start, width]."""
        # `take` returns a contiguous array; indexing by an array may not.
        return self._trail.take([position % TRAIL for position in range(start, end)], axis=1)

    def _write(self, start: int, inputs: Floats) -> None:
        """Write inputs at the positions from `start` on, and end the trail after them."""
        self._high = start + inputs.shape[1]
        self._trail[:, [position % TRAIL for position in range(start, self._high)]] = inputs

    def _new_state(self) -> Floats:
        assert self._shape is not None
        return self._spare.pop() if self._spare else np.empty(self._shape, np.float32)

    def _recycle(self, state: Floats | None) -> None:
        if state is not None:
            self._spare.append(state)


def dispensable(positions: Sequence[int], reach: int) -> int:
    """Return the index of the position to remove so that the smallest relative gap results.

    positions: ascending positions of snapshots; the last is never removed. A gap is relative to its
    distance from the end, so gaps grow about geometrically. Gaps in which a rollback of at most
    WINDOW tokens may end do not grow beyond `reach` tokens.
    """
    end, before = positions[-1], [0, *positions]
    gaps = [after - ahead for ahead, after in zip(before, positions[1:], strict=False)]
    far = [
        gap > reach and after > end - WINDOW for gap, after in zip(gaps, positions[1:], strict=True)
    ]
    return min(range(len(gaps)), key=lambda i: (far[i], gaps[i] / (end - positions[i])))
