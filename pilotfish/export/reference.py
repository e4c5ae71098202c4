"""Compute a model's predictions in float32, one layer at a time.

In: a source of weights and a text. Out: logits. Only one layer's weights at a time are in memory,
of the embedding only the rows of the text's tokens, and of the head a few rows at a time. So the
model may be larger than the machine's memory. The weights are inputs of the graphs: no file is
written, and the runtime makes no copy of them. Embeddings and logits are computed outside of the
graphs.
"""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.passes import HIDDEN_FROM_VIEW
from pilotfish.engines.runtime import CPU, OPSET24_SINCE, open_session, runtime_version
from pilotfish.export.dialects import Dialect
from pilotfish.export.dialects.opset17 import Opset17
from pilotfish.export.dialects.opset24 import Opset24
from pilotfish.export.graph import Dim, GraphWriter
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.network import write_head, write_inputs, write_layer
from pilotfish.export.sources import WeightSource
from pilotfish.export.weight_recorder import shapes
from pilotfish.export.weights import EMBEDDING, HEAD, HEAD_BIAS, TOKEN_TABLE, layer_of

STATES, NEXT = "states", "next_states"
PRODUCT = "product."  # begins the name of an output that is the input of a product
LAYER_INPUTS = "token_inputs"  # per-layer embeddings of the tokens, [T, width]

Floats = NDArray[np.float32]


class Reference:
    """A float32 run of a model, which reads the weights from the source for each text.

    Args:
        source: the model's weights.
        config: the model's shape, with the context of the artifact to compare.
        folder: folder for temporary graphs, which have no weights.
    """

    def __init__(self, source: WeightSource, config: ModelConfig, folder: Path) -> None:
        self._source, self._config, self._folder = source, config, folder
        newest = runtime_version() >= OPSET24_SINCE
        self._dialect: type[_Embedded] = _Embedded24 if newest else _Embedded17

    @property
    def parts(self) -> int:
        """The number of graphs that `states` runs."""
        return self._config.layers + 1

    def states(self, tokens: NDArray[np.int64], done: Callable[[], None]) -> Floats:
        """Return the last layer's outputs for a text [T], f32 [T, hidden].

        `done` is called after each graph.
        """
        states = np.empty(0, np.float32)
        for outputs in self._run(tokens, products=False):
            states = outputs[NEXT]
            done()
        return states

    def inputs(self, tokens: NDArray[np.int64]) -> Iterator[dict[str, Floats]]:
        """Yield, for each layer, the inputs of its products on a text [T].

        A product's label joins the names of its weights as in `Dialect.linear`; an input is f32
        with K in the last axis.
        """
        runs = self._run(tokens, products=True)
        next(runs)  # the embedding
        for outputs in runs:
            names = [name for name in outputs if name.startswith(PRODUCT)]
            yield {name.removeprefix(PRODUCT): outputs.pop(name) for name in names}

    def logits(self, states: Floats, width: int) -> Floats:
        """Return the logits after each of `states` [T, hidden], f32 [T, width].

        width: number of first tokens of the vocabulary whose logits are wanted.
        """
        config, start = self._config, 0

        def write(net: Dialect) -> None:
            write_head(net, net.config, net.graph.input(STATES, "float32", _states_shape(config)))

        hidden = self._compute(len(states), write, {STATES: states})[NEXT]
        result = np.empty((len(states), width), np.float32)
        with np.errstate(all="ignore"):
            for rows in self._source.rows(EMBEDDING if config.tied else HEAD):
                part = rows[: width - start]
                result[:, start : start + len(part)] = hidden @ part.T
                start += len(part)
                if start == width:
                    break
            if "lm_head" in config.form.biases:
                result += self._source.tensor(HEAD_BIAS)[:width]
            result *= np.float32(config.logit_scale)
            if config.logit_cap is not None:
                cap = np.float32(config.logit_cap)
                result /= cap
                np.tanh(result, out=result)
                result *= cap
        return result

    def _run(self, tokens: NDArray[np.int64], *, products: bool) -> Iterator[dict[str, Floats]]:
        """Run the embedding and each layer on a text; yield the outputs of each graph.

        They are the layer's output NEXT, what later layers read and, if wanted, the inputs of
        `products`.
        """
        config = self._config

        def write_embedding(net: Dialect) -> None:
            x, layer_inputs = write_inputs(net, net.config)
            for i, inputs in enumerate(layer_inputs):
                _write_output(
                    net, inputs, f"{LAYER_INPUTS}.{i}", ["T", _layer_inputs_width(config)]
                )
            _write_output(net, x, NEXT, _states_shape(config))

        def layer(i: int) -> Callable[[Dialect], None]:
            def write(net: Dialect) -> None:
                inputs = f"{LAYER_INPUTS}.{i}" if config.token_inputs is not None else None
                if inputs is not None:
                    net.graph.input(inputs, "float32", ["T", _layer_inputs_width(config)])
                states = net.graph.input(STATES, "float32", _states_shape(config))
                answer = write_layer(net, net.config, i, states, inputs)
                _write_output(net, answer, NEXT, _states_shape(config))
                for label, (x, width) in net.products.items() if products else ():
                    _write_output(net, x, PRODUCT + label, ["T", width])

            return write

        embeddings = self._embed(tokens)
        known = dict[str, Floats]()  # values that later layers read
        for write in (write_embedding, *map(layer, range(config.layers))):
            outputs = self._compute(len(tokens), write, embeddings | known)
            embeddings.clear()
            known |= {name: x for name, x in outputs.items() if not name.startswith(PRODUCT)}
            known[STATES] = known.pop(NEXT)
            yield outputs

    def _embed(self, tokens: NDArray[np.int64]) -> dict[str, Floats]:
        """Look up the tokens' rows in the embedding and in the table of per-layer embeddings."""
        config, inputs = self._config, self._config.token_inputs
        embeddings = {EMBEDDING: self._look_up(EMBEDDING, tokens, config.width)}
        if inputs is not None:  # tokens beyond this table use its row 0
            inside = np.where(tokens < inputs.rows, tokens, 0)
            width = config.layers * inputs.width
            embeddings[TOKEN_TABLE] = self._look_up(TOKEN_TABLE, inside, width)
        return embeddings

    def _look_up(self, name: str, tokens: NDArray[np.int64], width: int) -> Floats:
        """Read the rows `tokens` of a table, a part of the table at a time; f32 [T, width]."""
        result, start = np.empty((len(tokens), width), np.float32), 0
        for part in self._source.rows(name):
            here = (start <= tokens) & (tokens < start + len(part))
            result[here] = part[tokens[here] - start]
            start += len(part)
        return result

    def _compute(
        self, length: int, write: Callable[[Dialect], None], values: Mapping[str, Floats]
    ) -> dict[str, Floats]:
        """Run the graph that `write` writes on a text; return its outputs by name.

        values: inputs of the graph, besides weights and layout.
        """
        graph, config = _FedGraph(), _with_context(self._config, length)
        net = self._dialect(graph, config, self._source, "fp32")
        write(net)
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".onnx") as file:
            graph.save(Path(file.name), opset=net.opset)
            session = open_session(Path(file.name), None, CPU, lasting=False)
        outputs = (output.name for output in session.get_outputs())
        names = [name for name in outputs if _is_read(config, name)]
        feeds = _feeds(session, config, length, {**graph.weights, **values})
        return dict(zip(names, session.run(names, feeds), strict=True))


class _Embedded(Dialect):
    """The base of dialects whose graphs have embeddings as inputs, and no head."""

    def embed(self, name: str) -> str:
        """Declare the embeddings of the tokens as an input, [T, width]."""
        return self.graph.input(name, "float32", ["T", self.config.width])

    def embed_for_layers(self, name: str) -> str:
        """Declare the per-layer embeddings as an input, [T, layers · width]."""
        width = self.config.layers * _layer_inputs_width(self.config)
        return self.graph.input(name, "float32", ["T", width])

    def finish(self, hidden: str, head: str) -> None:
        """Declare the input of the head as an output."""
        _write_output(self, hidden, NEXT, ["T", self.config.width])


class _Embedded17(_Embedded, Opset17):
    pass


class _Embedded24(_Embedded, Opset24):
    pass


class _FedGraph(GraphWriter):
    """A graph whose weights are inputs.

    Attributes:
        weights: the weights by input.
    """

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), "")
        self.weights: dict[str, NDArray[Any]] = {}

    def stream_weight(
        self, name: str, shape: Sequence[int], dtype: str, parts: Iterable[NDArray[Any]]
    ) -> str:
        """Declare a weight as an input."""
        first, *others = parts
        array = np.concatenate([first, *others]) if others else first
        self.weights[name] = np.ascontiguousarray(array).reshape(shape)
        return self.input(name, dtype, shape)

    def has(self, name: str) -> bool:
        """Whether a weight of this name was declared."""
        return name in self.weights


def largest_layer(config: ModelConfig) -> int:
    """Return the size of the largest layer in float32, bytes."""
    sizes = [0] * config.layers
    for name, shape in shapes(config).items():
        if (layer := layer_of(name)) is not None:
            sizes[layer] += 4 * math.prod(shape)
    return max(sizes)


def _write_output(net: Dialect, value: str, name: str, shape: Sequence[Dim]) -> None:
    net.graph.op("Identity", value, name=name)
    net.graph.output(name, "float32", shape)


def _states_shape(config: ModelConfig) -> list[Dim]:
    streams: list[Dim] = [] if config.streams is None else [config.streams.count]
    return ["T", *streams, config.hidden]


def _layer_inputs_width(config: ModelConfig) -> int:
    assert config.token_inputs is not None
    return config.token_inputs.width


def _is_read(config: ModelConfig, output: str) -> bool:
    """Whether an output is read: any but a cache or state that no other layer reads."""
    kind, _, rest = output.partition(".")
    if kind not in {"present", "settled"}:
        return True
    return int(rest.partition(".")[0]) in {layer.kv_source for layer in config.pattern}


def _with_context(config: ModelConfig, length: int) -> ModelConfig:
    """Return the configuration for `length` positions, with the same choice of rotary factors."""
    beyond = config.short_context is not None and config.context > config.short_context
    least = (config.short_context or 0) + 1 if beyond else 0
    return msgspec.structs.replace(config, context=max(length, least))


def _feeds(
    session: Any, config: ModelConfig, length: int, values: Mapping[str, NDArray[Any]]
) -> dict[str, Any]:
    """Return the graph's inputs for one pass over a text with an empty cache."""
    order = np.arange(length)
    hidden = np.triu(np.full((length, length), HIDDEN_FROM_VIEW, np.float32), 1)
    known = {
        "input_ids": order,  # only its length is read
        "position_ids": order,
        "logit_rows": order,
        "unpack": order[None],
        "pack": order,
        "write_indices": np.zeros(1, np.int64),
        "cell_positions": order[None],
        "attention_mask": hidden[None, None],
        **values,
    }
    taps = 1 if config.recurrence is None else config.recurrence.taps
    sizes = {"B": 1, "C": length, "M": taps - 1}
    feeds = {}
    for wanted in session.get_inputs():
        if wanted.name in known:
            feeds[wanted.name] = known[wanted.name]
        else:  # these inputs are empty keys, values or states
            shape = [sizes.get(size, size) for size in wanted.shape]
            feeds[wanted.name] = np.zeros(shape, np.float32)
    return feeds
