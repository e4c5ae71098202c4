"""A model's shape, in one form for all kinds of source.

In: Hugging Face's config.json or GGUF metadata (read by `export.sources`). Out: `ModelConfig`, from
which the graph is written. Fields that only one family needs come last, with the default that the
other families use.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

ModelType = Literal["llama", "mistral", "qwen2", "qwen3", "opt"]


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Llama 3's scaling of the rotary frequencies.

    Wavelengths beyond original_context / low_freq_factor are stretched by `factor`, those below
    original_context / high_freq_factor stay, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the graph of a decoder depends on, besides its weights.

    Attributes:
        name: the model's name, for display.
        model_type: the source's own name of the architecture.
        head_dim: of one head; heads * head_dim need not equal `hidden`.
        context: the largest number of positions.
        vocab_size: rows of the embedding, padding included.
        tied: the output projection is the embedding.
        rope_theta: None where positions are learned (opt).
        rope_divisors: one number per rotary frequency, by which it is divided, where a file
            states them outright (GGUF's rope_freqs.weight); excludes `rope_scaling`.
        attention_bias: q, k and v have biases.
        output_bias: the attention's output projection has one.
        mlp_bias: the feed-forward projections have biases.
        qk_norm: RMS norm over each head of q and k, before the rotation (qwen3).
        activation: of the feed-forward part.
        pre_norm: opt's do_layer_norm_before; if false, norms follow the residual sum.
        final_norm: there is a norm after the last layer.
        embedding: width of the embedding where it is not `hidden` (opt-350m: project_in/out).
        position_offset: row of the learned position table that position 0 uses (opt: 2).
    """

    name: str
    model_type: ModelType
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
    rope_theta: float | None
    rope_scaling: RopeScaling | None = None
    rope_divisors: tuple[float, ...] | None = None
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Literal["silu", "relu", "gelu"] = "silu"
    pre_norm: bool = True
    final_norm: bool = True
    embedding: int | None = None
    position_offset: int = 0

    def inverse_frequencies(self) -> NDArray[np.float64]:
        """Return the rotary angle per position of each pair of channels, scaled; [head_dim // 2].

        Raises:
            ValueError: if the model has no rotary embedding.
        """
        if self.rope_theta is None:
            raise ValueError(f"{self.model_type} has no rotary embedding")
        # [head_dim // 2]
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        frequencies = self.rope_theta**-exponents
        if self.rope_divisors is not None:
            return frequencies / np.asarray(self.rope_divisors, dtype=np.float64)
        if self.rope_scaling is not None:
            return _scaled_as_llama3(frequencies, self.rope_scaling)
        return frequencies


def _scaled_as_llama3(
    frequencies: NDArray[np.float64], scaling: RopeScaling
) -> NDArray[np.float64]:
    """Scale by Llama 3.1's rule, as transformers' modeling_rope_utils does."""
    turns = scaling.original_context * frequencies / (2 * math.pi)  # in the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (smooth + (1 - smooth) / scaling.factor)
