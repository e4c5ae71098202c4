"""Sizes of the parts that some models have: rotation, experts, states, inputs and streams."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray


class Rope(msgspec.Struct, frozen=True):
    """A rotary embedding.

    Attributes:
        frequencies: angle per position of each pair of channels, rad. The first 2 · len channels
            rotate, the others do not.
        scale: factor of cos and sin (attention factor of yarn and longrope).
        interleaved: whether channels 2i and 2i + 1 are a pair, instead of i and i + half.
        long: frequencies for contexts beyond `short_context` (longrope).
        short_context: largest context of `frequencies` (longrope), positions.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False
    long: tuple[float, ...] | None = None
    short_context: int | None = None

    def angles(self, context: int) -> NDArray[np.float64]:
        """Return the angle of every position and pair, f64 [context, pairs]."""
        beyond = self.short_context is not None and context > self.short_context
        chosen = self.long if beyond and self.long is not None else self.frequencies
        return np.outer(np.arange(context, dtype=np.float64), np.array(chosen))


class TokenInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Per-layer embeddings of a token (Gemma 3n, 4): a second input of each layer.

    They are the sum of a row of a table and of a normed projection of the token's embedding.

    Attributes:
        width: width per layer.
        rows: rows of the table; tokens beyond them use row 0.
    """

    width: int
    rows: int


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel residual streams: AltUp, with Laurel (Gemma 3n).

    A layer predicts each stream from all, computes the active one, and corrects all streams by the
    error of that prediction.

    Attributes:
        count: number of streams.
        active: index of the stream that layers compute.
        scaled: whether the active stream is scaled by channel before it updates the others.
        rank: rank of the low-rank path parallel to attention.
    """

    count: int
    active: int
    scaled: bool
    rank: int


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts: each token uses a few of a layer's feed-forward parts.

    Token x uses the experts with the highest scores x · router. Their outputs are summed, weighted
    by the softmax of the scores.

    Attributes:
        count: number of experts.
        chosen: number of experts per token.
        width: inner width of an expert.
        normed: whether the softmax is over the chosen scores instead of all.
        shared: inner width of the expert that every token uses; None without one.
        shared_gate: whether the shared expert is weighted by σ(x · shared_expert_gate).
        parallel_mlp: whether layers also have a dense feed-forward part, with a norm for each
            branch, and a norm and factors of the router (Gemma 4).
        steepness, lift, limit: α, l and c of g · σ(αg) · (u + l), with g ≤ c and |u| ≤ c (gpt-oss);
            at 1, 0 and None it is activation(g) · u.
    """

    count: int
    chosen: int
    width: int
    normed: bool
    shared: int | None = None
    shared_gate: bool = False
    parallel_mlp: bool = False
    steepness: float = 1.0
    lift: float = 0.0
    limit: float | None = None


class StateSpace(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a state space (Mamba, Mamba-2) besides the sizes of its heads.

    In terms of linear attention, its B are keys, its C queries, its x values.

    Attributes:
        shortest, longest: bounds of a token's step Δ.
        norm: position of the group norm of the output: after the gate ("behind"), before it, or
            none.
        scales: factors of the projected gate, x, B, C and Δ (Falcon-H1).
        rank: width of the low-rank projection of Δ in a selective state space; None in others.
        epsilon: epsilon of the norm of the low-rank Δ, B and C (Falcon Mamba); None without it.
    """

    shortest: float = 0.0
    longest: float = math.inf
    norm: Literal["behind", "before"] | None = "behind"
    scales: tuple[float, ...] = (1.0,) * 5
    rank: int | None = None
    epsilon: float | None = None


class Recurrence(msgspec.Struct, frozen=True):
    """Sizes of the recurrent layers, the same in all of a model.

    Attributes:
        taps: width of the convolution, tokens, the current one included.
        heads, key_heads: numbers of value heads, and of query and key heads; 0 = no matrix state.
        key_dim, value_dim: widths of key heads and value heads.
        space: properties of a state space; None under the delta rule.
    """

    taps: int
    heads: int = 0
    key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    space: StateSpace | None = None

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
        """Width of the convolution: queries, keys and values.

        In a selective state space the values only; the others are projected from its output.
        """
        return self.values if self._selective else 2 * self.keys + self.values

    @property
    def rates(self) -> int:
        """Rates per token: of each head's decay and, under the delta rule, its writing."""
        if self._selective:
            return 0
        return self.heads if self.space else 2 * self.heads

    @property
    def width(self) -> int:
        """Width of a token's inputs to the recurrence, which the trail stores."""
        return self.channels + self.rates

    @property
    def projected(self) -> int:
        """Width of a state space's input projection: the gate and the recurrence's inputs."""
        return self.values + self.width

    @property
    def low(self) -> int:
        """Width of a selective state space's second projection: low-rank Δ, B and C."""
        return 2 * self.keys + (self.space.rank or 0 if self.space else 0)

    @property
    def _selective(self) -> bool:
        return self.space is not None and self.space.rank is not None


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """Factors of the inputs and outputs of a layer's parts (Falcon-H1).

    Attributes:
        attention_in, attention_out, space_in, space_out: factors around attention and state space.
        gate, mlp_out: factors of the feed-forward part's gate and of its output.
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    space_in: float = 1.0
    space_out: float = 1.0
    gate: float = 1.0
    mlp_out: float = 1.0
