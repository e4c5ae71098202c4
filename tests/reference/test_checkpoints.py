"""Directories that transformers wrote itself: configuration and weights as it has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish.export.architectures import ARCHITECTURES
from pilotfish.export.sources import open_source
from pilotfish.export.sources.tensor_names import stored_name
from tests.support.vocabularies import HERE, sentencepiece_metadata

pytestmark = pytest.mark.reference
SIZES = {
    "vocab_size": 640,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
}
ROTARY = SIZES | {"intermediate_size": 80, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", ROTARY),
    "llama3": ("Llama", ROTARY | {"rope_parameters": LLAMA3, "attention_bias": True}),
    "llama-tied": ("Llama", ROTARY | {"tie_word_embeddings": True, "head_dim": 32}),
    "mistral": ("Mistral", ROTARY | {"sliding_window": None}),
    "qwen2": ("Qwen2", ROTARY),
    "qwen3": ("Qwen3", ROTARY | {"head_dim": 32, "tie_word_embeddings": True}),
    "opt": ("OPT", SIZES | {"ffn_dim": 80, "word_embed_proj_dim": 64}),
    "opt-350m": (
        "OPT",
        SIZES | {"ffn_dim": 80, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_checkpoint_of_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    import torch
    import transformers

    from pilotfish.export.tokenizers.gguf import GgufVocabulary

    family, settings = MODELS[name]
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    text = GgufVocabulary(sentencepiece_metadata(), HERE).tokenizer_json
    (tmp_path / "tokenizer.json").write_text(text, "utf-8")

    source = open_source(str(tmp_path))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    weights = dict(model.named_parameters())  # shared ones once
    names = ARCHITECTURES[source.config.model_type].names
    assert {stored_name(names, name) for name in source.names()} == set(weights)
    for key in source.names():
        expected = weights[stored_name(names, key)].detach().float().numpy()
        assert np.array_equal(source.tensor(key), expected), key
    assert source.config.tied == bool(config.tie_word_embeddings)
    assert source.vocabulary.eos_ids == [config.eos_token_id] if config.eos_token_id else True
    if family != "OPT":
        np.testing.assert_allclose(
            source.config.layer(0).rope.frequencies,
            model.model.rotary_emb.original_inv_freq.float().numpy(),
            rtol=1e-5 if dtype == "float32" else 1e-2,
        )
