"""Small random models of every architecture, exported like real ones; the same for the same seed.

`tiny_artifact(path)` writes a complete artifact in a fraction of a second. To write a pair of
artifacts from a shell, FOLDER/draft and FOLDER/target:

    python -m tests.support.tiny FOLDER
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.manifest import Precision, Source
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.export.architectures.architecture import ALL, ATTENTION, QKV
from pilotfish.export.architectures.experts import EVERY
from pilotfish.export.architectures.gemma import FOUR
from pilotfish.export.blocks import BLOCK, Quantized
from pilotfish.export.model import export_model
from pilotfish.export.model_config import Form, Layer, ModelConfig
from pilotfish.export.parts import (
    Experts,
    Factors,
    Recurrence,
    Rope,
    StateSpace,
    Streams,
    TokenInputs,
)
from pilotfish.export.quantize import quantize
from pilotfish.export.sources.fields import Fields
from pilotfish.export.sources.rotary import RopeBase, read_table
from pilotfish.export.weight_recorder import shapes
from pilotfish.export.weights import TOKEN_TABLE
from tests.support.tiny_tokenizer import EOS, tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
BASE = ModelConfig(
    name="tiny",
    model_type="llama",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    context=256,
    vocab_size=128,
    tied=True,
    norm_eps=1e-5,
)
UNGATED = tuple(module for module in ALL if module != "mlp.gate_proj")
LAYER_NORMS = Form(norm="layer", norm_bias=True, gated=False)
TABLE = msgspec.structs.replace(LAYER_NORMS, biases=UNGATED, learned_positions=True)
OPT = {
    "model_type": "opt",
    "kv_heads": 4,
    "form": TABLE,
    "pattern": (Layer(),),
    "activation": "relu",
    "position_offset": 2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


# The first of 16 pairs turn, as in a head of 32 that turns whole; 1 in 4.
def plain_rope(theta: float, dim: int, *, interleaved: bool = False) -> Rope:
    """Make a rotary embedding of `dim` channels without scaling."""
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    return Rope(tuple((theta**-exponents).tolist()), interleaved=interleaved)


PROPORTIONAL = Rope((*plain_rope(1e6, 32).frequencies[:4], *[0.0] * 12))
GEMMA4 = {
    "model_type": "gemma4_text",
    "activation": "gelu_tanh",
    "form": Form(norms=FOUR, qk_norm="head", value_norm=True, layer_scale=True),
    "score_scale": 1.0,
    "logit_cap": 8.0,
    "embed_scale": 8.0,
}
WINDOWED = Layer(plain_rope(1e4, 16), 24)
# Each family's differences from BASE, and one for each kind of attention.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {
        "tied": False,
        "pattern": (Layer(read_table(Fields(LLAMA3, "tiny"), RopeBase(1e4, 16, 256, None))),),
    },
    "mistral": {"model_type": "mistral", "tied": False},
    "qwen2": {"model_type": "qwen2", "form": Form(biases=QKV)},
    "qwen3": {
        "model_type": "qwen3",
        "form": Form(qk_norm="head"),
        "head_dim": 32,
        "tied": False,
        "pattern": (Layer(plain_rope(1e4, 32)),),
    },
    "opt": OPT,
    "opt-post-norm": {
        **OPT,
        "form": msgspec.structs.replace(TABLE, sum_norms=True, final_norm=False),
        "embedding": 32,
    },
    # Windows, soft caps, norms on both sides, one key head.
    "gemma2": {
        "model_type": "gemma2",
        "kv_heads": 1,
        "form": Form(norms=FOUR),
        "pattern": (Layer(plain_rope(1e4, 16), 24), Layer(plain_rope(1e6, 16))),
        "activation": "gelu_tanh",
        "score_cap": 5.0,
        "logit_cap": 8.0,
        "score_scale": 0.3,
        "embed_scale": 8.0,
    },
    # Side by side, a part of each head turned, neighbours together, a norm a head.
    "cohere": {
        "model_type": "cohere",
        "form": Form(norm="layer", norms=("input_layernorm",), parallel=True, qk_norm="heads"),
        "pattern": (Layer(plain_rope(1e4, 8, interleaved=True)),),
        "logit_scale": 0.7,
    },
    # A late norm, a layer without rotation, growing queries.
    "hunyuan": {
        "model_type": "hunyuan_v1_dense",
        "form": Form(qk_norm="head", qk_norm_late=True),
        "pattern": (Layer(plain_rope(1e4, 16)), Layer()),
        "query_growth": (0.3, 32),
        "residual_scale": 0.8,
    },
    "mixtral": {
        "model_type": "mixtral",
        "experts": Experts(count=4, chosen=2, width=32, normed=True),
        "pattern": (Layer(plain_rope(1e4, 16), experts=True),),
    },
    # Experts in every second layer, beside a part for all tokens.
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "experts": Experts(count=5, chosen=3, width=32, normed=False, shared=64, shared_gate=True),
        "pattern": (Layer(plain_rope(1e4, 16)), Layer(plain_rope(1e4, 16), experts=True)),
    },
    # Experts that a bias chooses, behind a plain layer.
    "glm4_moe": {
        "model_type": "glm4_moe",
        "experts": Experts(
            count=6,
            chosen=2,
            width=32,
            normed=True,
            scores="sigmoid",
            biased=True,
            factor=1.5,
            shared=32,
        ),
        "pattern": (Layer(plain_rope(1e4, 8)), Layer(plain_rope(1e4, 8), experts=True)),
    },
    # Sinks, windows, biases everywhere, a clamp.
    "gpt_oss": {
        "model_type": "gpt_oss",
        "form": Form(sinks=True, biases=(*ATTENTION, "mlp.router", *EVERY)),
        "experts": Experts(
            count=4, chosen=2, width=32, normed=True, steepness=1.702, lift=1.0, limit=0.7
        ),
        "pattern": (
            Layer(plain_rope(1e4, 16), 24, experts=True),
            Layer(plain_rope(1e4, 16), experts=True),
        ),
    },
    # Heads of another width and number in each second layer, whose values are its keys; experts
    # beside a feed-forward part.
    "gemma4": {
        **GEMMA4,
        "experts": Experts(count=4, chosen=2, width=32, normed=True, parallel_mlp=True),
        "pattern": (
            msgspec.structs.replace(WINDOWED, experts=True),
            Layer(PROPORTIONAL, experts=True, head_dim=32, kv_heads=1, tied_values=True),
        ),
    },
    # Norms over all heads, behind the layers' parts.
    "olmo2": {"model_type": "olmo2", "form": Form(norms=FOUR[1::2], qk_norm="all")},
}
# Likewise, where layers read keys and values of earlier ones, and are told of tokens by a table of
# their own: these are not cut into stages.
SHARING: dict[str, dict[str, Any]] = {
    "gemma4-e2b": {
        **GEMMA4,
        "layers": 4,
        "token_inputs": TokenInputs(width=32, rows=128),
        "pattern": (
            WINDOWED,
            Layer(PROPORTIONAL, head_dim=32),
            Layer(plain_rope(1e4, 16), 24, intermediate=192, kv_source=0),
            Layer(PROPORTIONAL, head_dim=32, intermediate=192, kv_source=1),
        ),
    },
    "gemma3n": {
        **GEMMA4,
        "model_type": "gemma3n_text",
        "form": Form(norms=FOUR, qk_norm="head", value_norm=True),
        "layers": 4,
        "token_inputs": TokenInputs(width=32, rows=100),
        "streams": Streams(count=3, active=0, scaled=True, rank=32),
        "pattern": (
            msgspec.structs.replace(WINDOWED, sparsity=0.9),
            Layer(plain_rope(1e6, 16)),
            Layer(plain_rope(1e4, 16), 24, kv_source=0),
            Layer(plain_rope(1e6, 16), kv_source=1),
        ),
    },
}
# Likewise, where some layers keep states: these read no trees, and are not cut into stages.
STATEFUL: dict[str, dict[str, Any]] = {
    "lfm2": {
        "model_type": "lfm2",
        "layers": 3,
        "form": Form(qk_norm="head"),
        "pattern": (Layer(kind="conv"), Layer(plain_rope(1e4, 16)), Layer(kind="conv")),
        "recurrence": Recurrence(taps=3),
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "layers": 3,
        "form": Form(qk_norm="head", gated_attention=True),
        "pattern": (Layer(kind="delta"), Layer(plain_rope(1e4, 4)), Layer(kind="delta")),
        "recurrence": Recurrence(taps=4, heads=4, key_heads=2, key_dim=16, value_dim=8),
    },
    "mamba": {
        "model_type": "mamba",
        "layers": 3,
        "form": Form(biases=("mamba.dt_proj", "mamba.conv1d")),
        "pattern": (Layer(kind="selective", has_mlp=False),),
        "recurrence": Recurrence(4, 96, 1, 8, 1, StateSpace(norm=None, rank=4, epsilon=0.1)),
    },
    # State spaces, one of them beside attention, and layers of one part.
    "mamba2": {
        "model_type": "nemotron_h",
        "layers": 5,
        "form": Form(gated=False, biases=("mamba.conv1d",)),
        "activation": "relu2",
        "pattern": (
            Layer(kind="space", has_mlp=False),
            Layer(kind="none"),
            Layer(plain_rope(1e4, 16), has_mlp=False),
            Layer(plain_rope(1e4, 16), kind="both"),
            Layer(kind="space"),
        ),
        "recurrence": Recurrence(
            *(4, 4, 2, 16, 8),
            StateSpace(shortest=0.2, longest=2.0, scales=(1.1, 0.9, 0.8, 1.2, 0.7)),
        ),
        "factors": Factors(
            attention_in=0.9, attention_out=1.2, space_in=1.1, space_out=0.8, gate=0.7, mlp_out=1.2
        ),
    },
}


def tiny_config(architecture: str = "llama", **changes: Any) -> ModelConfig:
    """Make the small configuration of a family, with `changes`."""
    plain = {"pattern": (Layer(plain_rope(1e4, changes.get("head_dim", BASE.head_dim))),)}
    return msgspec.structs.replace(
        BASE, **{**plain, **(FAMILIES | SHARING | STATEFUL)[architecture], **changes}
    )


class RandomSource:
    """A `WeightSource` of normal random weights that depend on seed and name alone.

    `sharpness` scales the output projection, and so the peakedness of the predictions.
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        *,
        vocab: int | None = None,
        tokens: Sequence[str] | None = None,
        eos: str = EOS,
        sharpness: float = 1.0,
        template: str = TEMPLATE,
        templates: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        size = vocab or config.vocab_size
        self.vocabulary = Vocabulary(
            model=config.name,
            tokenizer_json=tiny_tokenizer(size, tokens, eos),
            vocab_size=size,
            bos_id=None,
            eos_ids=[size - 1],
            chat_template=template,
            chat_templates=dict(templates or {}),
            special_tokens={"eos_token": eos},
        )
        self.description = Source(kind="random", location=f"seed {seed}")
        self._seed = seed
        self._sharpness = sharpness
        self._shapes = shapes(config)

    def change_vocabulary(self, **changes: Any) -> None:
        """Give fields of the vocabulary other values."""
        self.vocabulary = msgspec.structs.replace(self.vocabulary, **changes)

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def blocks(self) -> Collection[str]:
        return ["8 bits"]

    def quantized(self, name: str) -> Quantized | None:
        """Have matrices in blocks of 8 bits, as a precision `stored` needs them."""
        result = self.tensor(name)
        matrix = result.ndim == 2 and "_norm" not in name and result.shape[1] % BLOCK == 0
        return quantize(name, result, 8) if matrix else None

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        yield from np.array_split(self.tensor(name), 3)

    def tensor(self, name: str) -> NDArray[np.float32]:
        shape = self._shapes[name]
        random = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        if name == TOKEN_TABLE:  # columns of a layer do not depend on how many layers there are
            return random.standard_normal(shape[::-1], np.float32).T
        values = random.standard_normal(shape, np.float32)
        if name.endswith("layer_scalar"):
            return 1 + 0.1 * values
        if "norm" in name:
            return 0.1 * values + (1.0 if name.endswith("weight") else 0.0)
        if len(shape) == 1:
            return 0.1 * values
        gain = self._sharpness if name.endswith(("embed_tokens.weight", "lm_head.weight")) else 1.0
        return values * np.float32(gain / np.sqrt(shape[1]))


def tiny_artifact(
    path: str | Path,
    *,
    architecture: str = "llama",
    vocab: int = 128,
    tokens: Sequence[str] | None = None,
    eos: str = EOS,
    padded_vocab: int | None = None,
    seed: int = 0,
    precision: Precision = "fp32",
    dialect: str = "auto",
    sharpness: float = 2.0,
    template: str = TEMPLATE,
    templates: Mapping[str, str] | None = None,
    head_tokens: Sequence[int] | None = None,
    **changes: Any,
) -> Artifact:
    """Export a random model to `path`; `changes` are fields of its ModelConfig.

    tokens: its vocabulary, instead of `vocab` tokens; `eos` comes after them. head_tokens: the
    tokens that its head is cut to.
    """
    if tokens is not None:
        vocab = len(tokens) + 1
    config = tiny_config(architecture, vocab_size=padded_vocab or vocab, **changes)
    source = RandomSource(
        config,
        seed,
        vocab=vocab,
        tokens=tokens,
        eos=eos,
        sharpness=sharpness,
        template=template,
        templates=templates,
    )
    reply = None if head_tokens is None else np.array(head_tokens, np.int64)
    return export_model(source, Path(path), precision=precision, dialect=dialect, head_tokens=reply)


def tiny_pair(
    folder: Path, vocab: int = 64, padded_vocab: int = 72, context: int = 256
) -> tuple[Path, Path]:
    """Write a drafter and its target; the target accepts about half of the drafts."""
    sizes: dict[str, Any] = {"vocab": vocab, "padded_vocab": padded_vocab, "context": context}
    tiny_artifact(folder / "draft", seed=1, sharpness=0.9, **sizes)
    tiny_artifact(folder / "target", seed=1, sharpness=0.7, **sizes)
    return folder / "draft", folder / "target"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.support.tiny FOLDER (for FOLDER/draft, FOLDER/target)")
    for artifact in tiny_pair(Path(sys.argv[1])):
        print(artifact)
