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

from pilotfish.export.dialects.dialect import HEAD_NORMS
from pilotfish.export.dialects.operators import WeightReader
from pilotfish.export.dialects.opset24 import Opset24
from pilotfish.export.graph import GraphWriter
from pilotfish.export.model_config import Layer, ModelConfig
from pilotfish.export.network import write_head, write_inputs, write_layer
from pilotfish.export.weights import EMBEDDING, HEAD_BIAS, XIELU

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
    yield from net.take()
    kinds: dict[Layer, list[tuple[str, Shape]]] = {}
    for i in range(config.layers):
        prefix, kind = f"model.layers.{i}.", config.layer(i)
        if kind not in kinds:
            write_layer(net, config, i, x, layer_inputs[0] if layer_inputs else None)
            kinds[kind] = [(name.removeprefix(prefix), shape) for name, shape in net.take()]
        for name, shape in kinds[kind]:
            yield prefix + name, shape
    write_head(net, config, x)
    yield from net.take()


class _Recorder(Opset24):
    """A dialect that records the weights instead of reading them; its graph is discarded."""

    def __init__(self, config: ModelConfig) -> None:
        no_source = cast("WeightReader", None)  # all methods that read weights are overridden
        super().__init__(GraphWriter(io.BytesIO(), ""), config, no_source, "fp32")
        self._recorded: list[tuple[str, Shape]] = []

    def take(self) -> list[tuple[str, Shape]]:
        """Return the weights that were recorded since the last call."""
        recorded, self._recorded = self._recorded, []
        return recorded

    def read(self, name: str, *shape: int) -> NDArray[np.float32]:
        """Record a weight; return zeros of a small shape that stands for it."""
        self._recorded.append((name, shape))
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

    def norm(self, x: str, name: str, width: int) -> str:
        """Record the weights of a norm, if it has any."""
        if self.config.form.learned_norms:
            self.read(f"{name}.weight", width)
            if self.config.form.norm_bias and not name.endswith(HEAD_NORMS):
                self.read(f"{name}.bias", width)
        return x

    def embed(self, name: str) -> str:
        """Record the embedding."""
        self.read(name, self.config.vocab_size, self.config.width)
        return self.tokens

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

    def activation(self, x: str, module: str) -> str:
        """Record the parameters of xielu."""
        for part in XIELU if self.config.activation == "xielu" else ():
            self.read(f"{module}.act_fn.{part}", 1)
        return x

    def attention(self, layer: int, qkv: str) -> str:
        """Record the weights of the norms per head, and the sinks."""
        form, heads = self.config.form, self.config.heads_of(layer)
        module = f"model.layers.{layer}.self_attn"
        if form.sinks:
            self.read(f"{module}.sinks", heads.queries)
        norms = {"q_norm": heads.queries, "k_norm": heads.keys}
        if self.config.layer(layer).kv_source is not None:
            del norms["k_norm"]
        learned = form.learned_norms and form.learned_qk_norm
        if form.qk_norm in {"head", "heads"} and learned:
            for name, count in norms.items():
                each = () if form.qk_norm == "head" else (count,)
                self.read(f"{module}.{name}.weight", *each, heads.dim)
        return qkv

    def experts(self, x: str, scores: str, module: str) -> str:
        """Record the weights of each expert."""
        experts = self.config.experts
        assert experts is not None
        outer, width = experts.latent or self.config.hidden, experts.width
        parts = ("gate_proj", "up_proj") if self.config.form.gated else ("up_proj",)
        for j in range(experts.count):
            name = f"{module}.experts.{j}"
            self.linear(x, outer, {f"{name}.{part}": width for part in parts})
            self.linear(x, width, {f"{name}.down_proj": outer})
        if experts.biased:
            self.read(f"{module}.expert_bias", experts.count)
        if experts.parallel_mlp:
            self.read(f"{module}.router_scale", experts.count)
        return x

    def finish(self, hidden: str, head: str) -> None:
        """Record the head, if it is not the embedding, and its bias."""
        rows = self.config.head_tokens or self.config.vocab_size
        if head != EMBEDDING:
            self.read(head, rows, self.config.width)
        if "lm_head" in self.config.form.biases:
            self.read(HEAD_BIAS, rows)
