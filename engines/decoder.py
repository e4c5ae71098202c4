"""Run an artifact: tokens in; logits and hidden states out; keys and values kept per slot.

A slot holds one sequence. `forward` appends tokens to any number of slots in one run of the graph
where its dialect can (else in one run per slot), as chains or as trees, which may grow over
several passes; `rollback` forgets the last tokens, `keep` turns a tree into the path that was
accepted. Not thread-safe: one owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.artifact import Artifact
from engines.binding import Binding
from engines.errors import CapacityError
from engines.kv import KVCache
from engines.passes import Pass, check, fill_packed, fill_padded, fill_single
from engines.runtime import open_session

__all__ = ["Decoder", "Output", "Pass"]

# Idle slots between two busy ones cost attention; a run of its own costs a reading of all weights.
IDLE_BETWEEN = 4
KEY_VALUE = ("key", "value")


@dataclass(frozen=True, eq=False)
class Output:
    """Answer to one pass; views into buffers that the next forward overwrites.

    Attributes:
        logits: f32 [rows, vocab_size], padding ids cut off.
        hidden: f32 [rows, hidden_size], the last layer after the final norm.
    """

    logits: NDArray[np.float32]
    hidden: NDArray[np.float32]


class Decoder:
    """One model with `slots` sequences.

    Args:
        context: positions per slot; None = all that the model has.
        threads: of one run; None = the cores that this process may use.
        provider: "auto", "cpu" or "cuda".

    Raises:
        ArtifactError: if the directory is no artifact.
        ProviderError: if no inference runtime can run it.
    """

    def __init__(
        self,
        artifact: Artifact | str | Path,
        *,
        slots: int = 1,
        context: int | None = None,
        threads: int | None = None,
        provider: str = "auto",
    ) -> None:
        self.artifact = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
        manifest = self.artifact.manifest
        self.slots = slots
        self.vocab_size = manifest.vocab_size
        self.context = min(context or manifest.dimensions.context, manifest.dimensions.context)
        self._padded_vocab = manifest.padded_vocab_size
        self._layers = manifest.dimensions.layers
        self._kv = KVCache(manifest, slots, self.context)
        # Trunk and nodes of the tree (or chain) that each slot's last tokens are.
        self._trees = [(0, 0)] * slots
        self._bindings: dict[tuple[int, int], Binding] = {}
        self._batches = False
        self._session: Any = None
        self._session, self.provider = open_session(
            self.artifact.graph_path, provider, threads, self._probe
        )

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self._hidden.shape[1])

    def length(self, slot: int) -> int:
        """Tokens in the slot."""
        return self._kv.lengths[slot]

    def forward(self, passes: Sequence[Pass]) -> list[Output]:
        """Append each pass to its slot and answer it; at most one pass per slot.

        Nothing is appended if it raises.

        Raises:
            CapacityError: if a slot would exceed its context.
            ValueError: if a pass is malformed, or a slot has two.
        """
        self._check(passes)
        # One more than wanted, for a run of which no row is wanted computes one all the same.
        rows = sum(item.wanted for item in passes) + 1
        if rows > len(self._logits):
            self._allocate_outputs(rows)
        done = 0
        outputs: dict[int, Output] = {}
        for first, count, members in self._runs(passes):
            self._run(first, count, members, done)
            for item in members:
                end = done + item.wanted
                outputs[item.slot] = Output(
                    self._logits[done:end, : self.vocab_size], self._hidden[done:end]
                )
                done = end
        for item in passes:
            length = self._kv.lengths[item.slot]
            self._trees[item.slot] = (length - item.grown, len(item.tokens) + item.grown)
            self._kv.lengths[item.slot] = length + len(item.tokens)
        return [outputs[item.slot] for item in passes]

    def prefill(
        self,
        slot: int,
        tokens: NDArray[np.int64] | Sequence[int],
        *,
        rows: int = 1,
        chunk: int = 128,
    ) -> Output:
        """Append a long text in chunks; logits and hidden states of its last `rows` tokens.

        Raises:
            CapacityError: if the slot would exceed its context; then nothing is appended.
            ValueError: as `forward`.
        """
        row = np.asarray(tokens, np.int64)
        self._check([Pass(slot, row, rows)])
        last = max((len(row) - 1) // chunk * chunk, 0)
        last = min(last, len(row) - rows)
        for start in range(0, last, chunk):
            self.forward([Pass(slot, row[start : min(start + chunk, last)], 0)])
        return self.forward([Pass(slot, row[last:], rows)])[0]

    def rollback(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens of a slot."""
        if not 0 <= length <= self._kv.lengths[slot]:
            raise ValueError(f"slot {slot} has {self._kv.lengths[slot]} tokens, not {length}")
        self._kv.lengths[slot] = length
        self._trees[slot] = (length, 0)

    def keep(self, slot: int, path: Sequence[int]) -> None:
        """Of the last tree, or the last pass if that was a chain, keep the nodes at `path`.

        Nodes are counted from the trunk, whichever pass appended them; a path runs from the root
        down, so it ascends. Its keys and values move behind the trunk; nothing is computed again.
        What is kept counts as a chain behind the same trunk.

        Raises:
            ValueError: if `path` does not ascend within the tree; then nothing changes.
        """
        trunk, count = self._trees[slot]
        offsets = [int(offset) for offset in path]
        if any(not 0 <= offset < count for offset in offsets) or offsets != sorted(set(offsets)):
            raise ValueError(f"path must ascend within the last {count} tokens, not {offsets}")
        self._kv.gather(slot, trunk, offsets)
        self._trees[slot] = (trunk, len(offsets))

    def _check(self, passes: Sequence[Pass]) -> None:
        if len(passes) > 1 and len({item.slot for item in passes}) < len(passes):
            raise ValueError("a slot can have one pass per forward")
        for item in passes:
            check(item, self._kv.lengths, self.vocab_size)
            total = self._kv.lengths[item.slot] + len(item.tokens)
            if total > self.context:
                raise CapacityError(
                    f"{total} tokens do not fit into a context of {self.context}: "
                    "shorten the prompt or ask for fewer tokens"
                )

    def _runs(self, passes: Sequence[Pass]) -> Iterator[tuple[int, int, list[Pass]]]:
        """Passes that go into one run each: first slot, number of slots, passes."""
        ordered = sorted(passes, key=lambda item: item.slot)
        start = 0
        for i, item in enumerate(ordered):
            following = ordered[i + 1].slot if i + 1 < len(ordered) else None
            if (
                self._batches
                and following is not None
                and following - item.slot - 1 <= IDLE_BETWEEN
            ):
                continue
            first = ordered[start].slot
            yield first, item.slot - first + 1, ordered[start : i + 1]
            start = i + 1

    def _run(self, first: int, count: int, passes: list[Pass], row: int) -> None:
        """One run of the graph; its rows go to the output buffers from `row` on."""
        kv = self._kv
        lengths = kv.lengths[first : first + count]
        if kv.reserve(max(lengths) + max(len(item.tokens) for item in passes)):
            self._bindings.clear()
        binding = self._binding(first, count)
        rows = fill_packed(binding, passes, kv.lengths)
        if self._batches:
            fill_padded(binding, passes, first, lengths, kv.capacity, kv.dtype)
        else:
            fill_single(binding, passes[0], lengths[0], kv.capacity, kv.dtype)
        place = (row, rows, len(self._logits))  # the buffers are replaced by longer ones only
        if binding.rows != place:
            binding.rows = place
            binding.output("logits", self._logits[row : row + rows])
            binding.output("hidden_states", self._hidden[row : row + rows])
        binding.run()

    def _binding(self, first: int, count: int) -> Binding:
        """The binding of these slots, whose keys and values are read and written in place."""
        binding = self._bindings.get((first, count))
        if binding is None:
            binding = self._bindings[first, count] = Binding(self._session)
            for plane in range(2 * self._layers):
                name = f"{plane // 2}.{KEY_VALUE[plane % 2]}"
                piece = self._kv.piece(plane, first, count)
                binding.in_place(f"past.{name}", f"present.{name}", piece)
        return binding

    def _probe(self, session: Any) -> None:
        """Learn the graph's form and run one token, which is then forgotten."""
        self._session = session
        self._bindings.clear()
        self._batches = any(item.name == "unpack" for item in session.get_inputs())
        shapes = {item.name: item.shape for item in session.get_outputs()}
        self._hidden = np.empty((0, shapes["hidden_states"][1]), np.float32)
        self._allocate_outputs(1)
        self._run(0, 1, [Pass(0, np.zeros(1, np.int64))], 0)

    def _allocate_outputs(self, rows: int) -> None:
        self._logits = np.empty((rows, self._padded_vocab), np.float32)
        self._hidden = np.empty((rows, self._hidden.shape[1]), np.float32)
