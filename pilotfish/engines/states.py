"""What layers keep that have a state instead of keys and values: convolutions, linear attention.

Such a state takes in a token for good: it cannot be rolled back by a number. So each slot keeps

    a trail: the inputs of its last tokens at each of these layers, f32 [layers, TRAIL, width]
    snapshots of the states at some positions, dense near the end, sparse far behind it

and a run starts from the last snapshot at or before the slot's end: the graph reads the inputs of
the tokens since then from the trail, takes them into the state, and goes on (export.recurrent). A
rollback within the trail thus costs nothing at once, and then a little of the next run. After one
beyond it the slot goes on from an older snapshot, or from the start, and the tokens behind that
are to be read again (`Slots`): slow, but right. A convolution's state is its last inputs: on the
trail it goes on anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.manifest import RecurrentStates

WINDOW = 16  # tokens that can be taken back without reading others again
TRAIL = 64  # tokens; more than a window, since snapshots are not at every position
SNAPSHOTS = 8  # of each slot

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Snapshot:
    """A slot's states behind its first `position` tokens.

    Attributes:
        inputs: f32 [layers, taps − 1, width], of the last of these tokens.
        state: f32 [layers, heads, key_dim, value_dim]; None without a delta rule.
    """

    position: int
    inputs: Floats
    state: Floats | None


@dataclass(frozen=True)
class StateStep:
    """What one run reads and writes; layers stand in the order of `RecurrentStates.layers`.

    Attributes:
        earlier: f32 [layers, M, width], inputs before the run's: those that the state lacks, and
            taps − 1 before them.
        inputs: f32 [layers, T, width], written.
        past: the snapshot's state, read; None without a delta rule, likewise the others.
        settled: f32 [layers, heads, key_dim, value_dim], written: just before the run.
        present: likewise, behind it.
    """

    earlier: Floats
    inputs: Floats
    past: Floats | None = None
    settled: Floats | None = None
    present: Floats | None = None


class StateCache:
    """Trails and snapshots of all slots. Memory is taken as they are used, and bounded.

    Args:
        kept: what the model's layers keep.
        slots: how many sequences there are.
    """

    def __init__(self, kept: RecurrentStates, slots: int) -> None:
        self.kept = kept
        self._paths = [_Path(kept) for _ in range(slots)]

    def resume(self, slot: int, length: int) -> int:
        """Cut a slot to `length` tokens; return behind how many of them it can go on.

        That is `length`, unless so many tokens were taken back that those behind the returned
        position are to be read again.
        """
        return self._paths[slot].resume(length)

    def step(self, slot: int, count: int) -> StateStep:
        """Prepare a run of `count` tokens, just behind what `resume` has returned."""
        return self._paths[slot].step(count)

    def take_in(self, slot: int, step: StateStep) -> None:
        """Take in what the run has written."""
        self._paths[slot].take_in(step)


class _Path:
    """One slot's trail and snapshots.

    The trail holds the inputs at positions low … high − 1; those at negative ones are zeros.
    """

    def __init__(self, kept: RecurrentStates) -> None:
        layers, self._back = len(kept.layers), kept.taps - 1
        shape = (layers, kept.heads, kept.key_dim, kept.value_dim)
        self._shape = shape if kept.heads else None
        self._trail = np.zeros((layers, TRAIL, kept.width), np.float32)
        state = np.zeros(shape, np.float32) if kept.heads else None
        self._empty = Snapshot(0, np.zeros((layers, self._back, kept.width), np.float32), state)
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
        return StateStep(earlier, inputs, self._last.state, self._fresh(), self._fresh())

    def take_in(self, step: StateStep) -> None:
        if self._start < self._high:  # tokens were taken back, and the state is whole again
            inputs = self._inputs(self._high - self._back, self._high)
            self._snapshots.append(Snapshot(self._high, inputs, step.settled))
        else:
            self._recycle(step.settled)
        end = self._high + step.inputs.shape[1]
        kept = step.inputs[:, -TRAIL:]
        self._write(end - kept.shape[1], kept)
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
        """The position that a run goes on from: its state is there, or it has none."""
        return self._high if self._shape is None else self._last.position

    def _inputs(self, start: int, end: int) -> Floats:
        """Copy the inputs of positions start … end − 1; f32 [layers, end − start, width]."""
        # take, whose answer is contiguous, as an index's need not be
        return self._trail.take([position % TRAIL for position in range(start, end)], axis=1)

    def _write(self, start: int, inputs: Floats) -> None:
        """Write inputs of the positions from `start` on, where the trail then ends."""
        self._high = start + inputs.shape[1]
        self._trail[:, [position % TRAIL for position in range(start, self._high)]] = inputs

    def _fresh(self) -> Floats:
        assert self._shape is not None
        return self._spare.pop() if self._spare else np.empty(self._shape, np.float32)

    def _recycle(self, state: Floats | None) -> None:
        if state is not None:
            self._spare.append(state)


def dispensable(positions: Sequence[int], reach: int) -> int:
    """Return which of these ascending positions leaves the smallest gap for how far back it is.

    Not the last one. So distances from the end grow about geometrically. Gaps that a rollback of a
    window may end in do not grow beyond `reach`.
    """
    end, before = positions[-1], [0, *positions]
    gaps = [after - ahead for ahead, after in zip(before, positions[1:], strict=False)]
    far = [
        gap > reach and after > end - WINDOW for gap, after in zip(gaps, positions[1:], strict=True)
    ]
    return min(range(len(gaps)), key=lambda i: (far[i], gaps[i] / (end - positions[i])))
