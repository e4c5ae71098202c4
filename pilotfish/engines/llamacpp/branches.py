"""A slot's chain and tree, as sequences of llama.cpp, which accepts no masks from its caller.

In llama.cpp a token sees the cells of its sequence. So each path from the trunk to a leaf is a
sequence, called a *line*; a node belongs to the lines of all leaves below it. Line 0 has the chain,
and then the first child of each node. Other lines share cells with line 0, and get more of its
cells when a branch begins later; sharing neither computes nor moves cells.

For each pass: `plan` computes the changes without applying them, then `enter` copies cells, then
llama.cpp runs, then `commit` or `undo`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pilotfish.engines.engine_errors import CapacityError
from pilotfish.engines.passes import Pass


class CellMemory(Protocol):
    """The cells of all sequences; positions count from 0."""

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Add the cells of `source` at start … end − 1 to sequence `target`."""
        ...

    def cut(self, sequence: int, start: int) -> None:
        """Drop a sequence's positions from `start` on."""
        ...


class Copy(NamedTuple):
    """Add the cells of line `source` at these positions to line `target`."""

    source: int
    target: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class SlotGrowth:
    """The changes that a pass makes to a slot.

    Attributes:
        trunk, parents, depths: the tree after the pass.
        lines: for each node, a line through it.
        positions: position of each new token, [S].
        sequences: llama.cpp's sequence ids for each new token, [S][lines].
        copies: copies to make before the run.
        ends: length after the run, for each line that the pass changes.
    """

    trunk: int
    parents: list[int]
    depths: list[int]
    lines: list[int]
    positions: Sequence[int]
    sequences: list[list[int]]
    copies: list[Copy]
    ends: dict[int, int]


class Branches:
    """The lines of one slot. ids: sequence ids of the slot; the first is line 0."""

    def __init__(self, memory: CellMemory, ids: range) -> None:
        self._memory, self._ids = memory, ids
        self._ends = [0] * len(ids)  # number of positions that each line holds
        self._shared = [0] * len(ids)  # leading positions that each line shares with line 0
        self._trunk = 0
        # The nodes after the trunk in the order of their passes, and a line through each node.
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._lines: list[int] = []

    @property
    def length(self) -> int:
        """The number of tokens in the slot, including all nodes of the tree."""
        return self._trunk + len(self._parents)

    def plan(self, item: Pass) -> SlotGrowth:
        """Compute the changes that a pass makes; the pass has been checked.

        Raises:
            CapacityError: if the tree has more leaves than the slot has sequences.
            ValueError: if the pass continues a tree that the slot does not hold.
        """
        if item.parents is None:
            return self._plan_chain(len(item.tokens))
        parents: list[int] = item.parents.tolist()
        trunk = self.length - item.tree_length
        lines = self._continued_lines(trunk, parents[: item.tree_length])
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        copies = self._add_lines(trunk, parents, depths, lines)
        tips = {line: node for node, line in enumerate(lines)}
        new = {line: node for line, node in tips.items() if node >= item.tree_length}
        sequences: list[list[int]] = [[] for _ in parents]
        for line, node in new.items():
            while node >= item.tree_length:
                sequences[node].append(self._ids[line])
                node = parents[node]
        return SlotGrowth(
            trunk,
            parents,
            depths,
            lines,
            [trunk + depth for depth in depths[item.tree_length :]],
            sequences[item.tree_length :],
            copies,
            {line: trunk + depths[node] + 1 for line, node in new.items()},
        )

    def enter(self, growth: SlotGrowth) -> None:
        """Make the copies of a plan."""
        # new lines share no more than the trunk with line 0
        for line in {*growth.lines} - {0, *self._lines}:
            self._shared[line] = min(self._shared[line], growth.trunk)
            self._cut(line, self._shared[line])
        for source, target, start, end in growth.copies:
            self._memory.copy(self._ids[source], self._ids[target], start, end)

    def commit(self, growth: SlotGrowth) -> None:
        """Record the changes after a successful run."""
        for copy in growth.copies:
            self._shared[copy.target] = growth.trunk
        for line, end in growth.ends.items():
            self._ends[line] = end
        self._trunk, self._parents = growth.trunk, growth.parents
        self._depths, self._lines = growth.depths, growth.lines

    def undo(self, growth: SlotGrowth) -> None:
        """Remove the cells that a failed run left."""
        for line in {*growth.ends, *(copy.target for copy in growth.copies)}:
            self._memory.cut(self._ids[line], self._ends[line])

    def rollback(self, length: int) -> None:
        """Drop all but the first `length` tokens.

        Raises:
            ValueError: if the slot has fewer tokens, or branches would remain.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"the slot has {self.length} tokens, not {length}")
        if not _is_chain(self._parents[: max(length - self._trunk, 0)]):
            raise ValueError("a rollback cannot keep a part of a tree with branches: use keep_path")
        self._cut(0, length)
        for line in range(1, len(self._ids)):
            self._shared[line] = min(self._shared[line], length)
            self._cut(line, self._shared[line])
        self._set_chain(length, 0)

    def keep_path(self, path: Sequence[int]) -> None:
        """Keep the nodes of this path, and drop the tree's other nodes.

        Raises:
            ValueError: if the nodes are not a path that leads down from the trunk; then nothing
                changes.
        """
        nodes = [int(node) for node in path]
        if (
            any(not 0 <= node < len(self._parents) for node in nodes)
            or [self._parents[node] for node in nodes] != [-1, *nodes][: len(nodes)]
        ):
            raise ValueError(
                f"{nodes} is not a path that leads from the trunk down through the last "
                f"{len(self._parents)} tokens"
            )
        end = self._trunk + len(nodes)
        kept_line = self._lines[nodes[-1]] if nodes else 0
        if kept_line:
            self._cut(0, self._trunk)
            self._memory.copy(self._ids[kept_line], self._ids[0], self._trunk, end)
            self._ends[0] = end
        self._cut(0, end)
        for line in range(1, len(self._ids)):
            self._shared[line] = min(self._shared[line], self._trunk)
            self._cut(line, self._shared[line])
        self._set_chain(self._trunk, len(nodes))

    # --- plans -----------------------------------------------------------------------------

    def _plan_chain(self, size: int) -> SlotGrowth:
        if not _is_chain(self._parents):
            raise ValueError("a chain cannot follow a tree that branches: call keep_path first")
        start = self.length
        return SlotGrowth(
            start,
            list(range(-1, size - 1)),
            list(range(size)),
            [0] * size,
            range(start, start + size),
            [[self._ids[0]]] * size,
            [],
            {0: start + size},
        )

    def _continued_lines(self, trunk: int, parents: list[int]) -> list[int]:
        """Return a line through each existing node of the tree that a pass continues.

        The tree may begin in the chain before the last pass, or within the last pass before any
        branch.
        """
        before, within = self._trunk - trunk, trunk - self._trunk
        if before >= 0:
            current = [*range(-1, before - 1), *(parent + before for parent in self._parents)]
            lines = [0] * before + self._lines
        else:
            current = [parent - within for parent in self._parents[within:]]
            lines = self._lines[within:]
        if current != parents or not _is_chain(self._parents[: max(within, 0)]):
            raise ValueError("the tree's first nodes were appended under other parents")
        return list(lines)

    def _add_lines(
        self, trunk: int, parents: list[int], depths: list[int], lines: list[int]
    ) -> list[Copy]:
        """Append a line through each new node to `lines`; return the copies that new lines need."""
        grown = len(lines)
        free = [line for line in range(1, len(self._ids)) if line not in set(lines)]
        free.reverse()
        continued = set(parents[:grown])  # nodes that already have a child on their line
        copies: list[Copy] = []
        for node in range(grown, len(parents)):
            parent = parents[node]
            if parent not in continued:
                continued.add(parent)
                lines.append(lines[parent] if parent >= 0 else 0)
                continue
            if not free:
                leaves = len(set(range(len(parents))) - set(parents))
                raise CapacityError(
                    f"a tree of {leaves} leaves needs {leaves} sequences of llama.cpp, but a "
                    f"slot has only {len(self._ids)}: draft a narrower tree, or serve fewer "
                    "sessions"
                )
            line = free.pop()
            lines.append(line)
            while parent >= grown:  # go up to a node that has cells
                parent = parents[parent]
            source = lines[parent] if parent >= 0 else 0
            end = trunk + depths[parent] + 1 if parent >= 0 else trunk
            middle = end if source == 0 else trunk
            copies.append(Copy(0, line, min(self._shared[line], trunk), middle))
            copies.append(Copy(source, line, middle, end))
        return [copy for copy in copies if copy.start < copy.end]

    # --- state -----------------------------------------------------------------------------

    def _cut(self, line: int, end: int) -> None:
        if self._ends[line] > end:
            self._memory.cut(self._ids[line], end)
            self._ends[line] = end

    def _set_chain(self, trunk: int, count: int) -> None:
        """Make the nodes after the trunk a chain of `count` tokens."""
        self._trunk, self._parents = trunk, list(range(-1, count - 1))
        self._depths, self._lines = list(range(count)), [0] * count


def _is_chain(parents: list[int]) -> bool:
    """Whether these nodes form a chain."""
    return parents == list(range(-1, len(parents) - 1))
