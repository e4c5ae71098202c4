"""Build the graphs of a pipeline's stages from the graph of a whole decoder.

    first      input_ids → next_states [T, width] f32      head      hidden_states → logits
    others     states [T, width] f32 → next_states
    last       states → hidden_states [N, width] f32, for the rows that `logit_rows` names

States are the residual stream after a stage's last layer, for all T packed tokens. A float16 graph
casts them to float32 and back, without loss. A stage has all other inputs of the whole graph (see
`export.dialects.dialect`), and numbers its caches from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import ModelProto, NodeProto, TensorProto, helper, shape_inference

from pilotfish.engines.backends.backend import kv_names
from pilotfish.export.borders import HIDDEN, LOGITS, ROWS, TOKENS, Dependencies, Subgraph
from pilotfish.export.export_errors import ExportError

STATES, NEXT_STATES = "states", "next_states"
FLOAT = TensorProto.FLOAT


class StageGraphs:
    """Cuts a graph of `layers` layers into stages; the weights stay in their file.

    Raises:
        ExportError: if the graph cannot be cut between all layers.
    """

    def __init__(self, whole: ModelProto, layers: int) -> None:
        self._whole = whole
        self._dependencies = Dependencies(whole.graph)
        # Name of the value at each layer's border; "" at both ends of the model.
        self._borders = ["", *self._dependencies.borders(layers), ""]
        inferred = shape_inference.infer_shapes(whole).graph
        known = (*inferred.value_info, *inferred.input, *inferred.output)
        self._infos = {item.name: item for item in known}

    def stage(self, first: int, layers: int) -> ModelProto:
        """Build layers first … first + layers − 1, with embedding or norm at the model's ends."""
        end = first + layers
        before, after = self._borders[first], self._borders[end]
        cache_names = {  # maps each name in the whole graph to the name in this stage
            f"{when}.{name}": f"{when}.{renumbered}"
            for name, renumbered in zip(
                kv_names(range(first, end)), kv_names(range(layers)), strict=True
            )
            for when in ("past", "present")
        }
        caches = [name for name in cache_names if name.startswith("present.")]
        part = self._dependencies.subgraph([after or HIDDEN, *caches], [before] if before else [])
        excluded = {name for name in self._infos if name.startswith("past.")} - cache_names.keys()
        excluded |= ({TOKENS} if before else set()) | ({ROWS} if after else set())
        if part.inputs & excluded:
            read = ", ".join(sorted(part.inputs & excluded))
            raise ExportError(f"layers {first}–{end - 1} of this graph also read {read}")
        # All stages declare the same inputs, even those that they do not read.
        inputs = [item for item in self._whole.graph.input if item.name not in excluded]
        outputs = [self._infos[name] for name in caches]
        nodes = part.nodes
        if before:
            inputs = [self._states(STATES, before), *inputs]
            nodes = [self._copy_node(before, STATES, before, self._type(before)), *nodes]
        if after:
            outputs = [*outputs, self._states(NEXT_STATES, after)]
            nodes = [*nodes, self._copy_node(after, after, NEXT_STATES, FLOAT)]
        else:
            outputs = [*outputs, self._infos[HIDDEN]]
        return self._model(f"layers {first}–{end - 1}", nodes, inputs, outputs, part, cache_names)

    def head(self) -> ModelProto:
        """Build the graph from hidden states to logits."""
        border = self._dependencies.head_border()
        part = self._dependencies.subgraph([LOGITS], [border])
        nodes = [self._copy_node(border, HIDDEN, border, self._type(border)), *part.nodes]
        return self._model("head", nodes, [self._infos[HIDDEN]], [self._infos[LOGITS]], part, {})

    def _model(
        self,
        name: str,
        nodes: Sequence[NodeProto],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        part: Subgraph,
        names: Mapping[str, str],
    ) -> ModelProto:
        """Build a graph from copies of nodes, with values renamed by `names`."""
        weights = [item for item in self._whole.graph.initializer if item.name in part.weights]
        graph = helper.make_graph(nodes, name, inputs, outputs, weights)
        for node in graph.node:
            for values in (node.input, node.output):
                values[:] = [names.get(value, value) for value in values]
        for info in (*graph.input, *graph.output):
            info.name = names.get(info.name, info.name)
        model: ModelProto = helper.make_model(graph, opset_imports=self._whole.opset_import)
        model.ir_version = self._whole.ir_version
        model.producer_name = self._whole.producer_name
        return model

    def _copy_node(self, border: str, source: str, target: str, kind: int) -> NodeProto:
        """Build a node that copies `source` to `target`, cast to `kind` unless both are float32."""
        if self._type(border) == FLOAT:
            return helper.make_node("Identity", [source], [target], name=target)
        return helper.make_node("Cast", [source], [target], name=target, to=kind)

    def _states(self, name: str, border: str) -> Any:
        width = self._infos[border].type.tensor_type.shape.dim[1].dim_value
        return helper.make_tensor_value_info(name, FLOAT, ["T", width])

    def _type(self, name: str) -> int:
        return int(self._infos[name].type.tensor_type.elem_type)
