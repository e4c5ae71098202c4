"""Compute a model's predictions in float32, one layer at a time.

In: a source of weights and a text. Out: logits. Only one layer's weights at a time are in memory,
of the embedding only the rows of the text's tokens, and of the head a few rows at a time. So the
model may be larger than the machine's memory. The weights are inputs of the graphs: no file is
written, and the runtime makes no copy of them.
"""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.passes import HIDDEN_FROM_VIEW
from pilotfish.engines.runtime import CPU, OPSET24_SINCE, open_session, runtime_version
from pilotfish.export.dialects import DIALECTS, Dialect
from pilotfish.export.dialects.operators import WeightReader
from pilotfish.export.graph import Dim, GraphWriter
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.network import write_head, write_inputs, write_layer
from pilotfish.export.sources import WeightSource
from pilotfish.export.weight_recorder import shapes
from pilotfish.export.weights import EMBEDDING, HEAD, HEAD_BIAS, TOKEN_TABLE, layer_of

STATES, NEXT = "states", "next_states"
HEAD_BYTES = 32 << 20  # rows of the head that are read at a time
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
        name = "opset24" if runtime_version() >= OPSET24_SINCE else "opset17"
        self._dialect = DIALECTS[name]

    @property
    def parts(self) -> int:
        """The number of graphs that `states` runs."""
        return self._config.layers + 1

    def states(self, tokens: NDArray[np.int64], done: Callable[[], None]) -> Floats:
        """Return the last layer's outputs for a text [T], f32 [T, hidden].

        `done` is called after each graph.
        """
        states = np.empty(0, np.float32)
        for values in self._run(tokens, _is_read):
            states = values[STATES]
            done()
        return states

    def inputs(self, tokens: NDArray[np.int64]) -> Iterator[dict[str, Floats]]:
        """Yield, for each layer, the inputs of its products on a text [T].

        A product's label joins the names of its weights as in `Dialect.linear`; an input is f32
        with K in the last axis.
        """
        runs = self._run(tokens, _is_product_or_read)
        next(runs)  # the embedding
        for values in runs:
            layer = {name: values.pop(name) for name in list(values) if name.startswith(PRODUCT)}
            yield {name.removeprefix(PRODUCT): x for name, x in layer.items()}

    def _run(
        self, tokens: NDArray[np.int64], wanted: Callable[[ModelConfig, str], bool]
    ) -> Iterator[dict[str, Floats]]:
        """Run the embedding and each layer on a text; yield what is known after each graph.

        That is the layer's output STATES, and the outputs so far that are `wanted`.
        """
        config = _with_context(self._config, len(tokens))
        distinct, places = np.unique(tokens, return_inverse=True)
        tables = _TextTables(self._source, config, distinct)

        def embedding(net: Dialect) -> str:
            x, layer_inputs = write_inputs(net, tables.config)
            for i, inputs in enumerate(layer_inputs):
                net.graph.op("Identity", inputs, name=f"{LAYER_INPUTS}.{i}")
                net.graph.output(f"{LAYER_INPUTS}.{i}", "float32", _layer_inputs_shape(config))
            return x

        def layer(i: int) -> Callable[[Dialect], str]:
            def write(net: Dialect) -> str:
                inputs = f"{LAYER_INPUTS}.{i}" if config.token_inputs is not None else None
                if inputs is not None:
                    net.graph.input(inputs, "float32", _layer_inputs_shape(config))
                answer = write_layer(net, config, i, _states(net), inputs)
                for label, (x, width) in net.products.items():
                    net.graph.op("Identity", x, name=PRODUCT + label)
                    net.graph.output(PRODUCT + label, "float32", ["T", width])
                return answer

            return write

        values: dict[str, Floats] = {}  # values that later layers read
        graphs: list[tuple[ModelConfig, WeightReader, Callable[[Dialect], str]]] = [
            (tables.config, tables, embedding)
        ]
        graphs += [(config, self._source, layer(i)) for i in range(config.layers)]
        for shape, source, write in graphs:
            with self._session(shape, source, write) as (session, weights):
                names = [item.name for item in session.get_outputs()]
                read = [name for name in names if name == NEXT or wanted(shape, name)]
                outputs = session.run(read, _feeds(session, shape, places, weights | values))
            values |= dict(zip(read, outputs, strict=True))
            values[STATES] = values.pop(NEXT)
            yield values

    def logits(self, states: Floats, width: int) -> Floats:
        """Return the logits after each of `states` [T, hidden], f32 [T, width].

        width: number of first tokens of the vocabulary whose logits are wanted.
        """
        tokens = np.zeros(len(states), np.int64)
        config = _with_context(self._config, len(states))
        result = np.empty((len(states), width), np.float32)

        def write(net: Dialect) -> None:
            write_head(net, net.config, _states(net))

        start = 0
        for rows in _grouped(self._source.rows(EMBEDDING if config.tied else HEAD)):
            end = min(start + len(rows), width)
            part = _HeadRows(self._source, config, rows, start)
            with self._session(part.config, part, write) as (session, read):
                feeds = _feeds(session, config, tokens, read | {STATES: states})
                [logits] = session.run(["logits"], feeds)
            result[:, start:end] = logits[:, : end - start]
            start = end
            if end == width:
                break
        return result

    @contextmanager
    def _session(
        self,
        config: ModelConfig,
        source: WeightReader,
        write: Callable[[Dialect], str | None],
    ) -> Iterator[tuple[Any, dict[str, NDArray[Any]]]]:
        """Yield a session of the graph that `write` writes, and the weights by input.

        What `write` returns becomes an output.
        """
        graph = _FedGraph()
        net = self._dialect(graph, config, source, "fp32")
        if (answer := write(net)) is not None:
            graph.op("Identity", answer, name=NEXT)
            graph.output(NEXT, "float32", _states_shape(config))
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".onnx") as file:
            graph.save(Path(file.name), opset=net.opset)
            session = open_session(Path(file.name), None, CPU, lasting=False)
        yield session, graph.weights


class _FedGraph(GraphWriter):
    """A graph whose weights are inputs.

    Attributes:
        weights: the weights by input.
    """

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), "")
        self.weights: dict[str, NDArray[Any]] = {}

    def weight(self, name: str, array: NDArray[Any], dtype: str | None = None) -> str:
        """Declare a weight as an input."""
        self.weights[name] = np.ascontiguousarray(array)
        return self.input(name, dtype or array.dtype.name, array.shape)

    def stream_weight(
        self, name: str, shape: Sequence[int], dtype: str, parts: Iterable[NDArray[Any]]
    ) -> str:
        """Declare a weight as an input."""
        return self.weight(name, np.concatenate([*parts]).reshape(shape), dtype)

    def has(self, name: str) -> bool:
        """Whether a weight of this name was declared."""
        return name in self.weights


class _TextTables:
    """A source whose tables of tokens have only the rows of some tokens, in their order.

    Args:
        config: configuration of the whole model.
        tokens: i64 [N], ascending.

    Attributes:
        config: the configuration with N tokens.
    """

    def __init__(
        self, source: WeightSource, config: ModelConfig, tokens: NDArray[np.int64]
    ) -> None:
        self._source, self.quantized = source, source.quantized
        self._tokens = {EMBEDDING: tokens}
        inputs = config.token_inputs
        if inputs is not None:  # tokens beyond this table use its row 0
            self._tokens[TOKEN_TABLE] = np.where(tokens < inputs.rows, tokens, 0)
            inputs = msgspec.structs.replace(inputs, rows=len(tokens))
        self.config = msgspec.structs.replace(config, vocab_size=len(tokens), token_inputs=inputs)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read a weight; of a table, only the rows of the tokens."""
        if name not in self._tokens:
            return self._source.tensor(name)
        distinct, places = np.unique(self._tokens[name], return_inverse=True)
        chosen, start = [], 0
        for part in self._source.rows(name):
            end = start + len(part)
            chosen.append(part[distinct[(start <= distinct) & (distinct < end)] - start])
            start = end
        return np.concatenate(chosen)[places]

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Read a weight in a single part."""
        yield self.tensor(name)


class _HeadRows:
    """A source whose head has only some consecutive rows.

    Args:
        config: configuration of the whole model.
        rows: f32 [N, hidden], rows of the head from `start` on.

    Attributes:
        config: the configuration with N tokens.
    """

    def __init__(
        self, source: WeightSource, config: ModelConfig, rows: NDArray[np.float32], start: int
    ) -> None:
        self._source, self._rows, self._start = source, rows, start
        self.quantized, self.rows = source.quantized, source.rows
        self._head = EMBEDDING if config.tied else HEAD
        self.config = msgspec.structs.replace(config, vocab_size=len(rows), head_tokens=None)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read a weight; of the head and its bias, only the rows."""
        if name == self._head:
            return self._rows
        weight = self._source.tensor(name)
        return weight[self._start :][: len(self._rows)] if name == HEAD_BIAS else weight


def _grouped(parts: Iterable[NDArray[np.float32]]) -> Iterator[NDArray[np.float32]]:
    """Join consecutive parts [n, K] of a weight until they have `HEAD_BYTES`."""
    group: list[NDArray[np.float32]] = []
    for part in parts:
        group.append(part)
        if sum(each.nbytes for each in group) >= HEAD_BYTES:
            yield group[0] if len(group) == 1 else np.concatenate(group)
            group = []
    if group:
        yield np.concatenate(group)


def largest_layer(config: ModelConfig) -> int:
    """Return the size of the largest layer in float32, bytes."""
    sizes = [0] * config.layers
    for name, shape in shapes(config).items():
        if (layer := layer_of(name)) is not None:
            sizes[layer] += 4 * math.prod(shape)
    return max(sizes)


def _states(net: Dialect) -> str:
    return net.graph.input(STATES, "float32", _states_shape(net.config))


def _states_shape(config: ModelConfig) -> list[Dim]:
    streams: list[Dim] = [] if config.streams is None else [config.streams.count]
    return ["T", *streams, config.hidden]


def _layer_inputs_shape(config: ModelConfig) -> list[Dim]:
    assert config.token_inputs is not None
    return ["T", config.token_inputs.width]


def _is_read(config: ModelConfig, output: str) -> bool:
    """Whether later layers read this output: a per-layer input, or a cache that they share."""
    if output.startswith(LAYER_INPUTS):
        return True
    sources = {config.layer(i).kv_source for i in range(config.layers)}
    return output.startswith("present.") and int(output.split(".")[1]) in sources


def _is_product_or_read(config: ModelConfig, output: str) -> bool:
    """Whether this output is the input of a product, or later layers read it."""
    return output.startswith(PRODUCT) or _is_read(config, output)


def _with_context(config: ModelConfig, length: int) -> ModelConfig:
    """Return the configuration for `length` positions, with the same choice of rotary factors."""
    beyond = config.short_context is not None and config.context > config.short_context
    least = (config.short_context or 0) + 1 if beyond else 0
    return msgspec.structs.replace(config, context=max(length, least))


def _feeds(
    session: Any, config: ModelConfig, tokens: NDArray[np.int64], values: Mapping[str, NDArray[Any]]
) -> dict[str, Any]:
    """Return the graph's inputs for one pass over a text with an empty cache."""
    length = len(tokens)
    order = np.arange(length)
    hidden = np.triu(np.full((length, length), HIDDEN_FROM_VIEW, np.float32), 1)
    known = {
        "input_ids": tokens,
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
