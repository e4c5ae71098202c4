"""Models with states against transformers, with wrong drafts taken back between the pieces.

Mamba's own are in families.py: as these weights are drawn, transformers itself is 10⁻² off there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.export.model import export_model
from tests.reference.test_architectures import liven, reference
from tests.support.runnable import needs
from tests.support.small_checkpoints import tokenizer_json

pytestmark = pytest.mark.reference
TOLERANCE = 1e-3  # transformers' own two ways, by chunks and by tokens, differ by 4e-4
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 259, "pad_token_id": None,
}  # fmt: skip
DELTA = {
    "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
MROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1], "mrope_interleaved": True,
}  # fmt: skip
SPACE = {
    "mamba_n_heads": 16, "mamba_d_head": 8, "mamba_d_state": 24, "mamba_n_groups": 2,
    "mamba_chunk_size": 32,
}  # fmt: skip
MIXED = ["conv", "conv", "full_attention", "conv"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", {"layer_types": MIXED, "block_auto_adjust_ff_dim": False}),
    "lfm2-adjusted": (
        "Lfm2",
        {"full_attn_idxs": [1, 3], "conv_bias": True, "conv_L_cache": 4, "block_ff_dim": 150,
         "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.2, "tie_embedding": False},
    ),
    "qwen3.5": ("Qwen3_5Text", DELTA | {"tie_word_embeddings": True}),
    "qwen3.5-mrope": (
        "Qwen3_5Text",
        DELTA | {"full_attention_interval": 2, "linear_conv_kernel_dim": 3,
                 "linear_num_value_heads": 2, "attention_bias": True, "rope_parameters": MROPE},
    ),
    "qwen3-next": (
        "Qwen3Next",
        DELTA | {"full_attention_interval": 2, "mlp_only_layers": [1], "num_experts": 6,
                 "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": False,
                 "shared_expert_intermediate_size": 40},
    ),
    "granite4": (
        "GraniteMoeHybrid",
        SPACE | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48,
                 "layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_conv_bias": False},
    ),
    "bamba": (
        "Bamba", SPACE | {"attn_layer_indices": [1, 3], "mamba_d_conv": 3, "attention_bias": True},
    ),
    "falcon-h1": (
        "FalconH1",
        SPACE | {"mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
                 "key_multiplier": 0.5, "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.6]},
    ),
    "nemotron-h": (
        "NemotronH",
        {"head_dim": 16, "mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 24,
         "n_groups": 3, "chunk_size": 32, "use_bias": True, "num_hidden_layers": 6,
         "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention",
                               "linear_attention", "mlp"]},
    ),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 4}),
}  # fmt: skip


WITHOUT = {"num_attention_heads", "num_key_value_heads", "intermediate_size",
           "max_position_embeddings"}  # fmt: skip


def checkpoint(name: str, folder: Path) -> Any:
    """Save a small model as its authors would; return it."""
    import torch
    import transformers

    family, settings = MODELS[name]
    torch.manual_seed(5)
    sizes = SIZES
    if family.startswith("Mamba"):
        sizes = {key: SIZES[key] for key in SIZES if key not in WITHOUT}
    config = getattr(transformers, f"{family}Config")(**sizes | settings)
    causal = {"Qwen3_5Text": "Qwen3_5ForCausalLM"}.get(family, f"{family}ForCausalLM")
    model = liven(getattr(transformers, causal)(config))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    return model


def in_pieces(decoder: Decoder, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Read in pieces of 1 to 12 tokens; after each, wrong ones that are taken back."""
    random, logits, hidden = np.random.default_rng(3), [], []
    begin, held = decoder.length(0), 0
    while held < len(tokens):
        size = int(random.integers(1, 13))
        output = decoder.forward([Pass(0, tokens[held : held + size])])[0]
        logits.append(output.logits.copy())
        hidden.append(output.hidden.copy())
        held += len(output.logits)
        decoder.forward([Pass(0, random.integers(0, 260, random.integers(1, 12)))])
        decoder.rollback(0, begin + held)
    return np.concatenate(logits), np.concatenate(hidden)


@pytest.mark.parametrize("dialect", ["opset24", "opset17", "contrib"])
@pytest.mark.parametrize("name", MODELS)
def test_states_equal_transformers(name: str, dialect: str, tmp_path: Path) -> None:
    needs(dialect)
    if dialect == "opset17" and name.startswith("qwen3"):
        pytest.skip("opset17 has no loops")
    model = checkpoint(name, tmp_path / "model")
    export_model(str(tmp_path / "model"), tmp_path / "artifact", dialect=dialect)
    tokens = np.random.default_rng(1).integers(0, 260, 200)
    logits, hidden = reference(model, tokens)
    assert logits.std() > 0.5  # else the tolerance would mean nothing
    decoder = Decoder(tmp_path / "artifact")
    got, states = in_pieces(decoder, tokens)
    np.testing.assert_allclose(got, logits[:, : got.shape[1]], atol=TOLERANCE)
    np.testing.assert_allclose(states, hidden, atol=TOLERANCE)
    decoder.rollback(0, 77)  # farther than any snapshot's trail
    again, _ = in_pieces(decoder, tokens[77:])
    np.testing.assert_allclose(again, logits[77:, : got.shape[1]], atol=TOLERANCE)


def test_the_text_model_of_a_multimodal_checkpoint_is_exported(tmp_path: Path) -> None:
    """Qwen3.5 comes with a vision tower, and a head for several tokens, which are left out."""
    import transformers

    needs("opset24")
    model = checkpoint("qwen3.5", tmp_path / "text")
    whole = transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(
            text_config=model.config.to_dict(),
            vision_config={
                "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
                "out_hidden_size": 64, "num_position_embeddings": 16,
            },
            tie_word_embeddings=True,
        )
    )  # fmt: skip
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    path = tmp_path / "whole" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= {  # as published
        "attn_output_gate": True, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32",
        "mtp_use_dedicated_embeddings": False, "mlp_only_layers": [],
    }  # fmt: skip
    path.write_text(json.dumps(config))
    artifact = export_model(str(tmp_path / "whole"), tmp_path / "artifact", dialect="opset24")
    assert artifact.manifest.source.left_out == ["visual"]
    tokens = np.random.default_rng(1).integers(0, 260, 60)
    logits, _ = reference(model, tokens)
    got, _ = in_pieces(Decoder(artifact), tokens)
    np.testing.assert_allclose(got, logits[:, : got.shape[1]], atol=TOLERANCE)
