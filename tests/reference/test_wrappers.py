"""Multimodal wrappers of transformers: a text is computed as by the text model alone."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.export.model import export_model
from pilotfish.export.sources.wrapped import FIXED, TEXT_TYPES
from tests.reference.families import FAMILIES, liven
from tests.reference.parity import TEXT, answer
from tests.support.prefill import prefill
from tests.support.small_checkpoints import tokenizer_json

pytestmark = pytest.mark.reference
SHORT = TEXT[:50]
TOLERANCE = 1e-3
# Sizes of whatever sees or hears; each configuration takes those that it has.
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "depth": 1, "num_heads": 2, "num_layers": 1,
    "embed_dim": 32, "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "image_size": 28, "patch_size": 14, "out_hidden_size": 64,
    "output_hidden_size": 64, "projection_dim": 32, "num_mel_bins": 16, "resampler_depth": 1,
    "resampler_n_latents": 4, "max_source_positions": 32, "hidden_dim": 32,
}  # fmt: skip
# In families.py; their towers have no small sizes, or need a package that is not here.
ELSEWHERE = {family.model_type for family in FAMILIES.values()}
TOO_LARGE = {"deepseek_vl_hybrid", "janus"}
OTHER_PACKAGES = {"fast_vlm", "gemma3n", "perception_lm"}  # timm
# transformers leaves out their text models' factor of the logits.
UNSCALED = {"aya_vision", "cohere2_vision"}
WRAPPERS = sorted(set(TEXT_TYPES) - ELSEWHERE - TOO_LARGE - OTHER_PACKAGES - UNSCALED)


def text_settings(model_type: str) -> dict[str, Any]:
    """The settings of the first family of this type that is not itself wrapped."""
    plain = (f for f in FAMILIES.values() if f.auto == "AutoModelForCausalLM")
    settings = next(f.settings for f in plain if f.model_type == model_type)
    return {**settings, "model_type": model_type, "tie_word_embeddings": False, "pad_token_id": 0}


def small_model(wrapper: str) -> Any:
    """A random model of the class that generates texts with this wrapper."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[wrapper]
    name = config_class.__name__.removesuffix("Config")
    parts: dict[str, Any] = {"text_config": text_settings(TEXT_TYPES[wrapper])}
    for key, part in config_class.sub_configs_defaults.items():
        if key != "text_config":
            known = part
            if part.model_type in CONFIG_MAPPING:  # which has no `get` of its own
                known = CONFIG_MAPPING[part.model_type]
            fields = inspect.signature(known.__init__).parameters
            sizes = {field: size for field, size in SMALL.items() if field in fields}
            parts[key] = {"model_type": part.model_type, **sizes}
    config = config_class(**parts, tie_word_embeddings=False)
    config._attn_implementation = "eager"
    whole = "GotOcr2" if name == "PPChart2Table" else name
    return getattr(transformers, f"{whole}ForConditionalGeneration")(config).float().eval()


def test_wrappers_with_a_text_model_of_one_type() -> None:
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    parts = {kind: CONFIG_MAPPING[kind].sub_configs_defaults["text_config"] for kind in TEXT_TYPES}
    fixed = {kind for kind in parts if issubclass(parts[kind].config_class, PreTrainedConfig)}
    assert fixed == set(FIXED)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_text_of_a_wrapper_is_that_of_its_text_model(wrapper: str, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(5)
    model = small_model(wrapper)
    liven(model)
    model.save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    artifact = export_model(str(tmp_path / "m"), tmp_path / "out", check=False)
    wanted = answer(model, SHORT).logits
    assert wanted.std() > 0.5
    logits = prefill(Decoder(artifact, threads=1), 0, SHORT, rows=len(SHORT)).logits
    np.testing.assert_allclose(logits, wanted, atol=TOLERANCE)
    assert artifact.manifest.source.left_out
