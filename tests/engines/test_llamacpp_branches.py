"""A slot's tree as llama.cpp's sequences: each is one way down, under llama.cpp's rules."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.engines.engine_errors import CapacityError
from pilotfish.engines.llamacpp.branches import Branches
from pilotfish.engines.passes import Pass, check_all
from tests.support.examples import examples

LEAVES = 6
IDS = range(12, 12 + LEAVES)


class Sequences:
    """llama.cpp's cells by sequence and position, with the rules that it has for batches."""

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {}  # numbers of tokens, as they were appended
        self.count = 0

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        held = self.held.setdefault(target, [])
        assert len(held) == start  # a position is held once
        held += self.held[source][start:end]
        assert len(held) == end

    def cut(self, sequence: int, start: int) -> None:
        del self.held.setdefault(sequence, [])[start:]

    def append(self, positions: list[int], sequences: list[list[int]]) -> list[list[int]]:
        """Run a batch; return what each token sees, itself included."""
        lengths = {item: len(self.held.get(item, [])) for ids in sequences for item in ids}
        for ids in sequences:
            assert len({lengths[item] for item in ids}) == 1, "coupled sequences have diverged"
        seen = []
        for position, ids in zip(positions, sequences, strict=True):
            assert ids
            for item in ids:
                held = self.held.setdefault(item, [])
                assert len(held) == position, "positions are consecutive"
                held.append(self.count)
            assert len({tuple(self.held[item]) for item in ids}) == 1
            seen.append(list(self.held[ids[0]]))
            self.count += 1
        return seen


class Slot:
    """A slot beside the plain list of what it should hold."""

    def __init__(self) -> None:
        self.memory = Sequences()
        self.branches = Branches(self.memory, IDS)
        self.trunk: list[int] = []
        self.nodes: list[int] = []  # their numbers
        self.parents: list[int] = []

    def run(self, size: int, parents: list[int] | None = None) -> None:
        """Append tokens; each must see the trunk, its ancestors and itself."""
        item = Pass(0, np.zeros(size, np.int64), parents=parents and np.array(parents))
        check_all([item], [self.branches.length], 10**6, None)
        growth = self.branches.plan(item)
        self.branches.enter(growth)
        first = self.memory.count
        seen = self.memory.append(list(growth.positions), growth.sequences)
        self.branches.commit(growth)
        if parents is None:
            self.trunk += self.nodes
            self.nodes, self.parents = [], list(range(-1, size - 1))
        else:
            grown = len(parents) - size
            held = [*self.trunk, *self.nodes]
            cut = len(held) - grown
            self.trunk, self.nodes, self.parents = held[:cut], held[cut:], parents
        self.nodes += range(first, first + size)
        for node, saw in zip(range(len(self.nodes) - size, len(self.nodes)), seen, strict=True):
            assert saw == [*self.trunk, *(self.nodes[at] for at in self.path(node))]
        assert self.branches.length == len(self.trunk) + len(self.nodes)

    def path(self, node: int) -> list[int]:
        path: list[int] = []
        while node >= 0:
            path.insert(0, node)
            node = self.parents[node]
        return path

    def keep(self, node: int) -> None:
        path = self.path(node)
        self.branches.keep_path(path)
        self.nodes = [self.nodes[at] for at in path]
        self.parents = list(range(-1, len(path) - 1))
        self.check()

    def rollback(self, length: int) -> None:
        self.branches.rollback(length)
        self.trunk = [*self.trunk, *self.nodes][:length]
        self.nodes, self.parents = [], []
        self.check()

    def check(self) -> None:
        """Nothing but the text is left: others hold at most a part of it."""
        text = [*self.trunk, *self.nodes]
        assert self.branches.length == len(text)
        assert self.memory.held.get(IDS[0], []) == text
        for held in self.memory.held.values():
            assert held == text[: len(held)]


def grown(draw: st.DrawFn, parents: list[int], size: int) -> list[int]:
    """Add nodes to a tree, anywhere, without more leaves than there may be."""
    made = list(parents)
    for _ in range(size):
        leaves = set(range(len(made))) - set(made)
        anywhere = len(leaves) < LEAVES
        choices = range(-1, len(made)) if anywhere or not made else sorted(leaves)
        made.append(draw(st.sampled_from(choices)))
    return made


@given(data=st.data())
@examples(200, deadline=None)
def test_any_play_keeps_llama_cpps_rules_and_every_token_sees_its_own_path(data):
    slot = Slot()
    for _ in range(data.draw(st.integers(1, 12))):
        step = data.draw(st.sampled_from(["chain", "tree", "grow", "keep", "back", "fail"]))
        straight = slot.parents == list(range(-1, len(slot.parents) - 1))
        if step == "keep":
            slot.keep(data.draw(st.integers(-1, len(slot.nodes) - 1)))
        elif step == "back":
            most = len(slot.trunk) + (len(slot.nodes) if straight else 0)
            slot.rollback(data.draw(st.integers(0, most)))
        elif step == "chain" and straight:
            slot.run(data.draw(st.integers(1, 5)))
        elif step == "fail":
            parents = grown(data.draw, slot.parents, 3)
            before = {item: list(held) for item, held in slot.memory.held.items()}
            growth = slot.branches.plan(Pass(0, np.zeros(3, np.int64), parents=np.array(parents)))
            slot.branches.enter(growth)
            slot.memory.append(list(growth.positions)[:2], growth.sequences[:2])
            slot.branches.undo(growth)
            after = slot.memory.held
            for item in IDS:  # spare lines may hold less
                assert after.get(item, []) == before.get(item, [])[: len(after.get(item, []))]
            for line in {0, *slot.branches._lines}:
                assert after.get(IDS[line], []) == before.get(IDS[line], [])
        else:
            size = data.draw(st.integers(1, 6))
            if step == "tree" and straight:  # behind a part of the chain, or all of it
                drawn_value = data.draw(st.integers(0, slot.branches.length))
                begun = list(range(-1, drawn_value - 1))
            else:
                begun = slot.parents
            slot.run(size, grown(data.draw, begun, size))


def test_a_line_that_knew_a_longer_trunk_serves_a_branch_before_its_end():
    slot = Slot()
    slot.run(3)
    slot.run(3, [-1, -1, -1])  # three lines have the trunk of three
    slot.keep(0)
    slot.run(2, [-1, 0, 1, 2, 0, 4])  # behind the first token
    slot.keep(5)
    slot.run(4, [-1, -1, -1, 0])  # another trunk of three
    slot.keep(3)
    slot.rollback(1)


def wide(leaves: int) -> Iterator[tuple[int, list[int]]]:
    yield leaves, [-1] * leaves  # at once
    yield 1, [-1, *[0] * leaves]  # behind a chain


@pytest.mark.parametrize("more", [0, 1])
def test_a_tree_with_more_leaves_than_sequences_is_refused_and_says_so(more):
    for _, parents in wide(LEAVES + more):
        slot = Slot()
        slot.run(3)
        if more:
            with pytest.raises(CapacityError, match=f"{LEAVES + 1} leaves.* has only {LEAVES}"):
                slot.run(len(parents), parents)
            assert slot.branches.length == 3
            slot.check()
        else:
            slot.run(len(parents), parents)


def test_what_llama_cpp_cannot_do_is_refused_and_changes_nothing():
    slot = Slot()
    slot.run(2)
    slot.run(3, [-1, -1, 0])
    with pytest.raises(ValueError, match="chain cannot follow"):
        slot.run(1)
    with pytest.raises(ValueError, match="keep_path"):
        slot.rollback(4)
    with pytest.raises(ValueError, match="other parents"):
        slot.run(1, [-1, 0, 0, 0])
    for path in ([1, 2], [2], [0, 1], [3], [-1], [0, 0]):
        with pytest.raises(ValueError, match="not a path"):
            slot.branches.keep_path(path)
    slot.keep(2)
    slot.run(1)
