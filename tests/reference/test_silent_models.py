"""What was exported as another model in silence is refused, or is what transformers computes.

Each case is a checkpoint of transformers whose files were changed by hand; transformers loads it
as it is. A case that is refused must matter: the model that was exported before, which the plain
file describes, has other logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from tests.reference.test_architectures import TOLERANCE, liven, reference
from tests.support.prefill import prefill
from tests.support.small_checkpoints import LLAMA, tokenizer_json, write_gguf
from tests.support.small_checkpoints import TOKENS as VOCABULARY

pytestmark = pytest.mark.reference
TOKENS = np.random.default_rng(1).integers(0, 259, 60)
SIZES = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 259,
}
ROTARY_ONLY = ("intermediate_size", "num_key_value_heads")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def checkpoint(path: Path, family: str = "Llama", **settings: Any) -> Path:
    """A small model, as transformers saves it."""
    import torch
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**SIZES | settings)
    liven(getattr(transformers, f"{family}ForCausalLM")(config)).save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    return path


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the config.json."""
    file = path / "config.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def expected(path: Path) -> np.ndarray:
    """Logits [T, 260] of the checkpoint as transformers loads it, without padding rows."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    logits, _ = reference(model.float().eval(), TOKENS)
    return logits[:, : len(VOCABULARY)]


def exported(path: Path, out: Path) -> np.ndarray:
    """Logits [T, 260] of its artifact."""
    return prefill(Decoder(export_model(str(path), out)), 0, TOKENS, rows=len(TOKENS)).logits


def both_rotary(path: Path) -> None:
    edit(path, lambda values: values.update(rope_scaling=LLAMA3))


def not_causal(path: Path) -> None:
    edit(path, lambda values: values.update(is_causal=False))


def another_head(path: Path) -> None:
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"][::-1].copy()
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("settings", "change", "named"),
    [
        ({}, both_rotary, "rope_parameters and rope_scaling are both"),
        ({"tie_word_embeddings": True}, another_head, "different lm_head.weight"),
        ({}, not_causal, "is_causal is False"),
    ],
)
def test_what_was_silently_wrong_is_refused(
    settings: dict[str, Any], change: Callable[[Path], None], named: str, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path / "m", **settings)
    plain = exported(path, tmp_path / "plain")
    np.testing.assert_allclose(plain, expected(path), atol=TOLERANCE)
    change(path)
    assert np.abs(expected(path) - plain).max() > 1.0
    with pytest.raises(ExportError, match=named):
        export_model(str(path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_scaling_of_gguf_without_a_type_is_followed(tmp_path: Path) -> None:
    """llama.cpp takes it as linear; so does transformers, where it is said."""
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    path = checkpoint(tmp_path / "m", rope_parameters=rope)
    config = LLAMA | SIZES | {"rms_norm_eps": 1e-6}
    weights = load_file(path / "model.safetensors")
    file = write_gguf(tmp_path / "m.gguf", config, weights=weights)
    plain = exported(file, tmp_path / "plain")
    assert np.abs(expected(path) - plain).max() > 1.0
    settings = {"{}.rope.scaling.factor": 4.0}
    file = write_gguf(tmp_path / "m.gguf", config, weights=weights, settings=settings)
    np.testing.assert_allclose(exported(file, tmp_path / "out"), expected(path), atol=TOLERANCE)


def drop(*keys: str) -> Callable[[Path], None]:
    return lambda path: edit(path, lambda values: [values.pop(key, None) for key in keys])


def put(**values: Any) -> Callable[[Path], None]:
    return lambda path: edit(path, lambda stated: stated.update(values))


def equal_head(path: Path) -> None:
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    save_file(weights, file, metadata={"format": "pt"})


MANY = {"num_attention_heads": 32, "hidden_size": 128}


@pytest.mark.parametrize(
    ("family", "settings", "change"),
    [
        ("Llama", {}, drop("num_key_value_heads", "head_dim", "rope_parameters", "rms_norm_eps")),
        ("Llama", {}, put(num_key_value_heads=None, head_dim=None)),
        ("Llama", {"rms_norm_eps": 1e-6}, drop("rms_norm_eps", "hidden_act")),
        ("Mistral", MANY | {"num_key_value_heads": 8, "sliding_window": None},
         drop("num_key_value_heads", "head_dim")),
        ("Qwen2", MANY | {"num_key_value_heads": 32}, drop("num_key_value_heads", "layer_types")),
        ("Qwen3", {"head_dim": 128}, drop("head_dim", "layer_types", "tie_word_embeddings")),
        ("Qwen3", MANY | {"num_key_value_heads": 32, "head_dim": 8}, drop("num_key_value_heads")),
        ("Llama", {"tie_word_embeddings": True}, equal_head),
        # Says what the file without it means.
        ("Llama", {}, put(rope_theta=5e5)),  # rope_parameters has its own
        ("Llama", {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
         put(rope_scaling=LLAMA3, rope_theta=5e5)),
        ("Qwen2", {}, put(use_sliding_window=False, sliding_window=8)),
        ("Mistral", {"sliding_window": 4096}, put()),
        # Twice the heads of half the width fit the same weights.
        ("Llama", {}, put(num_attention_heads=8, num_key_value_heads=8, head_dim=8)),
    ],
)  # fmt: skip
def test_defaults_are_those_of_the_class(
    family: str, settings: dict[str, Any], change: Callable[[Path], None], tmp_path: Path
) -> None:
    path = checkpoint(tmp_path / "m", family, **settings)
    change(path)
    result = exported(path, tmp_path / "out")
    np.testing.assert_allclose(result, expected(path), atol=TOLERANCE)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "OPT"])
def test_every_key_that_transformers_writes_passes(family: str) -> None:
    import transformers

    from tests.support.configs import read_config

    config = getattr(transformers, f"{family}Config")()
    if family == "Mistral":
        config.sliding_window = None
    for text in (config.to_json_string(use_diff=True), config.to_json_string(use_diff=False)):
        values = json.loads(text)
        assert read_config(values, family, "config.json").vocab_size == config.vocab_size


ABSENT = object()
# Known to one of the families or to all of them, or what another one would mean by it.
KEYS = """
    is_causal rope_scaling rope_theta rope_parameters partial_rotary_factor head_dim
    original_max_position_embeddings sliding_window use_sliding_window max_window_layers layer_types
    attention_bias mlp_bias tie_word_embeddings num_key_value_heads num_attention_heads hidden_size
    num_hidden_layers vocab_size max_position_embeddings per_layer_config pretraining_tp num_experts
    logit_scale is_decoder use_cache temperature no_rope_layers rope_interleaved rms_norm_eps
    hidden_act attention_chunk_size use_bidirectional_attention enable_bias word_embed_proj_dim
    do_layer_norm_before layer_norm_elementwise_affine activation_function ffn_dim output_attentions
    _remove_final_layer_norm architectures add_cross_attention quantization_config
"""


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "OPT"])
def test_no_value_of_a_key_makes_another_model(family: str, tmp_path: Path) -> None:
    """Each key, dropped or changed, is refused or has the effect that transformers gives it."""
    from huggingface_hub.errors import StrictDataclassError

    settings = {"ffn_dim": 96} if family == "OPT" else {"sliding_window": None, "head_dim": 16}
    path = checkpoint(tmp_path / "m", family, **settings)
    written = json.loads((path / "config.json").read_text())
    if family == "OPT":  # keeps what it does not know
        written = {key: value for key, value in written.items() if key not in ROTARY_ONLY}
    equal = 0
    for key in KEYS.split():
        for value in (ABSENT, None, False, True, 8, {"rope_theta": 5e5}):
            values = {**written, key: value}
            stated = {name: held for name, held in values.items() if held is not ABSENT}
            (path / "config.json").write_text(json.dumps(stated))
            try:
                artifact = export_model(str(path), tmp_path / "out")
            except ExportError:
                continue
            if artifact.manifest.dimensions.context < len(TOKENS):
                continue
            try:
                wanted = expected(path)
            except (StrictDataclassError, TypeError, ValueError):  # transformers refuses it
                continue
            logits = prefill(Decoder(artifact), 0, TOKENS, rows=len(TOKENS)).logits
            np.testing.assert_allclose(logits, wanted, atol=TOLERANCE, err_msg=f"{key}: {value}")
            equal += 1
    assert equal > 20  # else everything was refused
