"""What the edge tells a node has it hold the sequence, whatever the two went through before."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pilotfish.edge_runtime.targets.holding import Holding
from pilotfish.edge_runtime.targets.target import Span
from pilotfish.wire.nodes import Item

SLOTS = 2
TOKENS = st.integers(0, 3)  # few, so that sequences share beginnings
MOSTLY_ALL = st.sampled_from([99, 99, 99, 5, 2, 0])


@dataclass
class Node:
    """A node's slots, by the words of `wire.nodes.Item`."""

    held: list[list[int]] = field(default_factory=lambda: [[] for _ in range(SLOTS)])
    trees: list[int] = field(default_factory=lambda: [0] * SLOTS)  # where each last tree begins

    def do(self, item: Item, tokens: list[int]) -> None:
        slot, held = item.slot, self.held[item.slot]
        if item.kept_nodes is not None:
            begin = self.trees[slot]
            nodes = held[begin:]
            assert item.kept_nodes == sorted(set(item.kept_nodes))
            held[begin:] = [nodes[node] for node in item.kept_nodes]
        assert item.start <= len(held)
        assert item.size == len(tokens) >= item.nodes
        assert item.rows <= item.size
        held[item.start :] = tokens
        self.trees[slot] = len(held) - item.nodes

    def forget(self) -> None:
        self.held, self.trees = [[] for _ in range(SLOTS)], [0] * SLOTS


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Parents of a tree's nodes; none for a chain."""
    count = draw(st.sampled_from([0, 0, 1, 3, 6]))
    return [draw(st.integers(-1, index - 1)) for index in range(count)]


class Conversation(RuleBasedStateMachine):
    """An edge as the scheduler drives it, its Holding of a node, and the node.

    held: what the scheduler knows that a slot holds. drawn: the tree that its last finished pass
    ended in, of which no path has been kept yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.node, self.holding = Node(), Holding(SLOTS)
        self.held: list[list[int]] = [[] for _ in range(SLOTS)]
        self.drawn: list[tuple[list[int], list[int]]] = [([], [])] * SLOTS
        self.passes = 0
        self.current = [True] * SLOTS  # the node was in the slot's last pass

    @rule(
        slot=st.integers(0, SLOTS - 1),
        keep=MOSTLY_ALL,
        more=st.lists(TOKENS, min_size=1, max_size=6),
        parents=trees(),
        takes_part=st.booleans(),
        answered=st.booleans(),
        resent=st.booleans(),
        base=MOSTLY_ALL,
    )
    def send_pass(
        self, slot: int, keep: int, more: list[int], parents: list[int], takes_part: bool,
        answered: bool, resent: bool, base: int,
    ) -> None:  # fmt: skip
        """Another sequence, of which the slot holds the beginning; maybe with a tree at its end."""
        chain = [*self.held[slot][:keep], *more]
        self.passes += 1
        nodes = [10 * self.passes + index for index in range(len(parents))]
        shared = 0
        while shared < min(len(chain) - 1, len(self.held[slot])) and (
            chain[shared] == self.held[slot][shared]
        ):
            shared += 1
        span = Span(
            slot,
            np.array(chain + nodes, np.uint32),
            min(base, shared),
            min(2, 1 + len(nodes)),
            np.array(parents, np.int64) if parents else None,
        )
        if not takes_part:
            self.holding.skip(span)
        if takes_part or resent:  # a worker that is back is sent what it was not sent at first
            item, tokens = self.holding.item(span)
            self.node.do(item, tokens.tolist())
            assert self.node.held[slot] == chain + nodes
        self.held[slot] = chain if answered else chain[: span.base]
        self.drawn[slot] = (nodes, parents) if answered else ([], [])
        self.current[slot] = takes_part or resent

    @rule(slot=st.integers(0, SLOTS - 1), leaf=st.sampled_from([5, 3, 1, 0, -1]))
    def keep(self, slot: int, leaf: int) -> None:
        """The rule has chosen a path of the last finished tree."""
        nodes, parents = self.drawn[slot]
        if not nodes:
            return
        path, at = [], min(leaf, len(nodes) - 1)
        while at >= 0:
            path.append(at)
            at = parents[at]
        path.reverse()
        self.holding.keep_path(slot, path)
        self.held[slot] = [*self.held[slot], *(nodes[node] for node in path)]
        self.drawn[slot] = ([], [])

    @rule()
    def lose(self) -> None:
        """The node was restarted, or attached anew."""
        self.node.forget()
        self.holding.lose()
        self.current = [False] * SLOTS

    @invariant()
    def nothing_is_told_twice(self) -> None:
        """A node that was in the slot's last pass is told no more than what is new."""
        for slot, current in enumerate(self.current):
            nodes, _ = self.drawn[slot]
            if current and not nodes and self.held[slot]:
                span = Span(
                    slot, np.array([*self.held[slot], 9], np.uint32), len(self.held[slot]), 1
                )
                assert self.holding.first_missing(span) == len(self.held[slot])


Conversation.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
test_a_node_always_holds_the_sequence = Conversation.TestCase
