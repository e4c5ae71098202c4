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

import numpy as np
from numpy.typing import NDArray

from engines.artifact import Artifact
from engines.backends import Backend, Binding, Load, open_backend
from engines.errors import CapacityError, ProviderError
from engines.passes import Pass, check, fill_packed, fill_padded, fill_single

__all__ = ["Decoder", "Output", "Pass"]

# Idle slots between two busy ones cost attention; a run of its own costs a reading of all weights.
IDLE_BETWEEN = 4
# Relative error of logits that rounding explains, in half precision and with 4-bit weights.
PROBE_TOLERANCE = 0.1


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
        context: positions per slot; None = all that the model has, or that a TensorRT engine was
            built for.
        threads: of one run; None = the cores that this process may use.
        provider: "cpu", "cuda", "tensorrt", "tensorrt-ep", or "auto": the best that works without
            building an engine first (see docs/engines.md).

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
        # Trunk and nodes of the tree (or chain) that each slot's last tokens are.
        self._trees = [(0, 0)] * slots
        self._bindings: dict[tuple[int, int], Binding] = {}
        load = Load(
            self.artifact,
            slots,
            self.context,
            flexible=context is None,
            threads=threads,
            build=provider != "auto",
        )
        self._backend, self.provider = open_backend(load, provider, self._probe)
        self.context = min(self.context, self._backend.context)

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self._backend.hidden_size

    def length(self, slot: int) -> int:
        """Tokens in the slot."""
        return self._cache.lengths[slot]

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
            length = self._cache.lengths[item.slot]
            self._trees[item.slot] = (length - item.grown, len(item.tokens) + item.grown)
            self._cache.lengths[item.slot] = length + len(item.tokens)
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
        if not 0 <= length <= self._cache.lengths[slot]:
            raise ValueError(f"slot {slot} has {self._cache.lengths[slot]} tokens, not {length}")
        self._cache.lengths[slot] = length
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
        self._cache.gather(slot, trunk, offsets)
        self._trees[slot] = (trunk, len(offsets))

    def _check(self, passes: Sequence[Pass]) -> None:
        if len(passes) > 1 and len({item.slot for item in passes}) < len(passes):
            raise ValueError("a slot can have one pass per forward")
        for item in passes:
            check(item, self._cache.lengths, self.vocab_size)
            total = self._cache.lengths[item.slot] + len(item.tokens)
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
            if i + 1 < len(ordered) and self._share(item, ordered[i + 1]):
                continue
            first = ordered[start].slot
            yield first, item.slot - first + 1, ordered[start : i + 1]
            start = i + 1

    def _share(self, one: Pass, following: Pass) -> bool:
        """Whether two passes, of which no other's slot lies between, go into one run."""
        narrow = self._backend.narrow
        return (
            self._backend.batches
            and following.slot - one.slot - 1 <= IDLE_BETWEEN
            and (narrow is None or max(len(one.tokens), len(following.tokens)) <= narrow)
        )

    def _run_in_pieces(self, item: Pass, width: int, row: int) -> None:
        """Runs of at most `width` tokens, for a pass that is wider than the backend takes."""
        lengths = self._cache.lengths
        length = lengths[item.slot]
        try:
            for piece in item.pieces(width):
                self._run(item.slot, 1, [piece], row)
                row += piece.wanted
                lengths[item.slot] += len(piece.tokens)
        finally:
            lengths[item.slot] = length  # until the whole forward has succeeded

    def _run(self, first: int, count: int, passes: list[Pass], row: int) -> None:
        """One run of the graph; its rows go to the output buffers from `row` on."""
        cache, backend = self._cache, self._backend
        lengths = cache.lengths[first : first + count]
        size = max(len(item.tokens) for item in passes)
        if backend.widest is not None and size > backend.widest:
            self._run_in_pieces(passes[0], backend.widest, row)
            return
        if cache.reserve(max(lengths) + size):
            self._bindings.clear()
        binding = self._bindings.get((first, count))
        if binding is None:
            binding = self._bindings[first, count] = backend.bind(first, count)
        rows = fill_packed(binding, passes, cache.lengths)
        if backend.batches:
            fill_padded(binding, passes, first, lengths, cache.capacity, cache.dtype)
        else:
            fill_single(binding, passes[0], lengths[0], cache.capacity, cache.dtype)
        binding.run(self._logits, self._hidden, row, rows)
        for item in passes:
            cache.take_in(item.slot, cache.lengths[item.slot], len(item.tokens))

    def _probe(self, backend: Backend) -> None:
        """Run a token, and see that the next one finds its keys and values; then forget both.

        Raises:
            ProviderError: if the answers are none, or the cache is not read as it was written.
        """
        self._backend, self._cache = backend, backend.cache
        self._bindings.clear()
        self._allocate_outputs(2)
        self._logits.fill(np.nan)  # so that answers which never arrive show
        pair = np.array([0, min(1, self.vocab_size - 1)])
        self._run(0, 1, [Pass(0, pair[:1])], 0)
        if not np.isfinite(self._logits[0]).all():
            raise ProviderError("it ran the model, but the logits are no numbers")
        if backend.trusted or self.context < len(pair):
            return
        self._cache.lengths[0] = 1
        self._run(0, 1, [Pass(0, pair[1:])], 0)
        self._cache.lengths[0] = 0
        self._run(0, 1, [Pass(0, pair, 1)], 1)
        apart, together = self._logits - self._logits.mean(1, keepdims=True)
        if not np.linalg.norm(apart - together) <= PROBE_TOLERANCE * np.linalg.norm(together):
            raise ProviderError("it ran the model, but forgets keys and values between passes")

    def _allocate_outputs(self, rows: int) -> None:
        self._logits = self._backend.answers((rows, self._padded_vocab))
        self._hidden = self._backend.answers((rows, self._backend.hidden_size))
