"""Run a model: whole sequences in, logits out.

In:  work: for each slot, a whole sequence, and how many of its last tokens need an output.
Out: logits and hidden states of these tokens.

The engine alone knows what its slots hold (`engines.contents`). It finds by content the prefix of a
sequence that a slot holds, and the path of the slot's last token tree that the sequence follows.
Only the other tokens are computed; all else in the slot is dropped. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.contents import MOST_ID, SlotContents
from pilotfish.engines.language_model import LanguageModel, Output, open_model
from pilotfish.engines.passes import Pass, check_room
from pilotfish.engines.stage import Stage
from pilotfish.speculation.logits_options import RowOptions

CHUNK = 128  # maximum tokens of a slot in one pass; longer texts take several

States = NDArray[np.float32]
Result = TypeVar("Result")


class Work(NamedTuple):
    """What to compute in one slot.

    Attributes:
        tokens: the whole sequence, integers [n]. It must not change before the run.
        rows: number of last tokens that need an output; 0: none, the sequence is only read.
        parents: i64 [m], if the last m tokens are a token tree: the parent of each node, numbered
            within the tree; −1 is the token before the tree.
        temperature: the sampling temperature of the outputs; 0 is greedy. It matters only to an
            ensemble, which averages distributions of this temperature.
        options: changes of the outputs' logits, which only an ensemble's workers apply.
    """

    slot: int
    tokens: NDArray[np.integer[Any]]
    rows: int = 1
    parents: NDArray[np.int64] | None = None
    temperature: float = 0.0
    options: RowOptions | None = None

    @property
    def nodes(self) -> int:
        """Number of last tokens that are a tree."""
        return 0 if self.parents is None else len(self.parents)


class _Slots(Protocol):
    """The part of a model or a stage that appends to slots and drops from them."""

    slots: int
    context: int

    def length(self, slot: int) -> int: ...

    def rollback(self, slot: int, length: int) -> None: ...

    def keep_path(self, slot: int, path: Sequence[int]) -> None: ...


def check_works(works: Sequence[Work], slots: int, context: int) -> None:
    """Check works against the number of slots and their positions.

    Raises:
        CapacityError: if a sequence exceeds the context.
        ValueError: if a work is malformed, or a slot has two.
    """
    for work in works:
        if not 0 <= work.slot < slots:
            raise ValueError(f"there is no slot {work.slot}, only {slots} slots")
        if work.nodes >= len(work.tokens) or not 0 <= work.rows <= len(work.tokens):
            raise ValueError(
                f"a sequence of {len(work.tokens)} tokens cannot have a tree of {work.nodes} nodes "
                f"and {work.rows} rows"
            )
        wide = work.tokens.dtype != np.uint32  # can hold ids that a record cannot
        if wide and not (work.tokens.min() >= 0 and work.tokens.max() <= MOST_ID):
            raise ValueError(f"token ids are between 0 and {MOST_ID}")
        check_room(len(work.tokens), context)
    if len({work.slot for work in works}) < len(works):
        raise ValueError("a slot can have one work per run")


class _SlotEngine:
    """Gives the slots of a model or a stage whole sequences.

    Attributes:
        contents: what the slots hold; only this engine changes it.
    """

    def __init__(self, slots: _Slots) -> None:
        self._slots = slots
        self.contents = SlotContents(slots.slots, slots.context)
        # For each slot: the number of tokens before the tree that shared the tree's pass. The
        # model numbers these tokens as nodes, too.
        self._offsets = [0] * slots.slots

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self.contents.clear(slot)
        self._slots.rollback(slot, 0)

    def clear_all(self) -> None:
        """Empty all slots."""
        for slot in range(self.contents.slots):
            self.clear(slot)

    def _plan(self, works: Sequence[Work]) -> list[list[Pass]]:
        """Drop what the sequences do not need; return the passes of each work."""
        check_works(works, self.contents.slots, self.contents.context)
        return [self._passes(work) for work in works]

    def _passes(self, work: Work) -> list[Pass]:
        """Drop what the sequence does not need; return the passes that compute the rest."""
        slot, contents = work.slot, self.contents
        held = contents.find(slot, work.tokens, work.rows, work.parents)
        try:
            if held.path:
                offset = self._offsets[slot]
                path = [*range(offset), *(offset + node for node in held.path)]
                self._slots.keep_path(slot, path)
            if held.tokens < self._slots.length(slot):
                self._slots.rollback(slot, held.tokens)
            contents.keep(slot, held)
        except BaseException:  # the model may hold anything now: the next run empties the slot
            contents.clear(slot)
            raise
        tokens = work.tokens[held.tokens :].astype(np.int64)
        if work.parents is None:
            whole = Pass(slot, tokens, work.rows)
            return [whole] if len(tokens) <= CHUNK else list(whole.pieces(CHUNK))
        if held.grown:
            return [Pass(slot, tokens, work.rows, self._numbered(slot, work.parents))]
        # A model treats the tokens before a tree, in the same pass, as nodes, at quadratic cost:
        # if they are many, only the last of them share the tree's pass.
        far = len(tokens) > CHUNK
        first = len(tokens) - max(work.rows, work.nodes) if far else 0
        self._offsets[slot] = len(tokens) - first - work.nodes
        before = Pass(slot, tokens[:first], 0).pieces(CHUNK) if first else ()
        tree = Pass(slot, tokens[first:], work.rows, self._numbered(slot, work.parents))
        return [*before, tree]

    def _numbered(self, slot: int, parents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the parents by the model's numbers: first a chain of nodes, then the tree."""
        offset = self._offsets[slot]
        return np.concatenate([np.arange(-1, offset - 1), parents + offset])

    def _recorded(self, passes: Sequence[Pass], compute: Callable[[], Result]) -> Result:
        """Run these passes by `compute`, and record them; return the result of `compute`.

        If it raises, a slot that the model may have changed counts as empty.
        """
        try:
            result = compute()
            self._record(passes)
            return result
        except BaseException:
            for item in passes:
                if self.contents.length(item.slot) != self._slots.length(item.slot):
                    self.contents.clear(item.slot)
            raise

    def _record(self, passes: Sequence[Pass]) -> None:
        for item in passes:
            parents = item.parents
            if parents is not None:
                offset = self._offsets[item.slot]
                parents = parents[offset:] - offset
            self.contents.append(item.slot, item.tokens, parents)


class Engine(_SlotEngine):
    """A model that is given whole sequences.

    Attributes:
        model: the model; its properties (context, slots, artifact …) are read there. Nobody else
            may run it.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.model = model

    def cached(self, slot: int, tokens: NDArray[np.integer[Any]], rows: int = 1) -> int:
        """Return the number of first tokens of a chain that `run` would not compute again."""
        return self.contents.find(slot, tokens, rows).tokens

    def run(
        self, works: Sequence[Work], before_pass: Callable[[], None] = lambda: None
    ) -> list[Output]:
        """Compute all works, at most one per slot; return an output for each.

        Outputs are views that the next call overwrites. before_pass: function that is called before
        each pass; it may run work in other slots. If it raises, the slots hold what has been
        computed so far.

        Raises:
            CapacityError: if a sequence exceeds the context.
            TreeError: if a work has a tree and the model reads only chains.
            ValueError: if a work is malformed, or a slot has two.
        """
        planned = self._plan(works)
        if all(len(passes) == 1 for passes in planned):
            return self._forward([passes[0] for passes in planned], before_pass)
        return [self._run_in_turn(passes, before_pass) for passes in planned]

    def _run_in_turn(self, passes: Sequence[Pass], before_pass: Callable[[], None]) -> Output:
        outputs = []
        for item in passes:
            (output,) = self._forward([item], before_pass)
            outputs.append(Output(output.logits.copy(), output.hidden.copy()))
        return Output(
            np.concatenate([output.logits for output in outputs]),
            np.concatenate([output.hidden for output in outputs]),
        )

    def _forward(self, passes: Sequence[Pass], before_pass: Callable[[], None]) -> list[Output]:
        before_pass()
        return self._recorded(passes, lambda: self.model.forward(passes))


class StageEngine(_SlotEngine):
    """A stage of a model that is given whole sequences, and the states of those not yet computed.

    Attributes:
        stage: the stage. Nobody else may run it.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.stage = stage

    def run(
        self,
        works: Sequence[Work],
        states: States | None = None,
        before_pass: Callable[[], None] = lambda: None,
    ) -> States:
        """Compute all works, at most one per slot.

        states: f32 [Σ tokens that the slots do not hold, width], the previous stage's output; None
        for the first stage. Returns states of these tokens, in the same order; the last stage
        returns hidden states f32 [Σ rows, answer_width]. The result is valid until the next call.

        Raises:
            CapacityError: if a sequence exceeds the context.
            ValueError: if a work is malformed, a slot has two, or the states do not fit the works.
        """
        planned = self._plan(works)
        if all(len(passes) == 1 for passes in planned):
            return self._forward([passes[0] for passes in planned], states, before_pass)
        outputs = []
        for item, part in _with_states(planned, states):
            outputs.append(self._forward([item], part, before_pass).copy())
        return np.concatenate(outputs)

    def _forward(
        self, passes: Sequence[Pass], states: States | None, before_pass: Callable[[], None]
    ) -> States:
        before_pass()
        return self._recorded(passes, lambda: self.stage.forward(passes, states))


def _with_states(
    planned: Sequence[Sequence[Pass]], states: States | None
) -> Iterator[tuple[Pass, States | None]]:
    """Yield each pass with its part of the states."""
    end = 0
    for passes in planned:
        for item in passes:
            start, end = end, end + len(item.tokens)
            yield item, None if states is None else states[start:end]


def open_engine(
    artifact: Artifact | str | Path,
    *,
    slots: int = 1,
    context: int | None = None,
    threads: int | None = None,
    provider: str = "auto",
    drafts: bool = False,
) -> Engine:
    """Open an artifact for whole sequences; see `open_model` for arguments and errors."""
    return Engine(
        open_model(
            artifact,
            slots=slots,
            context=context,
            threads=threads,
            provider=provider,
            drafts=drafts,
        )
    )
