"""List a model's weights and their shapes: record what the network reads.

In: a `ModelConfig`. Out: name and shape of each weight. The network is written without weights, so
its structure is described only once, in `export.network`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray

from pilotfish.export.dialects.operators import WeightReader
from pilotfish.export.dialects.opset24 import Opset24
from pilotfish.export.graph import GraphWriter
from pilotfish.export.model_config import AttentionHeads, Layer, ModelConfig
from pilotfish.export.network import write_head, write_inputs, write_layer

Shape = tuple[int, ...]


def shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every weight."""
    return dict(weights(config))


def weights(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield name and shape of every weight, in the order of the network.

    One layer of each kind is recorded, when it is reached, since a damaged number of layers may be
    huge.
    """
    net = _Recorder(config)
    x, layer_inputs = write_inputs(net, config)
    yield from net.recorded
    kinds: dict[Layer, list[tuple[str, Shape]]] = {}
    for i in range(config.layers):
        prefix, kind = f"model.layers.{i}.", config.layer(i)
        if kind not in kinds:
            layer = _Recorder(config)
            write_layer(layer, config, i, x, layer_inputs[0] if layer_inputs else None)
            kinds[kind] = [(name.removeprefix(prefix), shape) for name, shape in layer.recorded]
        for name, shape in kinds[kind]:
            yield prefix + name, shape
    count = len(net.recorded)
    write_head(net, config, x)
    yield from net.recorded[count:]


class _Recorder(Opset24):
    """A dialect that records the weights instead of reading them; its graph is discarded.

    Attributes:
        recorded: name and shape of each weight.
    """

    def __init__(self, config: ModelConfig) -> None:
        no_source = cast("WeightReader", None)  # all methods that read weights are overridden
        super().__init__(GraphWriter(io.BytesIO(), ""), config, no_source, "fp32")
        self.recorded: list[tuple[str, Shape]] = []

    def read(self, name: str, *shape: int) -> NDArray[np.float32]:
        """Record a weight; return zeros of a small shape that stands for it."""
        self.recorded.append((name, shape))
        return np.zeros([min(size, 1) for size in shape], np.float32)

    def linear(
        self, x: str, width: int, outputs: Mapping[str, int], *, rounded: bool = True
    ) -> str:
        """Record the weights of projections, and their biases."""
        for name, rows in outputs.items():
            self.read(f"{name}.weight", rows, width)
            if self.has_bias(name):
                self.read(f"{name}.bias", rows)
        return x

    def embed_for_layers(self, name: str) -> str:
        """Record the table of per-layer embeddings."""
        assert self.config.token_inputs is not None
        rows, width = self.config.token_inputs.rows, self.config.token_inputs.width
        self.read(name, rows, self.config.layers * width)
        return self.tokens

    def embed_positions(self, name: str) -> str:
        """Record the learned position table."""
        rows = self.config.context + self.config.position_offset
        self.read(name, rows, self.config.hidden)
        return self.tokens

    def attention(self, layer: int, qkv: str) -> str:
        """Record the weights of the norms per head, and the sinks; tables may be huge."""
        kind, heads = self.config.layer(layer), self.config.heads_of(layer)
        module = f"model.layers.{layer}.self_attn"
        if self.config.form.sinks:
            self.read(f"{module}.sinks", heads.queries)
        self.prepare_heads(qkv, f"{module}.q_norm", heads, None)
        if kind.kv_source is None:
            keys = AttentionHeads(heads.keys, heads.keys, heads.dim)
            self.prepare_heads(qkv, f"{module}.k_norm", keys, None)
        return qkv

    def _ones(self, width: int) -> str:
        """Return a value that stands for a norm's weight of ones, which may be huge."""
        return self.tokens
