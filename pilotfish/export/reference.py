"""Compute a model's predictions in float32, one layer at a time.

In: a source of weights and a text. Out: logits. Only one layer's weights at a time are in the
temporary graph and in memory, so the model may be larger than the machine's memory.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.passes import HIDDEN_FROM_VIEW
from pilotfish.engines.runtime import OPSET24_SINCE, open_session, runtime_version
from pilotfish.export.dialects import DIALECTS, Dialect
from pilotfish.export.graph import Dim, GraphWriter
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.network import write_embedding, write_head, write_layer
from pilotfish.export.sources import WeightSource
from pilotfish.export.streams import open_streams
from pilotfish.export.token_inputs import write_token_inputs
from pilotfish.export.weight_sizes import LAYER
from pilotfish.export.weights import weights

CPU = "CPUExecutionProvider"
STATES, NEXT = "states", "next_states"
PRODUCT = "product."  # begins the name of an output that is the input of a product
LAYER_INPUTS = "token_inputs"  # per-layer embeddings of the tokens, [T, width]

Floats = NDArray[np.float32]


class Reference:
    """A float32 run of a model, which reads the weights from the source for each text.

    Args:
        source: the model's weights.
        config: the model's shape, with the context of the artifact to compare.
        folder: folder for temporary graphs.
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

        def embedding(net: Dialect) -> str:
            x = write_embedding(net, config)
            for i, inputs in enumerate(write_token_inputs(net, config, x)):
                if inputs is not None:
                    net.graph.op("Identity", inputs, name=f"{LAYER_INPUTS}.{i}")
                    net.graph.output(f"{LAYER_INPUTS}.{i}", "float32", _layer_inputs_shape(config))
            return open_streams(net, config, x)

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
        for write in (embedding, *map(layer, range(config.layers))):
            with self._session(config, write) as session:
                names = [item.name for item in session.get_outputs()]
                read = [name for name in names if name == NEXT or wanted(config, name)]
                outputs = session.run(read, _feeds(session, config, tokens, values))
            values |= dict(zip(read, outputs, strict=True))
            values[STATES] = values.pop(NEXT)
            yield values

    @contextmanager
    def head(self, states: Floats) -> Iterator[Callable[[int, int], Floats]]:
        """Yield a function that returns the logits of rows start … end of `states` [T, hidden]."""
        tokens = np.zeros(len(states), np.int64)
        config = _with_context(self._config, len(states))

        def write(net: Dialect) -> None:
            write_head(net, config, _states(net))

        with self._session(config, write) as session:

            def logits(start: int, end: int) -> Floats:
                feeds = _feeds(session, config, tokens, {STATES: states}) | {
                    "logit_rows": np.arange(start, end)
                }
                (result,) = session.run(["logits"], feeds)
                return np.asarray(result, np.float32)

            yield logits

    @contextmanager
    def _session(
        self, config: ModelConfig, write: Callable[[Dialect], str | None]
    ) -> Iterator[Any]:
        """Yield a session of the graph that `write` writes; its return value becomes an output."""
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            path = Path(name) / "part.onnx"
            with path.with_suffix(".data").open("wb") as data:
                graph = GraphWriter(data, "part.data")
                net = self._dialect(graph, config, self._source, "fp32")
                if (answer := write(net)) is not None:
                    graph.op("Identity", answer, name=NEXT)
                    graph.output(NEXT, "float32", _states_shape(config))
                graph.save(path, opset=net.opset)
            yield open_session(path, None, CPU)


def largest_part(config: ModelConfig) -> int:
    """Return the size of the largest graph that a `Reference` writes, bytes."""
    sizes: dict[str, int] = {}
    for name, shape in weights(config):
        layer = LAYER.search(name)
        part = layer[1] if layer else name
        sizes[part] = sizes.get(part, 0) + 4 * math.prod(size.value for size in shape)
    return max(sizes.values())


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
    session: Any, config: ModelConfig, tokens: NDArray[np.int64], values: Mapping[str, Floats]
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
