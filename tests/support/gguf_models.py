"""Tiny models as GGUF files, for llama.cpp and, where it knows the architecture, our own exporter.

Weights are random and tame: logits vary by about 1, so that nodes that see one another show, and
float32 computes them to five digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact
from pilotfish.export.model import export_model
from tests.support.small_checkpoints import LLAMA, add_byte_vocabulary, tiny_weights, write_gguf

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "max_position_embeddings": 256},
    "qwen2": {**LLAMA, "max_position_embeddings": 256, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "max_position_embeddings": 256, "model_type": "qwen3", "head_dim": 16},
}


def tame(config: Mapping[str, Any], seed: int = 1) -> dict[str, NDArray[np.float32]]:
    """Make weights by Hugging Face's names: matrices keep what they multiply as large as it is."""
    return {
        name: value / np.float32(np.sqrt(value.shape[1]))
        if value.ndim == 2
        else np.float32("norm" in name) + value / 10
        for name, value in tiny_weights(config, seed).items()
    }


def gguf_file(path: Path, family: str = "llama", seed: int = 1, **changes: Any) -> Path:
    """Write a tiny model of an architecture that our own exporter knows."""
    config = {**FAMILIES[family], **changes}
    return write_gguf(path, config, weights=tame(config, seed))


def gguf_artifact(folder: Path, family: str = "llama", seed: int = 1, **changes: Any) -> Artifact:
    """Export such a file for llama.cpp."""
    folder.mkdir(parents=True, exist_ok=True)
    file = gguf_file(folder / f"{family}.gguf", family, seed, **changes)
    return export_model(str(file), folder / "llamacpp", dialect="llamacpp")


def write_foreign(
    path: Path,
    architecture: str,
    settings: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    *,
    pretokenizer: str = "gpt-2",
    seed: int = 1,
) -> Path:
    """Write a model of any architecture, by GGUF's own names.

    settings: keys without the architecture's prefix. tensors: shapes by name; None: no weights.
    """
    writer = gguf.GGUFWriter(path, architecture)
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in settings.items():
        add[type(value)](f"{architecture}.{key}", value)
    add_byte_vocabulary(writer, pretokenizer)
    rng = np.random.default_rng(seed)
    for name, shape in (tensors or {"token_embd.weight": (264, 32)}).items():
        value = rng.standard_normal(shape, np.float32)
        value = value / np.float32(np.sqrt(shape[1])) if len(shape) == 2 else value / 10
        writer.add_tensor(name, value + np.float32(len(shape) == 1 and "norm" in name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sliding_window(path: Path, *, window: int = 16) -> Path:
    """Write a gemma2, of which every other layer attends to the last tokens alone."""
    hidden, heads, kv, width, inner = 32, 4, 2, 8, 64
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (264, hidden),
        "output_norm.weight": (hidden,),
    }
    for layer in range(2):
        tensors |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (hidden,),
                "attn_q": (heads * width, hidden),
                "attn_k": (kv * width, hidden),
                "attn_v": (kv * width, hidden),
                "attn_output": (hidden, heads * width),
                "post_attention_norm": (hidden,),
                "ffn_norm": (hidden,),
                "ffn_gate": (inner, hidden),
                "ffn_up": (inner, hidden),
                "ffn_down": (hidden, inner),
                "post_ffw_norm": (hidden,),
            }.items()
        }
    settings = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": window,
    }
    return write_foreign(path, "gemma2", settings, tensors)


def llama_cpp() -> None:
    """Skip the whole module that calls this where llama.cpp is not installed."""
    reason = "llama.cpp is not installed: pip had no wheel of it (docs/engines.md)"
    pytest.importorskip("llama_cpp", reason=reason, exc_type=ImportError)
