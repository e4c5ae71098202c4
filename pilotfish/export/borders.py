"""Find the borders between layers in a decoder's graph, where it can be cut.

The **main stream** is all that depends on the tokens. A layer begins at the first node of the main
stream that reads the layer's `past`. The border is the last place before that node which only one
value of the main stream crosses; that value is the residual stream. All else that crosses there
depends on positions, mask and layout alone, and is computed again on the other side. The head is
found the same way: it begins at the value that the hidden states copy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pilotfish.engines.backends.backend import KEY_VALUE
from pilotfish.export.export_errors import ExportError

TOKENS, ROWS = "input_ids", "logit_rows"
HIDDEN, LOGITS = "hidden_states", "logits"
COPIES = {"Identity", "Cast"}


@dataclass(frozen=True)
class Subgraph:
    """A piece of a graph.

    Attributes:
        nodes: as they stand in the graph.
        inputs: of the graph's, those that it reads.
        weights: names of its initialisers.
    """

    nodes: list[Any]
    inputs: set[str]
    weights: set[str]


class Dependencies:
    """Dependencies within a graph, whose nodes are in an order in which they can run."""

    def __init__(self, graph: Any) -> None:
        self._nodes = list(graph.node)
        self._inputs = {item.name for item in graph.input}
        self._weights = {item.name for item in graph.initializer}
        self._maker = {name: at for at, node in enumerate(self._nodes) for name in node.output}
        self._main = self._behind([TOKENS])

    def borders(self, layers: int) -> list[str]:
        """Return the name of the residual stream that enters each layer but the first.

        Raises:
            ExportError: if several values pass between two layers.
        """
        alive = self._alive()
        entries = [self._entry(layer) for layer in range(layers)]
        found: list[str] = []
        for layer in range(1, layers):
            between = range(entries[layer] - 1, entries[layer - 1], -1)
            at = next((at for at in between if len(alive[at]) == 1), None)
            if at is None or self._is_written_behind(layer - 1, at):
                raise ExportError(
                    f"this graph cannot be cut before layer {layer}: more than one value of its "
                    "tokens passes there, so run the model whole"
                )
            found.extend(alive[at])
        return found

    def head_border(self) -> str:
        """Return the name of the value that hidden states copy and logits are computed from.

        Raises:
            ExportError: if that is not the same.
        """
        node = self._nodes[self._maker[HIDDEN]]
        if node.op_type not in COPIES:
            raise ExportError(f"this graph computes {HIDDEN} by {node.op_type}, not as a copy")
        border = str(node.input[0])
        if self.part([LOGITS], [border]).inputs:
            raise ExportError(f"this graph computes {LOGITS} from more than {HIDDEN}")
        return border

    def part(self, wanted: Sequence[str], given: Collection[str]) -> Subgraph:
        """Select what computes `wanted` from `given` and from the graph's inputs and weights."""
        nodes: set[int] = set()
        inputs: set[str] = set()
        weights: set[str] = set()
        open_values = [name for name in wanted if name not in given]
        while open_values:
            name = open_values.pop()
            if name in self._weights:
                weights.add(name)
            elif name in self._inputs:
                inputs.add(name)
            elif self._maker[name] not in nodes:
                nodes.add(self._maker[name])
                read = self._nodes[self._maker[name]].input
                open_values += [other for other in read if other and other not in given]
        return Subgraph([self._nodes[at] for at in sorted(nodes)], inputs, weights)

    def _behind(self, sources: Collection[str]) -> set[str]:
        """Return `sources` and all that depends on them."""
        found = set(sources)
        for node in self._nodes:
            if not found.isdisjoint(node.input):
                found.update(node.output)
        return found

    def _entry(self, layer: int) -> int:
        """Find the first node of the main stream that reads this layer's cache."""
        cached = self._behind([f"past.{layer}.{what}" for what in KEY_VALUE])
        for at, node in enumerate(self._nodes):
            if not cached.isdisjoint(node.input) and not self._main.isdisjoint(node.output):
                return at
        raise ExportError(f"this graph reads no cache of layer {layer}")

    def _alive(self) -> list[set[str]]:
        """List, for each node, the main stream's values that later nodes still read."""
        last = {name: at for at, node in enumerate(self._nodes) for name in node.input}
        alive = {TOKENS}
        found: list[set[str]] = []
        for at, node in enumerate(self._nodes):
            made = {name for name in node.output if name in self._main and last.get(name, at) > at}
            alive = {name for name in alive if last[name] > at} | made
            found.append(alive)
        return found

    def _is_written_behind(self, layer: int, at: int) -> bool:
        """Whether a node after `at` writes part of this layer's cache."""
        return any(self._maker[f"present.{layer}.{what}"] > at for what in KEY_VALUE)
