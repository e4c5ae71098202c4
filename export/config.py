"""A model's shape, in one form for all architectures and all kinds of source.

In: Hugging Face's config.json or GGUF metadata (read by `export.sources`). Out: `ModelConfig`, from
which the graph is written. `Form` says which parts a layer has, the rest are numbers.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
Kind = Literal["attention", "conv", "delta", "space", "both", "selective", "none"]
CACHED: tuple[Kind, ...] = ("attention", "both")  # have keys and values


class Rope(msgspec.Struct, frozen=True):
    """A rotary embedding.

    Attributes:
        frequencies: angle per position of each pair of channels, in rad; 2 · len of them turn, the
            channels behind them stay.
        scale: of cos and sin (yarn's and longrope's attention factor).
        interleaved: pairs are neighbours (2i, 2i + 1), not (i, i + half).
        long: the frequencies of an artifact whose context exceeds `short_context` (longrope).
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False
    long: tuple[float, ...] | None = None
    short_context: int | None = None

    def angles(self, context: int) -> NDArray[np.float64]:
        """Return the angle of every position and pair; [context, pairs]."""
        beyond = self.short_context is not None and context > self.short_context
        chosen = self.long if beyond and self.long is not None else self.frequencies
        return np.outer(np.arange(context, dtype=np.float64), np.array(chosen))


def plain_rope(theta: float, dim: int, *, interleaved: bool = False) -> Rope:
    """Make a rotary embedding of `dim` channels without scaling."""
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    return Rope(tuple((theta**-exponents).tolist()), interleaved=interleaved)


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
    fed: bool = True
    head_dim: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    reads: int | None = None
    tied_values: bool = False
    sparsity: float = 0.0

    @property
    def mixes(self) -> bool:
        """Whether tokens read others here."""
        return self.kind != "none"


class Heads(NamedTuple):
    """The heads of one layer's attention: how many, and of which width."""

    queries: int
    keys: int
    dim: int

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.queries // self.keys


class TokenInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What each layer is told of a token besides the stream: embeddings per layer (Gemma 3n, 4).

    The sum of a row of a table, and of a projection of the token's embedding that is normed.

    Attributes:
        width: numbers for each layer.
        rows: of the table; a token beyond them takes the first.
    """

    width: int
    rows: int


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """Several residual streams beside each other: AltUp, with Laurel (Gemma 3n).

    A layer predicts all streams from all, computes one of them, and corrects the others by how far
    that was off.

    Attributes:
        count: of streams.
        active: the one that layers compute.
        scaled: what tells the other streams of a token is scaled by channel.
        rank: of the low-rank path beside attention.
    """

    count: int
    active: int
    scaled: bool
    rank: int


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """The feed-forward parts of a layer of which each token uses a few.

    Token x uses those of the highest scores x · router; their outputs are summed, weighted by the
    softmax of the scores.

    Attributes:
        count: how many there are.
        chosen: how many of them a token uses.
        width: of one's inner activations.
        normed: the softmax is over the chosen scores, not over all.
        shared: inner width of the expert that every token uses; None without one.
        shared_gate: that part is weighted by σ(x · shared_expert_gate).
        beside: layers also have a feed-forward part of their own beside them, with norms of each,
            and a norm and factors of the router (Gemma 4).
        steepness, lift, limit: α, l and c of g · σ(αg) · (u + l), with g ≤ c and |u| ≤ c (gpt-oss);
            at 1, 0 and None it is activation(g) · u.
    """

    count: int
    chosen: int
    width: int
    normed: bool
    shared: int | None = None
    shared_gate: bool = False
    beside: bool = False
    steepness: float = 1.0
    lift: float = 0.0
    limit: float | None = None


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """What a state space (Mamba, Mamba-2) has besides the sizes of its heads.

    Its keys are what papers call B, its queries C, its values x.

    Attributes:
        shortest, longest: a token's step Δ is clipped to these.
        norm: the answer is normed by groups, behind its gate or before it, or not at all.
        scales: of gate, x, B, C and Δ as they are projected (Falcon-H1).
        rank: of a selective one, the channels by way of which Δ is projected; None of others.
        epsilon: of the norm of these channels, B and C (Falcon Mamba); None without.
    """

    shortest: float = 0.0
    longest: float = math.inf
    norm: Literal["behind", "before"] | None = "behind"
    scales: tuple[float, ...] = (1.0,) * 5
    rank: int | None = None
    epsilon: float | None = None


class Recurrence(msgspec.Struct, frozen=True):
    """The layers that keep a state instead of keys and values; alike within one model.

    Attributes:
        taps: tokens that the convolution sees, the own one included.
        heads, key_heads: of the state's values, and of its queries and keys; 0 = it has none.
        key_dim, value_dim: widths of their heads.
        space: how a state space differs from the delta rule; None under that.
    """

    taps: int
    heads: int = 0
    key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    space: Space | None = None

    @property
    def keys(self) -> int:
        """Width of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of what the convolution before a state reads: queries, keys and values.

        The values alone, where the others are projected behind it.
        """
        return self.values if self._selective else 2 * self.keys + self.values

    @property
    def rates(self) -> int:
        """Numbers of a token that say how fast each head forgets and, by the delta rule, writes."""
        if self._selective:
            return 0
        return self.heads if self.space else 2 * self.heads

    @property
    def width(self) -> int:
        """Width of what a token adds to the trail where there is a state."""
        return self.channels + self.rates

    @property
    def projected(self) -> int:
        """Width of a state space's projection: the gate, and what the trail takes."""
        return self.values + self.width

    @property
    def low(self) -> int:
        """Width of a selective state space's second projection: Δ's channels, B and C."""
        return 2 * self.keys + (self.space.rank or 0 if self.space else 0)

    @property
    def _selective(self) -> bool:
        return self.space is not None and self.space.rank is not None


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


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into parts of a layer, and comes out of them, is multiplied by these (Falcon-H1).

    Attributes:
        attention_in, attention_out, space_in, space_out: of attention and state space.
        gate, fed: of the feed-forward part's gate, and of its answer.
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    space_in: float = 1.0
    space_out: float = 1.0
    gate: float = 1.0
    fed: float = 1.0


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

    def layer(self, index: int) -> Layer:
        """Return the kind of a layer."""
        return self.pattern[index % len(self.pattern)]

    def heads_of(self, index: int) -> Heads:
        """Return the heads of a layer's attention."""
        own = self.layer(index)
        return Heads(self.heads, own.kv_heads or self.kv_heads, own.head_dim or self.head_dim)

    @property
    def plain(self) -> bool:
        """Whether each layer has a state, or keys and values of its own, of `plain_heads`."""
        states = set(self.recurrent)
        own = self.cached == [i for i in range(self.layers) if i not in states]
        return own and {self.heads_of(i) for i in self.cached} <= {self.plain_heads}

    @property
    def plain_heads(self) -> Heads:
        """The heads of layers that state none of their own."""
        return Heads(self.heads, self.kv_heads, self.head_dim)

    @property
    def recurrent(self) -> list[int]:
        """The layers that keep a state."""
        return [i for i in range(self.layers) if self.layer(i).kind not in {"attention", "none"}]

    @property
    def cached(self) -> list[int]:
        """The layers that keep keys and values of their own."""
        kinds = map(self.layer, range(self.layers))
        return [i for i, own in enumerate(kinds) if own.kind in CACHED and own.reads is None]

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
