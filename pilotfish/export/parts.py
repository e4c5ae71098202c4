"""The sizes of parts that some models have: rotation, experts, states, layer inputs, streams."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray


class Rope(msgspec.Struct, frozen=True):
    """A rotary embedding.

    Attributes:
        frequencies: angle per position of each pair of channels, rad. n frequencies rotate the
        first 2n channels; the other channels do not rotate.
        scale: factor by which cos and sin are multiplied (the attention factor of yarn and
            longrope).
        interleaved: whether channels 2i and 2i + 1 are a pair, instead of i and i + n.
        long: the frequencies for contexts greater than `short_context` (longrope).
        short_context: largest context, positions, for which `frequencies` apply (longrope).
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
    """The per-layer embeddings of a token, a second input of each layer (Gemma 3n, 4).

    They are the sum of the token's row in a table, and of a projection, with norm, of its
    embedding.

    Attributes:
        width: numbers per layer.
        rows: number of rows of the table; tokens with ids beyond the table use row 0.
    """

    width: int
    rows: int


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """The parallel residual streams of Gemma 3n: AltUp, combined with Laurel's low-rank path.

    A layer predicts each stream from all streams, computes the active stream, and corrects all
    streams by the error in the prediction of the active stream.

    Attributes:
        count: number of streams.
        active: index of the active stream.
        scaled: whether the active stream is scaled per channel before it updates the other streams.
        rank: rank of Laurel's low-rank path, which is parallel to attention.
    """

    count: int
    active: int
    scaled: bool
    rank: int


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts: each token uses a few of a layer's feed-forward parts.

    The scores of a token with input x are the softmax or the sigmoid of x · router. The token uses
    the experts with the highest scores. Their outputs are summed with the scores as weights.

    Attributes:
        count: number of experts.
        chosen: number of experts per token.
        width: inner width of an expert.
        normed: whether the chosen experts' scores are divided by their sum.
        scores: function that yields the scores.
        biased: whether experts are chosen by score + bias. The weights do not include the bias.
        epsilon, least: the divisor of `normed` is max(sum of the chosen scores + epsilon, least).
        factor: factor by which the weights are multiplied.
        latent: width to which the experts' input is projected, and from which their output is
            projected; None without projections.
        shared: inner width of the shared expert, which every token uses; None if there is none.
        shared_gate: whether the shared expert's output is multiplied by σ(x · shared_expert_gate).
        parallel_mlp: whether layers also have a dense feed-forward part (Gemma 4). If so, both
        branches and the router have norms, and the router has factors.
        steepness, lift, limit: α, l and c of gpt-oss's experts, g · σ(αg) · (u + l) with g ≤ c and
        |u| ≤ c. With 1, 0 and None, an expert computes activation(g) · u.
    """

    count: int
    chosen: int
    width: int
    normed: bool
    scores: Literal["softmax", "sigmoid"] = "softmax"
    biased: bool = False
    epsilon: float = 0.0
    least: float = 0.0
    factor: float = 1.0
    latent: int | None = None
    shared: int | None = None
    shared_gate: bool = False
    parallel_mlp: bool = False
    steepness: float = 1.0
    lift: float = 0.0
    limit: float | None = None


class StateSpace(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a state space (Mamba, Mamba-2), without the sizes of its heads.

    In terms of linear attention, B is the key, C the query, x the value.

    Attributes:
        shortest, longest: bounds of the step Δ of a token.
        norm: position of the output's group norm: after the gate ("behind"), before the gate, or no
            norm.
        scales: factors by which the projected gate, x, B, C and Δ are multiplied (Falcon-H1).
        rank: width of the low-rank projection of Δ in a selective state space; None in a state
            space that is not selective.
        epsilon: epsilon of the norms of the low-rank Δ, B and C (Falcon Mamba); None without norms.
    """

    shortest: float = 0.0
    longest: float = math.inf
    norm: Literal["behind", "before"] | None = "behind"
    scales: tuple[float, ...] = (1.0,) * 5
    rank: int | None = None
    epsilon: float | None = None


class Recurrence(msgspec.Struct, frozen=True):
    """The sizes of a model's recurrent layers, equal in all of them.

    Attributes:
        taps: width of the convolution, tokens, including the current token.
        heads: number of value heads; 0 = only convolutions, no matrix state.
        key_heads: number of query heads and of key heads.
        key_dim, value_dim: widths of key heads and value heads.
        space: properties of a state space; None for the delta rule.
    """

    taps: int
    heads: int = 0
    key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    space: StateSpace | None = None

    @property
    def keys(self) -> int:
        """The width of all keys together, and of all queries together."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The width of all values together."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """The number of the convolution's channels: queries, keys and values.

        In a selective state space, there are only channels of values, because the convolution's
        output is projected to queries and keys.
        """
        return self.values if self._selective else 2 * self.keys + self.values

    @property
    def rates(self) -> int:
        """The number of rates per token: a decay per head and, for the delta rule, a write rate."""
        if self._selective:
            return 0
        return self.heads if self.space else 2 * self.heads

    @property
    def width(self) -> int:
        """The width of a token's inputs to the recurrence, which the trail stores."""
        return self.channels + self.rates

    @property
    def projected(self) -> int:
        """The width of a state space's input projection: the gate and the recurrence's inputs."""
        return self.values + self.width

    @property
    def low(self) -> int:
        """The width of a selective state space's second projection: low-rank Δ, B and C."""
        return 2 * self.keys + (self.space.rank or 0 if self.space else 0)

    @property
    def _selective(self) -> bool:
        return self.space is not None and self.space.rank is not None


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """The factors by which inputs and outputs of a layer's parts are multiplied (Falcon-H1).

    Attributes:
        attention_in, attention_out, space_in, space_out: factors of input and output of attention
        and of the state space.
        gate, mlp_out: factors of the feed-forward part's gate and of its output.
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    space_in: float = 1.0
    space_out: float = 1.0
    gate: float = 1.0
    mlp_out: float = 1.0
