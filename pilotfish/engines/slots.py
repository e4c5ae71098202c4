"""Sequences in slots, and the runs of a graph that append tokens to them.

`Slots` is the base of `Decoder` and `Stage`. It tracks the slots' lengths and trees, groups passes
into runs, and fills the inputs of each run. A slot holds one sequence. Passes append tokens to any
number of slots, as chains or as trees; a tree may grow over several passes. The passes share a run
if the dialect allows it, else each slot needs a run. `rollback` drops a slot's last tokens;
`keep_path` reduces a tree to the accepted path. Not thread-safe: only one thread may use it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from pilotfish.base.cpus import usable_cpus
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.backends import Answers, Backend, Binding, Load, OpenedBackend, open_backend
from pilotfish.engines.engine_errors import ProviderError, TreeError
from pilotfish.engines.passes import Pass, Run, check_all, fill_cells, fill_padded, fill_single

# Maximum number of idle slots between two passes in one run. Attention computes idle slots, too,
# but a separate run would read all weights again.
MOST_IDLE_BETWEEN = 4
# Number of tokens per run when lost states are recomputed; equals `engines.engine.CHUNK`.
RECOMPUTE_TOKENS = 128
# Maximum relative error of outputs by rounding, in half precision with 4-bit weights.
PROBE_TOLERANCE = 0.1


_slot = attrgetter("slot")


class Slots(ABC):
    """The sequences in `slots` slots, run by one graph.

    Args:
        context: positions per slot; None = the model's, or the number that a TensorRT engine was
        built for.
        threads: threads per run; None = the cores that this process may use.
        provider: a name of `engines.backends.PROVIDERS`, or "auto".
        vocabulary: number of valid token ids; None = any id is accepted.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        slots: int,
        context: int | None,
        threads: int | None,
        provider: str,
        vocabulary: int | None,
    ) -> None:
        self.artifact = artifact
        self.slots = slots
        longest = artifact.manifest.dimensions.context
        self.context = min(context or longest, longest)
        self._vocabulary = vocabulary
        self._why_chains_only = artifact.manifest.why_chains_only
        # Trunk length and node count of each slot's last tree (or chain).
        self._trees = [(0, 0)] * slots
        self._bindings: dict[tuple[int, int], Binding] = {}
        load = Load(
            artifact,
            slots,
            self.context,
            flexible=context is None,
            threads=threads,
            build=provider != "auto",
        )
        self.threads = threads or usable_cpus()
        self._backend, self.provider, self.idle_gpu = self._open(load, provider)
        self.context = min(self.context, self._backend.context)
        # Tokens that may have to be recomputed, i64 [slots, context]; empty without states.
        width = self.context if self._backend.states is not None else 0
        self._tokens = np.zeros((slots, width), np.int64)

    def length(self, slot: int) -> int:
        """Return the number of tokens in the slot."""
        return self._cache.lengths[slot]

    def rollback(self, slot: int, length: int) -> None:
        """Drop all but the first `length` tokens of a slot."""
        if not 0 <= length <= self._cache.lengths[slot]:
            raise ValueError(f"slot {slot} has {self._cache.lengths[slot]} tokens, not {length}")
        self._cache.lengths[slot] = length
        self._trees[slot] = (length, 0)

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Keep the nodes at `path` of the last tree (or chain), and drop its other nodes.

        Nodes are numbered from the tree's beginning, over all passes that appended to it. A path
        leads from a root downwards, so its numbers ascend. The nodes' keys and values move to the
        end of the trunk; nothing is computed again. The remaining nodes form a chain after the
        trunk.

        Raises:
            ValueError: if `path` does not ascend within the tree, or if the model reads only chains
            and `path` is not the chain's beginning. Then nothing changes.
        """
        trunk, count = self._trees[slot]
        offsets = [int(offset) for offset in path]
        if any(not 0 <= offset < count for offset in offsets) or offsets != sorted(set(offsets)):
            raise ValueError(
                f"path must ascend within the last {count} tokens, but it is {offsets}"
            )
        if self._why_chains_only and offsets != list(range(len(offsets))):
            raise ValueError(
                f"a model that reads only chains can only keep the first tokens of a chain, "
                f"not {offsets}"
            )
        self._cache.gather(slot, trunk, offsets)
        self._trees[slot] = (trunk, len(offsets))

    # --- for subclasses --------------------------------------------------------------------

    @abstractmethod
    def _fill_inputs(self, binding: Binding, run: Run) -> int:
        """Fill a run's inputs except the inputs of attention; return the number of output rows."""

    @abstractmethod
    def _example_pass(self) -> Pass:
        """Make a pass of two tokens for slot 0 that asks for at least the last row."""

    def _open(self, load: Load, provider: str) -> OpenedBackend:
        """Load the model on a provider that runs it."""
        return open_backend(load, provider, self._probe)

    def _fill_attention(self, binding: Binding, run: Run, lengths: Sequence[int]) -> None:
        """Fill the inputs of attention for the run's slots, which have these `lengths`."""
        cache = self._cache
        if self._backend.batches:
            fill_padded(binding, run, lengths, cache.capacity, cache.dtype)
        else:
            fill_single(binding, run.passes[0], lengths[0], cache.capacity, cache.dtype)
        if self.artifact.manifest.window is not None:
            fill_cells(binding, run, lengths, cache.capacity)

    # --- passes ----------------------------------------------------------------------------

    def check(self, passes: Sequence[Pass]) -> None:
        """Check that these passes can run.

        Raises:
            CapacityError: if a slot would exceed its context.
            TreeError: if a pass has a tree and the model reads only chains.
            ValueError: if a pass is malformed, or a slot has two.
        """
        check_all(passes, self._cache.lengths, self.context, self._vocabulary)
        if self._why_chains_only and any(item.branches for item in passes):
            raise TreeError(
                f"{self.artifact.manifest.model} {self._why_chains_only}, so it cannot read "
                "token trees"
            )

    def _append(self, passes: Sequence[Pass]) -> list[slice]:
        """Run passes that `check` accepted; return for each pass its rows in `_answers`."""
        runs = self._runs(passes)
        # One row more than wanted, because a run always computes at least one row.
        rows = sum(run.rows for run in runs) + 1
        if rows > self._rows:
            self._allocate(rows)
        # Reserve cells before the first run. When the cache grows, it copies only cells below the
        # lengths, and lengths are raised only after all runs.
        self._reserve(max([self._cells_needed(run) for run in runs], default=0))
        done = 0
        rows_of: dict[int, slice] = {}
        for run in runs:
            self._recompute_lost(run.passes[0], done)
            self._run(run, done)
            for item in run.passes:
                start, done = done, done + item.row_count
                rows_of[item.slot] = slice(start, done)
        lengths, has_states = self._cache.lengths, self._backend.states is not None
        for item in passes:
            slot, size, nodes = item.slot, len(item.tokens), item.tree_length
            length = lengths[slot]
            self._trees[slot] = (length - nodes, size + nodes)
            lengths[slot] = length + size
            if has_states:
                self._tokens[slot, length : length + size] = item.tokens
        return [rows_of[item.slot] for item in passes]

    def _cells_needed(self, run: Run) -> int:
        """Return the number of cells that a run needs in each of its slots."""
        return max(self._cache.lengths[run.first : run.first + run.slots]) + run.size

    def _reserve(self, cells: int) -> None:
        """Make room for `cells` in every slot."""
        if self._cache.reserve(cells):
            self._bindings.clear()

    def _runs(self, passes: Sequence[Pass]) -> list[Run]:
        """Group passes into runs."""
        runs: list[Run] = []
        shared: list[Pass] = []
        for item in sorted(passes, key=_slot):
            if shared and not self._can_share(shared[-1], item):
                runs.append(Run.over(shared))
                shared = []
            shared.append(item)
        if shared:
            runs.append(Run.over(shared))
        return runs

    def _can_share(self, earlier: Pass, following: Pass) -> bool:
        """Whether two passes can share a run; no slot between theirs has a pass."""
        narrow = self._backend.narrow
        return (
            self._backend.batches
            and self._backend.states is None
            and following.slot - earlier.slot - 1 <= MOST_IDLE_BETWEEN
            and (narrow is None or max(len(earlier.tokens), len(following.tokens)) <= narrow)
        )

    def _recompute_lost(self, item: Pass, row: int) -> None:
        """Run again the tokens that are in the slot but, after a rollback, not in the states."""
        slot, lengths, states = item.slot, self._cache.lengths, self._backend.states
        if states is None:
            return
        length = lengths[slot]
        start = states.resume(slot, length)
        if start == length:
            return
        lengths[slot] = start
        try:
            lost = Pass(slot, self._tokens[slot, start:length], 0)
            self._run_in_pieces(lost, RECOMPUTE_TOKENS, row)
        finally:
            lengths[slot] = length

    def _run_in_pieces(self, item: Pass, width: int, row: int) -> None:
        """Run a pass in pieces of at most `width` tokens."""
        lengths = self._cache.lengths
        length = lengths[item.slot]
        try:
            for piece in item.pieces(width):
                self._run(Run.over([piece]), row)
                row += piece.row_count
                lengths[item.slot] += len(piece.tokens)
        finally:
            lengths[item.slot] = length  # `_append` raises the lengths after all runs

    def _run(self, run: Run, row: int) -> None:
        """Run the graph once; write its outputs to `_answers` from `row` on."""
        cache, backend = self._cache, self._backend
        first, count, size = run.first, run.slots, run.size
        if backend.widest is not None and size > backend.widest:
            self._run_in_pieces(run.passes[0], backend.widest, row)
            return
        self._reserve(self._cells_needed(run))
        binding = self._bindings.get((first, count))
        if binding is None:
            binding = self._bindings[first, count] = backend.bind(first, count)
        lengths = cache.lengths[first : first + count]
        rows = self._fill_inputs(binding, run)
        self._fill_attention(binding, run, lengths)
        states = backend.states
        if states is None:
            binding.run(self._answers, row, rows)
        else:
            states.resume(first, lengths[0])
            step = states.step(first, size)
            binding.bind_states(step)
            binding.run(self._answers, row, rows)
            states.take_in(first, step)
        for item in run.passes:
            cache.take_in(item.slot, cache.lengths[item.slot], len(item.tokens))

    def _probe(self, backend: Backend) -> None:
        """Run a token, then check that a second token reads the first token's cells.

        Raises:
            ProviderError: if outputs contain NaN or infinite numbers, or if the second token does
                not see the first token's keys and values.
        """
        self._backend, self._cache = backend, backend.cache
        self._bindings.clear()
        pair = self._example_pass()
        earlier, following = pair.pieces(1)
        self._allocate(1 + pair.row_count)
        name, answer = list(self._answers.items())[-1]  # logits if the graph has logits
        answer.fill(np.nan)  # detects outputs that the run did not write
        self._run(Run.over([earlier]), 0)
        if not np.isfinite(answer[0]).all():
            label = name.replace("_", " ")
            raise ProviderError(
                f"the provider ran the model, but the {label} contain NaN or infinite numbers"
            )
        if backend.trusted or self.context < len(pair.tokens):
            return
        self._cache.lengths[0] = 1
        self._run(Run.over([following]), 0)
        self._cache.lengths[0] = 0
        self._run(Run.over([pair]), 1)
        apart, together = (row - row.mean() for row in answer[[0, pair.row_count]])
        if not np.linalg.norm(apart - together) <= PROBE_TOLERANCE * np.linalg.norm(together):
            raise ProviderError(
                "the provider ran the model, but loses keys and values between passes"
            )

    def _allocate(self, rows: int) -> None:
        """Allocate buffers for `rows` rows of outputs."""
        self._rows = rows
        widths = self._backend.widths.items()
        self._answers: Answers = {
            name: self._backend.answers((rows, width)) for name, width in widths
        }
