"""A model's shape, in one format for all architectures and sources.

In: Hugging Face's config.json or GGUF metadata (read by `export.sources`). Out: `ModelConfig`, from
which the graph is written. `Form` lists the parts of a layer; other fields are sizes and factors.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from pilotfish.export.parts import Experts, Factors, Recurrence, Rope, Streams, TokenInputs

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
Kind = Literal["attention", "conv", "delta", "space", "both", "selective", "none"]
CACHED: tuple[Kind, ...] = ("attention", "both")  # kinds with keys and values


class Layer(msgspec.Struct, frozen=True):
    """The properties that differ between the layers of one model.

    Attributes:
        rope: rotary embedding; None = no rotation.
        window: number of positions that a token attends to, itself included; None = all.
        experts: whether the feed-forward part is a mixture of experts.
        kind: token mixer: attention, a gated short convolution (conv, LFM2), linear attention by
            the gated delta rule after a convolution (delta, Qwen3.5), a state space (space,
            Mamba-2), attention in parallel with one (both, Falcon-H1), a selective state space
            (selective, Mamba), or none.
        has_mlp: whether there is a feed-forward part. A layer with only a mixer or only a
            feed-forward part has one norm, input_layernorm.
        head_dim, kv_heads, intermediate: sizes; None = the model's.
        kv_source: index of the earlier layer whose keys and values this layer reads; it then has no
            k and v projections and no cache. None = its own.
        tied_values: whether values are the keys before norm and rotation.
        sparsity: fraction of the gate's channels set to 0, by a cutoff at mean + z · deviation of a
            token's channels (Gemma 3n).
    """

    rope: Rope | None = None
    window: int | None = None
    experts: bool = False
    kind: Kind = "attention"
    has_mlp: bool = True
    head_dim: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    kv_source: int | None = None
    tied_values: bool = False
    sparsity: float = 0.0

    @property
    def has_mixer(self) -> bool:
        """Whether the layer has a token mixer."""
        return self.kind != "none"


class AttentionHeads(NamedTuple):
    """Numbers of query and key heads of one layer, and their width."""

    queries: int
    keys: int
    dim: int

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.queries // self.keys


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a layer and their order; the defaults are Llama's.

    Attributes:
        norm: type of all norms.
        norms: names of a layer's norms. input_layernorm and post_attention_layernorm precede
            attention and feed-forward part; attention_out_norm and mlp_out_norm follow them.
        norm_bias: whether layer norms have biases (those of q and k never have).
        learned_norms: whether norms have weights.
        biases: modules with a bias; * stands for an expert's number.
        gated: whether the feed-forward part is activation(gate) · up instead of activation(up).
        parallel: whether attention and feed-forward part read the same residual stream.
        qk_norm: norm of q and k: per head with one weight for all heads ("head") or a weight per
            head ("heads"), or over all heads together ("all"); None without one.
        qk_norm_late: whether that norm follows the rotation instead of preceding it.
        value_norm: whether values are normed per head, without weights.
        gated_attention: whether the attention output is multiplied by sigmoid(gate) of the input.
        sub_norms: whether a norm precedes the output projection of attention and feed-forward part.
        sinks: whether the softmax has one more learned score per head, for no token (gpt-oss).
        sum_norms: whether norms follow the residual sum (opt-350m).
        final_norm: whether a norm follows the last layer.
        embed_norm: whether a norm follows the embedding.
        learned_positions: whether there is a table of position embeddings.
        layer_scale: whether a layer's output, residual included, is multiplied by a learned scalar.
    """

    norm: Literal["rms", "layer"] = "rms"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_bias: bool = False
    learned_norms: bool = True
    biases: tuple[str, ...] = ()
    gated: bool = True
    parallel: bool = False
    qk_norm: Literal["head", "heads", "all"] | None = None
    qk_norm_late: bool = False
    value_norm: bool = False
    gated_attention: bool = False
    sub_norms: bool = False
    sinks: bool = False
    sum_norms: bool = False
    final_norm: bool = True
    embed_norm: bool = False
    learned_positions: bool = False
    layer_scale: bool = False


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the graph of a decoder depends on, except its weights.

    Attributes:
        name: the model's name, for display.
        model_type: the source's name of the architecture.
        hidden: width of the residual stream.
        heads, kv_heads: numbers of query heads and of key heads.
        head_dim: width of a head; heads · head_dim may differ from `hidden`.
        intermediate: inner width of the feed-forward part.
        context: maximum number of positions.
        vocab_size: rows of the embedding, padding included.
        tied: whether the output projection is the embedding.
        pattern: properties of the layers; layer i has those of entry i modulo its length.
        experts: sizes of the mixtures of experts, if any layer has one.
        embedding: width of the embedding if it is not `hidden` (opt-350m: project_in/out).
        position_offset: row of the learned position table for position 0 (opt: 2).
        score_scale: factor of q · k; None = 1 / √head_dim.
        score_cap, logit_cap: c in c · tanh(x / c).
        embed_scale, residual_scale, logit_scale: factors (gemma, granite, cohere).
        recurrence: sizes of the recurrent layers; None without any.
        factors: factors of a layer's parts (Falcon-H1).
        token_inputs: sizes of the per-layer embeddings; None without.
        streams: parallel residual streams; None with a single one.
        head_tokens: rows of an output projection that was cut to some tokens (never tied).
        query_growth: (β, n): q is multiplied by 1 + β · ln(1 + ⌊position / n⌋) (Ministral 3).
    """

    name: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int
    vocab_size: int
    tied: bool
    norm_eps: float
    form: Form = Form()
    pattern: tuple[Layer, ...] = (Layer(),)
    activation: Activation = "silu"
    experts: Experts | None = None
    embedding: int | None = None
    position_offset: int = 0
    score_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    recurrence: Recurrence | None = None
    factors: Factors = Factors()
    token_inputs: TokenInputs | None = None
    streams: Streams | None = None
    query_growth: tuple[float, int] | None = None
    head_tokens: int | None = None

    def layer(self, index: int) -> Layer:
        """Return the properties of a layer."""
        return self.pattern[index % len(self.pattern)]

    def heads_of(self, index: int) -> AttentionHeads:
        """Return the heads of a layer's attention, its own or the model's."""
        layer = self.layer(index)
        return AttentionHeads(
            self.heads, layer.kv_heads or self.kv_heads, layer.head_dim or self.head_dim
        )

    @property
    def plain(self) -> bool:
        """Whether each layer has a recurrent state or its own keys and values of `plain_heads`."""
        states = set(self.recurrent)
        has_all_caches = self.cached == [i for i in range(self.layers) if i not in states]
        return has_all_caches and {self.heads_of(i) for i in self.cached} <= {self.plain_heads}

    @property
    def plain_heads(self) -> AttentionHeads:
        """The heads of layers without sizes of their own."""
        return AttentionHeads(self.heads, self.kv_heads, self.head_dim)

    @property
    def recurrent(self) -> list[int]:
        """The layers with a recurrent state."""
        return [i for i in range(self.layers) if self.layer(i).kind not in {"attention", "none"}]

    @property
    def cached(self) -> list[int]:
        """The layers with a cache of their own keys and values."""
        kinds = map(self.layer, range(self.layers))
        return [
            i for i, layer in enumerate(kinds) if layer.kind in CACHED and layer.kv_source is None
        ]

    @property
    def window(self) -> int | None:
        """The smallest window of any layer; None if no layer has one."""
        kinds = (self.layer(i) for i in range(min(self.layers, len(self.pattern))))
        return min((kind.window for kind in kinds if kind.window is not None), default=None)

    @property
    def short_context(self) -> int | None:
        """The context of longrope's short frequencies; None without longrope."""
        stated = (kind.rope.short_context for kind in self.pattern if kind.rope is not None)
        return min((context for context in stated if context is not None), default=None)
