"""A model's shape, in one form for all architectures and all kinds of source.

In: Hugging Face's config.json or GGUF metadata (read by `export.sources`). Out: `ModelConfig`, from
which the graph is written. `Form` says which parts a layer has, the rest are numbers.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from pilotfish.export.parts import Experts, Factors, Recurrence, Rope, Streams, TokenInputs

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
Kind = Literal["attention", "conv", "delta", "space", "both", "selective", "none"]
CACHED: tuple[Kind, ...] = ("attention", "both")  # have keys and values


class Layer(msgspec.Struct, frozen=True):
    """What differs between the layers of one model.

    Attributes:
        window: the number of positions that a token sees, itself included; None = all.
        experts: the feed-forward part is a mixture.
        kind: what mixes the tokens: attention, a gated short convolution (LFM2), linear attention
            by the gated delta rule behind a convolution (Qwen3.5), a state space (Mamba-2),
            attention beside one (Falcon-H1), a selective one (Mamba), or nothing.
        fed: there is a feed-forward part. A layer of one part has one norm, input_layernorm.
        head_dim, kv_heads, intermediate: where they are not the model's.
        reads: the earlier layer whose keys and values it reads instead of its own; it then has no
            projections of them, and no cache.
        tied_values: values are the keys before their norm and rotation.
        sparsity: share of the gate's channels that a cutoff at its own mean and deviation takes
            out, if they were normal (Gemma 3n).
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
        """Whether tokens read others here."""
        return self.kind != "none"


class AttentionHeads(NamedTuple):
    """The heads of one layer's attention: how many, and of which width."""

    queries: int
    keys: int
    dim: int

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.queries // self.keys


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a layer, and how they hang together; the defaults are Llama's.

    Attributes:
        norm: which kind all norms are.
        norms: those of a layer. input_layernorm and post_attention_layernorm stand before attention
            and feed-forward part, attention_out_norm and mlp_out_norm behind them.
        norm_bias: layer norms have biases, but for those of q and k.
        learned_norms: norms have weights.
        biases: modules that have one; * stands for an expert's number.
        gated: the feed-forward part is activation(gate) · up, not activation(up).
        parallel: attention and feed-forward part read the same residual stream.
        qk_norm: q and k are normed by head, with one weight for all heads ("head") or one each
            ("heads"), or over all heads at once ("all").
        qk_norm_late: behind the rotation instead of before it.
        value_norm: values are normed by head, without weights.
        gated_attention: attention's answer is multiplied by sigmoid(gate) of the same input.
        sub_norms: a norm before the output projection of attention and feed-forward part.
        sinks: attention's softmax has one more score a head, learned, of no token (gpt-oss).
        sum_norms: norms follow the residual sum (opt-350m).
        final_norm: there is a norm after the last layer.
        embed_norm: there is one after the embedding.
        learned_positions: there is a table of them.
        layer_scale: a layer's answer, and its stream, are multiplied by a number of its own.
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
    """Everything that the graph of a decoder depends on, besides its weights.

    Attributes:
        name: the model's name, for display.
        model_type: the source's own name of the architecture.
        head_dim: of one head; heads * head_dim need not equal `hidden`.
        context: the largest number of positions.
        vocab_size: rows of the embedding, padding included.
        tied: the output projection is the embedding.
        pattern: the kinds of layers; layer i is of the kind i modulo their number.
        experts: those of the layers that have any.
        embedding: width of the embedding where it is not `hidden` (opt-350m: project_in/out).
        position_offset: row of the learned position table that position 0 uses (opt: 2).
        score_scale: of q · k; None = 1 / √head_dim.
        score_cap, logit_cap: c of c · tanh(x / c).
        embed_scale, residual_scale, logit_scale: factors (gemma, granite, cohere).
        recurrence: of the layers without keys and values; None where all have them.
        factors: of the parts of a layer (Falcon-H1).
        token_inputs: embeddings for each layer; None without.
        streams: None where there is one.
        head_tokens: rows of the output projection where it was cut to some of the tokens, and so is
            no embedding.
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
        """Return the kind of a layer."""
        return self.pattern[index % len(self.pattern)]

    def heads_of(self, index: int) -> AttentionHeads:
        """Return the heads of a layer's attention."""
        layer = self.layer(index)
        return AttentionHeads(
            self.heads, layer.kv_heads or self.kv_heads, layer.head_dim or self.head_dim
        )

    @property
    def plain(self) -> bool:
        """Whether each layer has a state, or keys and values of its own, of `plain_heads`."""
        states = set(self.recurrent)
        has_all_caches = self.cached == [i for i in range(self.layers) if i not in states]
        return has_all_caches and {self.heads_of(i) for i in self.cached} <= {self.plain_heads}

    @property
    def plain_heads(self) -> AttentionHeads:
        """The heads of layers that state none of their own."""
        return AttentionHeads(self.heads, self.kv_heads, self.head_dim)

    @property
    def recurrent(self) -> list[int]:
        """The layers that keep a state."""
        return [i for i in range(self.layers) if self.layer(i).kind not in {"attention", "none"}]

    @property
    def cached(self) -> list[int]:
        """The layers that keep keys and values of their own."""
        kinds = map(self.layer, range(self.layers))
        return [
            i for i, layer in enumerate(kinds) if layer.kind in CACHED and layer.kv_source is None
        ]

    @property
    def window(self) -> int | None:
        """The smallest window of any layer; None where all see everything."""
        kinds = (self.layer(i) for i in range(min(self.layers, len(self.pattern))))
        return min((kind.window for kind in kinds if kind.window is not None), default=None)

    @property
    def short_context(self) -> int | None:
        """The context up to which longrope's short frequencies hold; None without it."""
        stated = (kind.rope.short_context for kind in self.pattern if kind.rope is not None)
        return min((context for context in stated if context is not None), default=None)
