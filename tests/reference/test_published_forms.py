"""Configurations and weight names as published, which transformers reads but no longer writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from tests.reference.families import EVERY, write_checkpoint
from tests.reference.parity import TEXT, Floats, answer, load
from tests.support.prefill import prefill

pytestmark = pytest.mark.reference
TOLERANCE = 1e-3
SHORT = TEXT[:60]
VISION_TOKENS = {
    "image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252,
    "vision_end_token_id": 253, "vision_token_id": 254,
}  # fmt: skip
REMOTE = {"auto_map": {"AutoModelForCausalLM": "modeling_its_own.ForCausalLM"}}
Values = dict[str, Any]


class Published(NamedTuple):
    """A published form: the family, what its files state, and its names of weights.

    `settings` maps the configuration that transformers writes to the published one; `names` has
    prefixes of names → published prefixes; `left_out` lists what the manifest must say.
    """

    family: str
    settings: Callable[[Values], Values]
    names: Mapping[str, str] = {}
    more: Mapping[str, tuple[int, ...]] = {}
    left_out: tuple[str, ...] = ()


def old_rope(values: Values, kind: str | None = None, **more: Any) -> Values:
    """State rotary parameters by the older keys rope_theta and rope_scaling."""
    table = values.pop("rope_parameters")
    theta = table.pop("rope_theta")
    if kind is not None:
        table = {key: table[key] for key in table if key != "rope_type"} | {"type": kind}
    return {**values, "rope_theta": theta, "rope_scaling": {**table, **more} or None}


def flat(values: Values, kind: str = "mrope") -> Values:
    """Put the keys of the text at the top level, as Qwen did."""
    text = old_rope(values.pop("text_config"), kind)
    del text["layer_types"]
    return {**text, **values, **VISION_TOKENS, "rms_norm_eps": text["rms_norm_eps"]}


def with_text(change: Callable[[Values], Values], **outer: Any) -> Callable[[Values], Values]:
    return lambda values: {**values, **outer, "text_config": change(values["text_config"])}


NULL_TOKENS: Values = dict.fromkeys(VISION_TOKENS)
OLM = with_text(lambda text: old_rope(text, "default", rope_type="default") | NULL_TOKENS,
                **VISION_TOKENS)  # fmt: skip
EXAONE = with_text(
    lambda text: text | {
        "model_type": "exaone4_5_text", "sliding_window_pattern": "LLLG", "_num_mtp_layers": 1,
        "num_nextn_predict_layers": 1, "mtp_loss_scaling_factor": 0.05, "mtp_share_layers": True,
        "rope_scaling": text.pop("rope_parameters"),
    },
    image_token_id=250,
)  # fmt: skip
QWEN_NAMES = {
    "model.embed": "model.language_model.embed", "model.layers": "model.language_model.layers",
    "model.norm": "model.language_model.norm", "visual.": "model.visual.",
}  # fmt: skip
FORMS = {
    "Qwen2-VL": Published("qwen2-vl", flat, left_out=("visual",)),
    "Qwen2.5-VL": Published("qwen2.5-vl", flat, left_out=("visual",)),
    "Qwen2.5-VL with YaRN": Published(
        "qwen2.5-vl",
        lambda values: flat(values, "yarn") | {
            "rope_scaling": {"type": "yarn", "mrope_section": [4, 2, 2], "factor": 4,
                             "original_max_position_embeddings": 32}},
        left_out=("visual",),
    ),
    "olmOCR 2": Published("qwen2.5-vl", OLM, left_out=("visual",)),
    "olmOCR 2, newer names": Published("qwen2.5-vl", OLM, QWEN_NAMES, left_out=("visual",)),
    "Qwen3-VL with another type of text": Published(
        "qwen3-vl",
        with_text(lambda text: {
            **{key: value for key, value in text.items() if key != "rope_parameters"},
            "model_type": "qwen3"}),
        left_out=("visual",),
    ),
    "EXAONE 4.5": Published(
        "exaone4.5", EXAONE, more={"mtp.layers.0.input_layernorm.weight": (64,)},
        left_out=("mtp", "visual"),
    ),
    "InternLM 3": Published("internlm3", lambda values: REMOTE | {
        "qkv_bias": values.pop("attention_bias"), "bias": values.pop("mlp_bias"),
        **old_rope(values, "dynamic", factor=6.0, rope_type="dynamic")}),
    "IQuest-Coder": Published("iquestcoder", lambda values: old_rope(values) | REMOTE | {
        "clip_qkv": None, "use_sliding_window": False, "sliding_window": None,
        "max_window_layers": 1}),
    "CWM": Published("cwm", lambda values: {
        key: value for key, value in old_rope(values).items() if key != "layer_types"}),
    "Falcon Mamba 7B": Published("falcon-mamba", lambda values: values | {
        "expand": 16, "intermediate_size": 192, "time_step_rank": 4}),
    "MobileLLM-R1": Published("mobilellm-r1", lambda values: old_rope(values) | {
        "attention_chunk_size": 8192, "for_llm_compressor": False, "num_experts_per_tok": 0,
        "interleave_moe_layer_step": 0}),
    "a context before YaRN outside the table": Published("starcoder2", lambda values: {
        **old_rope(values, "yarn", factor=4.0), "original_max_position_embeddings": 32}),
    "Ministral 3 with both tables": Published("ministral3", lambda values: values | {
        "rope_scaling": values["rope_parameters"] | {"llama_4_scaling_beta": 0.9}}),
    "Bamba with an unread key": Published("bamba", lambda values: {
        **{key: value for key, value in values.items() if key != "rope_parameters"},
        "partial_rotary_factor": 0.25}),
    "CodeLlama": Published("llama", lambda values: values | {"pretraining_tp": 2}),
}  # fmt: skip


def publish(name: str, path: Path) -> Path:
    """Write a family's checkpoint in a published form."""
    form = FORMS[name]
    write_checkpoint(form.family, path)
    file = path / "config.json"
    file.write_text(json.dumps(form.settings(json.loads(file.read_text()))))
    weights: dict[str, Any] = {}
    for stored, value in load_file(path / "model.safetensors").items():
        old = next((old for old in form.names if stored.startswith(old)), "")
        weights[form.names.get(old, "") + stored.removeprefix(old)] = value
    weights |= {other: np.ones(shape, np.float32) for other, shape in form.more.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def logits_of(path: Path, out: Path) -> tuple[Floats, list[str]]:
    """Export; return the logits and what the manifest lists as left out."""
    artifact = export_model(str(path), out)
    logits = prefill(Decoder(artifact, threads=1), 0, SHORT, rows=len(SHORT)).logits
    return logits, list(artifact.manifest.source.left_out)


@pytest.mark.parametrize("name", FORMS)
def test_published_form_equals_transformers(name: str, tmp_path: Path) -> None:
    path = publish(name, tmp_path / "m")
    loaded = load(path, EVERY[FORMS[name].family].auto)
    assert loaded.complete
    logits, left_out = logits_of(path, tmp_path / "out")
    np.testing.assert_allclose(logits, answer(loaded.model, SHORT).logits, atol=TOLERANCE)
    assert sorted(left_out) == sorted(FORMS[name].left_out)


@pytest.mark.parametrize("key", ["moe_layers", "layer_types", "no_rope_layers"])
def test_llama4_is_refused_if_a_default_would_be_another_model(key: str, tmp_path: Path) -> None:
    path = publish("MobileLLM-R1", tmp_path / "m")
    values = json.loads((path / "config.json").read_text())
    del values[key]
    (path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ExportError, match="only with moe_layers"):
        export_model(str(path), tmp_path / "out")


def test_biases_that_transformers_does_not_support_are_refused(tmp_path: Path) -> None:
    path = publish("InternLM 3", tmp_path / "m")
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"bias": False}))
    with pytest.raises(ExportError, match="qkv_bias and bias differ"):
        export_model(str(path), tmp_path / "out")
