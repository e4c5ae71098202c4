"""The shape of a model, in one format for all architectures and sources.

In: Hugging Face's config.json or GGUF metadata, which `export.sources` reads. Out: `ModelConfig`,
which determines the graph except its weights. `Form` lists the parts of a layer; the other fields
are sizes and factors.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from pilotfish.export.parts import Experts, Factors, Recurrence, Rope, Streams, TokenInputs

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
Kind = Literal["attention", "conv", "delta", "space", "both", "selective", "none"]
CACHED: tuple[Kind, ...] = ("attention", "both")  # kinds of layers that have keys and values


class Layer(msgspec.Struct, frozen=True):
    """The properties that differ between the layers of one model.

    Attributes:
        rope: rotary embedding; None = no rotation.
        window: number of positions that a token attends to, including its position; None = all.
        experts: whether the feed-forward part is a mixture of experts.
        kind: token mixer: "attention"; "conv", a gated short convolution (LFM2); "delta", a
        convolution and linear attention by the gated delta rule (Qwen3.5); "space", a state space
        (Mamba-2); "both", attention and a state space in parallel (Falcon-H1); "selective", a
        selective state space (Mamba); or "none".
        has_mlp: whether there is a feed-forward part. A layer without a mixer or without a
        feed-forward part has only one norm, input_layernorm.
        head_dim, kv_heads, intermediate: sizes; None = the model's.
        kv_source: index of the earlier layer with the keys and values that this layer reads; this
        layer then has no k and v projections and no cache. None = the layer computes its own keys
        and values.
        tied_values: whether values equal the keys before norm and rotation.
        sparsity: fraction of the gate's channels that is set to 0 (Gemma 3n). The cutoff for a
        token is the mean of its channels + z · their standard deviation.
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
    """The numbers of query heads and of key heads of a layer, and the width of a head."""

    queries: int
    keys: int
    dim: int

    @property
    def group(self) -> int:
        """The number of query heads per key head."""
        return self.queries // self.keys


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a layer and their order; the defaults are Llama's.

    Attributes:
        norm: type of all norms.
        norms: names of a layer's norms. input_layernorm precedes attention,
        post_attention_layernorm the feed-forward part; attention_out_norm and mlp_out_norm follow
        them.
        norm_bias: whether layer norms have biases (norms of q and k never do).
        learned_norms: whether norms have weights.
        biases: modules with a bias; * stands for an expert's number.
        gated: whether the feed-forward part is activation(gate) · up instead of activation(up).
        parallel: whether attention and feed-forward part read the same residual stream, before
        either is added.
        qk_norm: norm of q and k: per head with equal weights for all heads ("head"); per head with
        weights of each head ("heads"); over all heads together ("all"); None = no norm.
        learned_qk_norm: whether the norm of q and k has weights.
        qk_norm_late: whether the norm of q and k follows the rotation, instead of preceding it.
        value_norm: whether values have a norm per head, without weights.
        gated_attention: whether attention's output is multiplied by sigmoid(gate), a projection of
        its input.
        sub_norms: whether a norm precedes the output projection of attention and feed-forward part.
        sinks: whether the softmax includes a learned score per head that belongs to no token
        (gpt-oss).
        sum_norms: whether norms are applied after the residual sum (opt-350m).
        final_norm: whether a norm follows the last layer.
        embed_norm: whether a norm follows the embedding.
        learned_positions: whether there is a table of position embeddings.
        layer_scale: whether the residual stream after a layer is multiplied by a learned scalar.
    """

    norm: Literal["rms", "layer"] = "rms"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_bias: bool = False
    learned_norms: bool = True
    biases: tuple[str, ...] = ()
    gated: bool = True
    parallel: bool = False
    qk_norm: Literal["head", "heads", "all"] | None = None
    learned_qk_norm: bool = True
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
    """Everything that determines the graph of a decoder, except its weights.

    Attributes:
        name: the model's name, for display.
        model_type: the source's name of the architecture.
        hidden: width of the residual stream.
        heads, kv_heads: numbers of query heads and of key heads.
        head_dim: width of a head; heads · head_dim may differ from `hidden`.
        intermediate: inner width of the feed-forward part.
        context: maximum number of positions.
        vocab_size: number of rows of the embedding, including padding.
        tied: whether the output projection has the weights of the embedding.
        pattern: properties of the layers; layer i has the entry i modulo the pattern's length.
        experts: sizes of the mixtures of experts, if any layer has one.
        embedding: width of the embedding if it differs from `hidden` (opt-350m: project_in/out).
        position_offset: row of the learned position table for position 0 (opt: 2).
        score_scale: factor by which q · k is multiplied; None = 1 / √head_dim.
        score_cap, logit_cap: c in c · tanh(x / c), applied to scores and to logits; None = no cap.
        embed_scale, residual_scale, logit_scale: factors by which the following are multiplied:
            embeddings, a part's output before the residual sum, and logits (gemma, granite,
            cohere).
        recurrence: sizes of the recurrent layers; None if there are none.
        factors: factors by which inputs and outputs of a layer's parts are multiplied (Falcon-H1).
        token_inputs: sizes of the per-layer embeddings; None if there are none.
        streams: sizes of parallel residual streams; None with a single stream.
        head_tokens: number of rows of a cut output projection, which is never tied; None if it is
        whole.
        mask_token: id of the token that stands for an unknown token in a model trained to draft
        several tokens in one pass (`export.sources.mask_keys`); None for other models.
        drafts_per_pass: number of tokens that such a model was trained to draft in one pass; None
        if unknown.
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
    mask_token: int | None = None
    drafts_per_pass: int | None = None

    def layer(self, index: int) -> Layer:
        """Return the properties of a layer."""
        return self.pattern[index % len(self.pattern)]

    def heads_of(self, index: int) -> AttentionHeads:
        """Return the numbers and width of a layer's heads."""
        layer = self.layer(index)
        return AttentionHeads(
            self.heads, layer.kv_heads or self.kv_heads, layer.head_dim or self.head_dim
        )

    @property
    def width(self) -> int:
        """The width of the embedding and of the head's input."""
        return self.embedding or self.hidden

    @property
    def plain(self) -> bool:
        """Whether exactly the layers without states store keys and values of the model's heads."""
        states = set(self.recurrent)
        has_all_caches = self.cached == [i for i in range(self.layers) if i not in states]
        usual = AttentionHeads(self.heads, self.kv_heads, self.head_dim)
        return has_all_caches and {self.heads_of(i) for i in self.cached} <= {usual}

    @property
    def recurrent(self) -> list[int]:
        """The indices of the layers with a recurrent state."""
        return [i for i in range(self.layers) if self.layer(i).kind not in {"attention", "none"}]

    @property
    def cached(self) -> list[int]:
        """The indices of the layers that store keys and values."""
        kinds = map(self.layer, range(self.layers))
        return [
            i for i, layer in enumerate(kinds) if layer.kind in CACHED and layer.kv_source is None
        ]

    @property
    def window(self) -> int | None:
        """The smallest attention window of any layer, positions; None if no layer has one."""
        kinds = (self.layer(i) for i in range(min(self.layers, len(self.pattern))))
        return min((kind.window for kind in kinds if kind.window is not None), default=None)

    @property
    def short_context(self) -> int | None:
        """The largest context for longrope's short frequencies, positions.

        None without longrope.
        """
        stated = (kind.rope.short_context for kind in self.pattern if kind.rope is not None)
        return min((context for context in stated if context is not None), default=None)
