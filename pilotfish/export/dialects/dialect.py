"""The base of dialects: the operations with which `export.network` writes a model.

A dialect writes linear maps, norms and attention as ONNX operators. The tokens of all slots are
packed in one axis of length T without padding. Only in attention is there a batch axis, with an
entry per slot:

    input_ids, position_ids [T] i64     logit_rows [N] i64: the rows of T to output
    past.{i}.key/value [B, kv_heads, C, head_dim], bound to the memory of present.{i}.key/value
    hidden_states [N, width] f32 (after the final norm), logits [N, vocabulary] f32

Subclasses choose the operators, and add the graph inputs that their attention needs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.manifest import Dialect as DialectName
from pilotfish.engines.manifest import Precision
from pilotfish.export.blocks import Quantized
from pilotfish.export.dialects.attention_inputs import AttentionInputs
from pilotfish.export.dialects.operators import WeightReader
from pilotfish.export.dialects.quantized_weights import (
    code_rows,
    look_up,
    product,
    projection,
)
from pilotfish.export.dialects.weight_forms import WeightForms
from pilotfish.export.graph import ELEMENT, GraphWriter
from pilotfish.export.model_config import AttentionHeads, ModelConfig
from pilotfish.export.parts import Rope
from pilotfish.export.quantize import quantize_rows
from pilotfish.export.weights import HEAD_BIAS, LAYER, XIELU, wildcard_name

HEAD_NORMS = ("q_norm", "k_norm")
MICROSOFT = "com.microsoft"


class Dialect(AttentionInputs):
    """A writer of one model's graph, with the operators of one dialect.

    Attributes:
        products: names of the weights of each product that may be rounded, joined by "+" → the name
            and the width of its input.
        forms: the forms of the weights.
        heads_first: whether q and k are [B, heads, S, head_dim] in `prepare_heads`, instead of
            [T, heads · head_dim].
    """

    name: ClassVar[DialectName]
    contrib: ClassVar[bool] = False
    heads_first: ClassVar[bool] = True
    precisions: ClassVar[Sequence[str]]

    def __init__(
        self, graph: GraphWriter, config: ModelConfig, source: WeightReader, precision: Precision
    ) -> None:
        super().__init__(graph, config, source, precision)
        self.forms = WeightForms(source, precision)
        self.products: dict[str, tuple[str, int]] = {}
        self.declare_inputs()

    def declare_inputs(self) -> None:
        """Declare the tokens, their positions, and the rows to output."""
        super().declare_inputs()
        self.logit_rows = self.graph.input("logit_rows", "int64", ["N"])

    # --- for subclasses --------------------------------------------------------------------

    @abstractmethod
    def rms_norm(self, x: str, weight: str) -> str:
        """Compute x / rms(x) · weight over the last axis; `weight` is a value's name."""

    @abstractmethod
    def rotate(self, x: str, rope: Rope, heads: AttentionHeads) -> str:
        """Apply the rotary embedding to each head of x."""

    @abstractmethod
    def attention(self, layer: int, qkv: str) -> str:
        """Write attention with norm, rotation and cache update; qkv [T, q + k + v] → [T, q].

        `config.form` defines the norms per head; `config.layer(layer)` defines rotation, window and
        widths. If the layer reads another layer's keys and values, `qkv` is only q. If values equal
        the keys before their norm, `qkv` has no v.
        """

    @abstractmethod
    def gelu(self, x: str, *, tanh: bool) -> str:
        """Compute x · Φ(x), or its tanh approximation."""

    @abstractmethod
    def experts(self, x: str, scores: str, module: str) -> str:
        """Write the weighted sum of the chosen experts' outputs; x [T, hidden] → [T, hidden].

        `scores` f32 [T, experts] are the router's output; `config.experts` has the sizes.
        """

    # --- layers ----------------------------------------------------------------------------

    def linear(
        self, x: str, width: int, outputs: Mapping[str, int], *, rounded: bool = True
    ) -> str:
        """Write projections of x as one product; [T, width] → [T, ΣN].

        `outputs` are modules with `name.weight` [N, width] and, according to `config.form`,
        `name.bias` [N], and their N. If some modules have a bias, the others get zeros. The weights
        are quantised only if `rounded` is true.
        """
        label, names = "+".join(outputs), [*outputs]
        weights = self.forms.read_product(label, names, rounded=rounded)
        bias = None
        if any(map(self.has_bias, names)):
            parts = [
                self.read(f"{name}.bias", rows) if self.has_bias(name) else np.zeros(rows, "f4")
                for name, rows in outputs.items()
            ]
            bias = self.weight(f"{label}.bias", array=np.concatenate(parts))
        floats = [weight for weight in weights if not isinstance(weight, Quantized)]
        if len(floats) < len(weights):
            total = projection(self, x, names, weights)
            return self.graph.op("Add", total, bias) if bias else total
        if rounded:
            self.products[label] = (x, width)
        weight = floats[0] if len(floats) == 1 else np.concatenate(floats)
        del weights, floats
        return self._gemm(x, f"{label}.weight", weight, bias)

    def route(self, x: str, name: str) -> str:
        """Write the router `name` of a mixture of experts; x [T, hidden] → f32 [T, experts].

        It is computed in float32, because a rounding error could select another expert.
        """
        assert self.config.experts is not None
        x, count = self.to_float32(x), self.config.experts.count
        operands = [self.float32_weight(f"{name}.weight", count, self.config.hidden)]
        if self.has_bias(name):
            operands.append(self.float32_weight(f"{name}.bias", count))
        return self.graph.op("Gemm", x, *operands, transB=1)

    def code_rows(self, name: str, weight: Quantized, tokens: str) -> str:
        """Look up rows of a weight's codes minus `zero_point`, [T, K / block, block]."""
        return code_rows(self, name, weight, tokens)

    def embed(self, name: str) -> str:
        """Look up the embeddings of the packed tokens, [T, width].

        They are rounded like the head, so that a tied head has the same codes.
        """
        shape = self.config.vocab_size, self.config.width
        # In int4 a tied head has other blocks, of 8 bits.
        shared = self.config.tied and not self.forms.keeps_blocks
        blocks = None if shared else self.forms.read_blocks(name)
        if blocks is not None and blocks.order is None:
            return look_up(self, name, blocks, self.tokens)
        if self.forms.bits is None:
            return self.graph.op("Gather", self.weight(name, *shape), self.tokens)
        assert self.forms.head_bits is not None
        table = self.forms.round(name, self.read(name, *shape), self.forms.head_bits)
        return look_up(self, name, table, self.tokens)

    def embed_for_layers(self, name: str) -> str:
        """Look up the tokens' rows in the table of per-layer embeddings, [T, layers · width].

        The table is read and written a few rows at a time. If weights are quantised, the table is
        int8 with a scale for each row and layer.
        """
        inputs = self.config.token_inputs
        assert inputs is not None
        tokens, width = self.tokens, inputs.width
        if inputs.rows < self.config.vocab_size:
            inside = self.graph.op("Greater", self.graph.constant(inputs.rows, "int64"), tokens)
            tokens = self.graph.op("Where", inside, tokens, self.graph.constant(0, "int64"))
        blocks = self.forms.read_blocks(name)
        if blocks is not None and blocks.order is None:
            return look_up(self, name, blocks, tokens)
        shape = (inputs.rows, self.config.layers * width)
        parts = self.source.rows(name)
        if self.forms.bits is None:
            floats = (part.astype(self.float, copy=False) for part in parts)
            return self.graph.op(
                "Gather", self.graph.stream_weight(name, shape, self.float, floats), tokens
            )
        scales: list[NDArray[np.float32]] = []

        def codes() -> Iterator[NDArray[np.int8]]:
            for part in parts:
                rounded, scale = quantize_rows(part.reshape(-1, width))
                scales.append(scale)
                yield rounded

        row = self.cast(self.signed_rows(f"{name}.row_codes", shape, codes(), tokens), self.float)
        factors = np.concatenate(scales).reshape(inputs.rows, -1)
        scale = self.graph.op("Gather", self.graph.weight(f"{name}.row_scales", factors), tokens)
        by_layer = self.reshape(row, [-1, self.config.layers, width])
        return self.multiply(by_layer, self.unsqueeze(scale, 2))

    def embed_positions(self, name: str) -> str:
        """Look up rows of a learned position table, [T, width]."""
        offset = self.graph.constant(self.config.position_offset, "int64")
        rows = self.graph.op("Add", self.positions, offset)
        table = self.source.tensor(name)  # with rows for the source's context, which may be larger
        return self.graph.op("Gather", self.weight(name, array=table), rows)

    def norm(self, x: str, name: str, width: int) -> str:
        """Apply the norm of module `name` over the last axis of x, which has this width.

        `config.form` has the norm's type.
        """
        form, of_heads = self.config.form, name.endswith(HEAD_NORMS)
        learned = form.learned_norms and (form.learned_qk_norm or not of_heads)
        weight = self.weight(f"{name}.weight", width) if learned else self._ones(width)
        if form.norm == "rms":
            return self.rms_norm(x, weight)
        biased = learned and form.norm_bias and not of_heads
        bias = [self.weight(f"{name}.bias", width)] if biased else []
        epsilon = self.config.norm_eps
        return self.graph.op("LayerNormalization", x, weight, *bias, axis=-1, epsilon=epsilon)

    def norm_values(self, x: str, heads: AttentionHeads) -> str:
        """Apply the form's norm of values, which has no weights, to each head of x."""
        return self.rms_norm(x, self._ones(heads.dim)) if self.config.form.value_norm else x

    def prepare_heads(self, x: str, norm: str, heads: AttentionHeads, rope: Rope | None) -> str:
        """Apply the norm of module `norm` and the rotation to each head of q or k, as in the form.

        heads: the number of heads of x, as `queries`, and their width.
        """
        form = self.config.form
        if form.qk_norm_late and rope is not None:
            x = self.rotate(x, rope, heads)
        if form.qk_norm in {"head", "heads"}:
            x = self.norm_heads(x, norm, heads)
        if not form.qk_norm_late and rope is not None:
            x = self.rotate(x, rope, heads)
        return x

    def norm_heads(self, x: str, name: str, heads: AttentionHeads) -> str:
        """Apply the norm of module `name` to each head of q or k, over the last axis of x."""
        if self.config.form.qk_norm != "heads":
            return self.norm(x, name, heads.dim)
        ones = self._ones(heads.dim)
        if self.config.form.norm == "rms":
            normed = self.rms_norm(x, ones)
        else:
            epsilon = self.config.norm_eps
            normed = self.graph.op("LayerNormalization", x, ones, axis=-1, epsilon=epsilon)
        weight = self.read(f"{name}.weight", heads.queries, heads.dim)
        if self.heads_first:
            weight = weight[:, None]
        return self.multiply(normed, self.weight(f"{name}.weight", array=weight))

    def activation(self, x: str, module: str) -> str:
        """Apply the model's activation to x; xielu also reads parameters of `module`."""
        op, kind = self.graph.op, self.config.activation
        if kind == "silu":
            return self.silu(x)
        if kind in {"gelu", "gelu_tanh"}:
            return self.gelu(x, tanh=kind == "gelu_tanh")
        if kind == "xielu":
            return self._xielu(x, f"{module}.act_fn")
        positive = op("Relu", x)
        return positive if kind == "relu" else self.multiply(positive, positive)

    def update_state(self, rows: Sequence[str], missing: str, states: Sequence[str]) -> str:
        """Write the update of a layer's state by tokens.

        Return the pass's outputs, f32 [1, T, values].

        Args:
            rows: q, k, v, the log decay and, for the delta rule, the write rate; f32 [c + T, …]
            each.
            missing: c, the number of tokens to replay, i64 [1].
            states: names of three states, f32 [1, heads, key_dim, value_dim] each: the input, which
            is the state c tokens before this pass, and two outputs, the states just before and
            after this pass.
        """
        graph = self.graph
        sizes = graph.op("Concat", missing, graph.op("Shape", self.tokens), axis=0)
        parts = [
            graph.multi("Split", row, sizes, names=graph.new_names("Split", 2)) for row in rows
        ]
        past, settled, present = states
        self._linear_attention([part[0] for part in parts], past, settled)
        return self._linear_attention([part[1] for part in parts], settled, present)

    def _linear_attention(self, rows: Sequence[str], past: str, present: str) -> str:
        """Write LinearAttention over all `rows`, from state `past` to `present`.

        Return the outputs.
        """
        dims = self.config.recurrence
        assert dims is not None
        q, k, v, *rates = (self.unsqueeze(row, 0) for row in rows)
        answer = self.graph.new_names("LinearAttention", 1)[0]
        self.graph.multi(
            "LinearAttention",
            q,
            k,
            v,
            past,
            *rates,
            names=[answer, present],
            domain=MICROSOFT,
            q_num_heads=dims.key_heads,
            kv_num_heads=dims.heads,
            update_rule="gated_delta" if dims.space is None else "gated",
            scale=dims.key_dim**-0.5 if dims.space is None else 1.0,
        )
        return answer

    def finish(self, hidden: str, head: str) -> None:
        """Declare the graph's outputs for the rows wanted.

        `head` names the output projection's weight.
        """
        rows = self.graph.op("Gather", hidden, self.logit_rows, axis=0)
        count, width = self.config.head_tokens or self.config.vocab_size, self.config.width
        bias = self.weight(HEAD_BIAS, count) if "lm_head" in self.config.form.biases else None
        blocks, bits = None, self.forms.head_bits
        if self.forms.keeps_blocks:
            blocks = self.forms.read_blocks(head)
        elif bits is not None:
            blocks = self.forms.round(head, self.read(head, count, width), bits)
        if blocks is not None:
            logits = product(self, rows, head, blocks)
            logits = self.graph.op("Add", logits, bias) if bias else logits
        elif self.graph.has(head):
            logits = self.graph.op("Gemm", rows, head, *([bias] if bias else []), transB=1)
        else:
            logits = self._gemm(rows, head, self.read(head, count, width), bias)
        logits = self.cap(self.scale(logits, self.config.logit_scale), self.config.logit_cap)
        self._output("hidden_states", rows, width)
        self._output("logits", logits, count)

    def _gemm(self, x: str, name: str, weight: NDArray[np.float32], bias: str | None) -> str:
        operands = [x, self.weight(name, array=weight), *([bias] if bias else [])]
        return self.graph.op("Gemm", *operands, transB=1)

    def has_bias(self, name: str) -> bool:
        """Whether the module `name` has a bias."""
        layer = LAYER.search(name)
        inner = name if layer is None else name[layer.end() :]
        return wildcard_name(inner) in self.config.form.biases

    def _ones(self, width: int) -> str:
        """Write a vector of ones, the weight of a norm without weights."""
        return self.weight(f"ones.{width}", array=np.ones(width, np.float32))

    def _xielu(self, x: str, name: str) -> str:
        """Compute α_p x² + βx above 0, and α_n (eᵐⁱⁿ⁽ˣ’ᵋ⁾ − 1 − x) + βx below (Apertus)."""
        op = self.graph.op
        stated = (float(self.read(f"{name}.{part}", 1)[0]) for part in XIELU)
        alpha_p, alpha_n, beta, eps = stated
        positive, negative = (float(np.logaddexp(0.0, alpha)) for alpha in (alpha_p, alpha_n))
        above = self.scale(self.multiply(x, x), positive)
        least = op("Min", x, self.graph.constant(eps, self.float))
        power = op("Sub", op("Exp", least), self.graph.constant(1.0, self.float))
        below = self.scale(op("Sub", power, x), beta + negative)
        result = op("Where", op("Greater", x, self.graph.constant(0.0, self.float)), above, below)
        return self.add(result, self.scale(x, beta))

    def _output(self, name: str, value: str, width: int) -> None:
        self.graph.output(name, "float32", ["N", width])
        if self.float == "float32":
            self.graph.op("Identity", value, name=name)
        else:
            self.graph.op("Cast", value, name=name, to=ELEMENT["float32"])
