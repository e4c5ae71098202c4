"""A node computes exactly what it was sent, whatever it and the edge went through before."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from pilotfish.edge_runtime.steps import decode_works, encode_works, record_works
from pilotfish.engines.contents import SlotContents
from pilotfish.engines.engine import StageEngine, Work
from pilotfish.engines.passes import Pass

SLOTS, CONTEXT, VOCAB = 2, 512, 1000
TOKENS = st.integers(0, 3)  # few, so that sequences share beginnings
MOSTLY_ALL = st.sampled_from([99, 99, 99, 5, 2, 0])


class TokenStage:
    """A stage whose state is the slots' tokens; its output for a token is the text before it."""

    slots, context = SLOTS, CONTEXT

    def __init__(self) -> None:
        self._held: list[list[int]] = [[] for _ in range(SLOTS)]
        self._trunks = [0] * SLOTS  # length before each slot's last tree
        self._parents: list[list[int]] = [[] for _ in range(SLOTS)]

    def length(self, slot: int) -> int:
        return len(self._held[slot])

    def rollback(self, slot: int, length: int) -> None:
        assert length <= len(self._held[slot])
        del self._held[slot][length:]
        self._trunks[slot], self._parents[slot] = length, []

    def keep_path(self, slot: int, path: list[int]) -> None:
        trunk, held = self._trunks[slot], self._held[slot]
        nodes = held[trunk:]
        assert list(path) == sorted(set(path))
        held[trunk:] = [nodes[node] for node in path]
        self._parents[slot] = []

    def forward(self, passes: list[Pass], states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return for each new token a hash of the tokens that it sees; states: the tokens."""
        rows = []
        for item in passes:
            slot, held = item.slot, self._held[item.slot]
            if item.tree_length == 0:
                self._trunks[slot] = len(held)
            trunk = self._trunks[slot]
            for index, token in enumerate(item.tokens.tolist()):
                held.append(token)
                if item.parents is None:
                    seen = held[:]
                else:
                    node, path = item.tree_length + index, []
                    while node >= 0:
                        path.insert(0, held[trunk + node])
                        node = int(item.parents[node])
                    seen = [*held[:trunk], *path]
                rows.append([float(hash(tuple(seen)) % 2**20)])
        assert [token for item in passes for token in item.tokens.tolist()] == states[:, 0].tolist()
        return np.array(rows, np.float32)


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Parents of a tree's nodes; none for a chain."""
    count = draw(st.sampled_from([0, 0, 1, 3, 6]))
    return [draw(st.integers(-1, index - 1)) for index in range(count)]


def seen_by(chain: list[int], nodes: list[int], parents: list[int]) -> list[float]:
    """What `TokenStage` returns for each token of a sequence."""
    result = [chain[: end + 1] for end in range(len(chain))]
    for node in range(len(nodes)):
        at, path = node, []
        while at >= 0:
            path.insert(0, nodes[at])
            at = parents[at]
        result.append([*chain, *path])
    return [float(hash(tuple(tokens)) % 2**20) for tokens in result]


class Conversation(RuleBasedStateMachine):
    """An edge, its copy of a node's contents, and the node's engine.

    texts: the committed tokens of each slot. drawn: tokens and parents of the tree that its last
    pass ended in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engine = StageEngine(TokenStage())
        self.contents = SlotContents(SLOTS, CONTEXT)
        self.texts: list[list[int]] = [[] for _ in range(SLOTS)]
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
        rows=st.integers(0, 2),
        equal=st.booleans(),
    )
    def send_pass(
        self, slot: int, keep: int, more: list[int], parents: list[int], takes_part: bool,
        answered: bool, rows: int, equal: bool,
    ) -> None:  # fmt: skip
        """Another sequence, of which the slot holds the beginning; maybe with a tree at its end."""
        chain = [*self.texts[slot][:keep], *more]
        self.passes += 1
        # siblings differ, but nodes may have the tokens of texts
        first = 0 if equal else 10 * self.passes
        nodes = [(first + index) % VOCAB for index in range(len(parents))]
        work = Work(
            slot,
            np.array(chain + nodes, np.uint32),
            len(nodes) + 1 if nodes else min(rows, len(chain)),
            np.array(parents, np.int64) if parents else None,
        )
        if takes_part:
            self.run(work, seen_by(chain, nodes, parents))
        self.texts[slot] = chain if answered else chain[: len(chain) - 1]
        self.drawn[slot] = (nodes, parents) if answered else ([], [])
        self.current[slot] = takes_part

    def run(self, work: Work, wanted: list[float]) -> None:
        """Send the work; the node computes what it lacks, and its outputs are the sequence's."""
        sent = encode_works([work], self.contents)
        record_works([work], self.contents)
        (received,) = decode_works(sent, self.engine, VOCAB)
        np.testing.assert_array_equal(received.tokens, work.tokens)
        new = work.tokens[len(work.tokens) - sent.size :].astype(np.float32)[:, None]
        outputs = self.engine.run([received], new)
        assert outputs[:, 0].tolist() == wanted[len(wanted) - sent.size :]

    @rule(slot=st.integers(0, SLOTS - 1), leaf=st.sampled_from([5, 3, 1, 0, -1]))
    def accept(self, slot: int, leaf: int) -> None:
        """The rule has chosen a path of the last tree; the node is told nothing."""
        nodes, parents = self.drawn[slot]
        path, at = [], min(leaf, len(nodes) - 1)
        while at >= 0:
            path.insert(0, nodes[at])
            at = parents[at]
        self.texts[slot] = [*self.texts[slot], *path]
        self.drawn[slot] = ([], [])

    @rule()
    def lose(self) -> None:
        """The node was restarted, or attached again."""
        self.engine.clear_all()
        self.contents.clear_all()
        self.current = [False] * SLOTS

    @rule(slot=st.integers(0, SLOTS - 1))
    def clear(self, slot: int) -> None:
        """The slot is another session's now; the node is told with its next step."""
        self.contents.clear(slot)
        self.texts[slot] = self.texts[slot][:1]
        self.current[slot] = False

    @invariant()
    def nothing_is_sent_twice(self) -> None:
        """A node that was in the slot's last pass is sent only what is new."""
        for slot, current in enumerate(self.current):
            text = self.texts[slot]
            if current and text and not self.drawn[slot][0]:
                work = Work(slot, np.array([*text, 9], np.uint32))
                assert self.contents.find(slot, work.tokens).tokens == len(text)


Conversation.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
test_a_node_computes_what_it_is_sent = Conversation.TestCase
