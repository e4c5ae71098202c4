"""Parts that some models have, and their sizes: rotation, experts, states, inputs and streams."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray


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
    parallel_mlp: bool = False
    steepness: float = 1.0
    lift: float = 0.0
    limit: float | None = None


class StateSpace(msgspec.Struct, frozen=True, kw_only=True):
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
    mlp_out: float = 1.0
