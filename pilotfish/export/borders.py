"""Find the borders between layers in a decoder's graph, where the graph can be cut.

The **main stream** is the set of all values that depend on the tokens. A layer begins at the first
node of the main stream that reads the layer's `past`. The border before the layer is the last place
before that node where exactly one value of the main stream is live: the residual stream. All other
live values depend only on positions, mask and layout, so both sides of the cut compute them. The
head begins at the value that `hidden_states` copies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotfish.engines.backends.backend import KEY_VALUE
from pilotfish.export.export_errors import ExportError

TOKENS, ROWS = "input_ids", "logit_rows"
HIDDEN, LOGITS = "hidden_states", "logits"
COPIES = {"Identity", "Cast"}
UNUSED = ""  # name of an output that no operator reads


@dataclass(frozen=True)
class Subgraph:
    """A part of a graph.

    Attributes:
        nodes: nodes, in the graph's order.
        inputs: names of the graph inputs that the nodes read.
        weights: names of the initialisers that the nodes read.
    """

    nodes: list[Any]
    inputs: set[str]
    weights: set[str]


@dataclass(frozen=True)
class Part:
    """A part of a graph that runs after the parts before it.

    Attributes:
        graph: its nodes.
        inputs: the values of earlier parts that it reads.
        outputs: the outputs of the whole graph that it computes, and its values for later parts.
        crossing: the values of this and of earlier parts that later parts read.
    """

    graph: Subgraph
    inputs: list[str]
    outputs: list[str]
    crossing: set[str]


class Dependencies:
    """The dependencies between the values of a graph; its nodes are in topological order."""

    def __init__(self, graph: Any) -> None:
        self._nodes = list(graph.node)
        self._inputs = {item.name for item in graph.input}
        self._outputs = {item.name for item in graph.output}
        self._weights = {item.name for item in graph.initializer}
        self._producer = {name: at for at, node in enumerate(self._nodes) for name in node.output}
        self._main_stream = self._dependents([TOKENS])

    def borders(self, layers: int) -> list[str]:
        """Return for each layer except the first the name of the residual stream that enters it.

        Raises:
            ExportError: if several values of the main stream cross between two layers.
        """
        live = self._live_values()
        starts = [self._layer_start(layer) for layer in range(layers)]
        names: list[str] = []
        for layer in range(1, layers):
            between = range(starts[layer] - 1, starts[layer - 1], -1)
            at = next((at for at in between if len(live[at]) == 1), None)
            if at is None or self._is_written_after(layer - 1, at):
                raise ExportError(
                    f"this graph cannot be cut before layer {layer}: more than one value that "
                    "depends on the tokens crosses that border. Run the model whole"
                )
            names.extend(live[at])
        return names

    def head_border(self) -> str:
        """Return the name of the value that `hidden_states` copies and that determines the logits.

        Raises:
            ExportError: if the logits depend on another value.
        """
        node = self._nodes[self._producer[HIDDEN]]
        if node.op_type not in COPIES:
            raise ExportError(
                f"this graph computes {HIDDEN} by the operator {node.op_type}, "
                "but only a copy is supported"
            )
        border = str(node.input[0])
        if self.subgraph([LOGITS], [border]).inputs:
            raise ExportError(f"this graph computes {LOGITS} from further values besides {HIDDEN}")
        return border

    def parts(self, weight_bytes: Mapping[str, int], most: int) -> list[Part]:
        """Cut the graph into parts that follow each other, for runs with little memory.

        A part begins where the part before has more than `most` bytes of weights, or earlier: where
        the fewest values of the main stream are live. All other values are computed in each part
        that reads them, so no pattern of operators on weights is divided.

        weight_bytes: size of each initialiser.
        """
        live, outputs = self._live_values(), sorted(self._outputs, key=self._producer.__getitem__)
        parts: list[Part] = []
        known: set[str] = set()
        begin = 0
        while begin < len(self._nodes):
            end = self._end_of_part(begin, live, weight_bytes, most)
            last = end == len(self._nodes)
            crossing = set() if last else live[end - 1] - self._inputs - {UNUSED}
            made = [name for name in outputs if begin <= self._producer[name] < end]
            made += sorted(crossing - known - {*made})
            if made:
                part = self.subgraph(made, known)
                read = {name for node in part.nodes for name in node.input}
                parts.append(Part(part, sorted(known & read), made, crossing))
            begin, known = end, crossing
        return parts

    def _end_of_part(
        self, begin: int, live: Sequence[set[str]], weight_bytes: Mapping[str, int], most: int
    ) -> int:
        """Return the index after the last node of the part that begins at node `begin`."""
        size, read = 0, set[str]()
        for at in range(begin, len(self._nodes)):
            weights = {*self._nodes[at].input} & weight_bytes.keys() - read
            read |= weights
            size += sum(weight_bytes[name] for name in weights)
            if size > most and at > begin:
                return 1 + min(range(begin, at), key=lambda end: (len(live[end]), -end))
        return len(self._nodes)

    def subgraph(self, outputs: Sequence[str], known: Collection[str]) -> Subgraph:
        """Select the nodes that compute `outputs`, given the values `known`."""
        nodes: set[int] = set()
        inputs: set[str] = set()
        weights: set[str] = set()
        open_values = [name for name in outputs if name not in known]
        while open_values:
            name = open_values.pop()
            if name in self._weights:
                weights.add(name)
            elif name in self._inputs:
                inputs.add(name)
            elif self._producer[name] not in nodes:
                nodes.add(self._producer[name])
                read = self._nodes[self._producer[name]].input
                open_values += [other for other in read if other and other not in known]
        return Subgraph([self._nodes[at] for at in sorted(nodes)], inputs, weights)

    def _dependents(self, sources: Collection[str]) -> set[str]:
        """Return the names of `sources` and of all values that depend on them."""
        dependents = set(sources)
        for node in self._nodes:
            if not dependents.isdisjoint(node.input):
                dependents.update(node.output)
        return dependents

    def _layer_start(self, layer: int) -> int:
        """Return the index of the first node of the main stream that reads the layer's cache."""
        cached = self._dependents([f"past.{layer}.{what}" for what in KEY_VALUE])
        for at, node in enumerate(self._nodes):
            if not cached.isdisjoint(node.input) and not self._main_stream.isdisjoint(node.output):
                return at
        raise ExportError(f"this graph does not read the cache of layer {layer}")

    def _live_values(self) -> list[set[str]]:
        """List for each node the values of the main stream that exist then and are read later."""
        last = {name: at for at, node in enumerate(self._nodes) for name in node.input}
        live = {TOKENS}
        live_after: list[set[str]] = []
        for at, node in enumerate(self._nodes):
            produced = {
                name
                for name in node.output
                if name in self._main_stream and last.get(name, at) > at
            }
            live = {name for name in live if last[name] > at} | produced
            live_after.append(live)
        return live_after

    def _is_written_after(self, layer: int, at: int) -> bool:
        """Whether a node after `at` writes part of this layer's cache."""
        return any(self._producer[f"present.{layer}.{what}"] > at for what in KEY_VALUE)
