"""Select the text model of a multimodal checkpoint: its configuration and its weights.

The configuration is `text_config`; older files of Qwen2-VL and Qwen2.5-VL have its keys at the top
level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pilotfish.export.architectures import ARCHITECTURES
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.sources.fields import format_value
from pilotfish.export.sources.huggingface_config import Description

# Default model_type of text_config → the wrappers whose class in transformers computes the same for
# a text as the text model alone (tests/reference/test_wrappers.py).
WRAPPERS: Mapping[str, tuple[str, ...]] = {
    "cohere2": ("aya_vision", "cohere2_vision"),
    "exaone4": ("exaone4_5",),
    "gemma3_text": ("gemma3",),
    "gemma3n_text": ("gemma3n",),
    "gemma4_text": ("gemma4",),
    "gemma4_unified_text": ("gemma4_unified",),
    "lfm2": ("lfm2_vl",),
    "llama": ("deepseek_vl", "deepseek_vl_hybrid", "glmasr", "idefics3", "janus", "llava",
              "llava_next", "llava_next_video", "perception_lm", "smolvlm", "video_llava",
              "vipllava", "voxtral"),
    "mistral": ("idefics2", "mistral3"),
    "qwen2": ("audioflamingo3", "fast_vlm", "got_ocr2", "internvl", "llava_onevision",
              "pp_chart2table", "qwen2_audio", "video_llama_3"),
    "qwen2_5_vl_text": ("qwen2_5_vl",),
    "qwen2_vl_text": ("qwen2_vl",),
    "qwen3": ("lighton_ocr",),
    "qwen3_5_moe_text": ("qwen3_5_moe",),
    "qwen3_5_text": ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "qwen3_5"),
    "qwen3_vl_moe_text": ("qwen3_vl_moe",),
    "qwen3_vl_text": ("qwen3_vl",),
}  # fmt: skip
TEXT_TYPES = {wrapper: text for text, several in WRAPPERS.items() for wrapper in several}
FLAT = ("qwen2_vl", "qwen2_5_vl")  # wrappers whose files may lack text_config
# Wrappers whose text model has the default model_type, whatever text_config states.
FIXED = ("gemma3", "gemma3n", "gemma4", "gemma4_unified", "qwen2_5_vl", "qwen2_vl",
         "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")  # fmt: skip
RENAMED = {"exaone4_5_text": "exaone4"}  # model_type in older files → in newer files
# Prefix of the text model's weights in a file → in a text model.
INSIDE = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.", ""),
    *((f"model.{part}.", f"model.{part}.") for part in ("embed_tokens", "layers", "norm")),
)
HEADS = ("lm_head.",)
OUTER_KEYS = (
    "bos_token_id", "eos_token_id", "quantization_config", "architectures", "auto_map",
)  # fmt: skip
# Wrappers that change logits as their text model does; transformers' others only apply the head.
CHANGED_LOGITS = ("gemma3", "gemma3n", "gemma4", "gemma4_unified")


def text_config(values: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return the text model's configuration; None if `values` itself is a text model's.

    Raises:
        ExportError: if the wrapper is unknown, or contradicts its text model.
    """
    inner, outer_type = values.get("text_config"), str(values.get("model_type"))
    if inner is None and outer_type in FLAT:
        return {**values, "model_type": TEXT_TYPES[outer_type]}
    if not isinstance(inner, dict) or outer_type in ARCHITECTURES:
        return None
    if outer_type not in TEXT_TYPES:
        alone = _with_sizes({"model_type": outer_type, **inner})
        # If the text model is not supported either, this call's error says so.
        Description(alone, outer_type, f"{where}, text_config of {format_value(outer_type[:60])}")
        raise ExportError(
            f"{where}: model_type {format_value(outer_type)} with a text_config is not known "
            "here, so it might compute a text otherwise than its text model alone: if that model "
            "works alone, give its weights with text_config as their config.json"
        )
    config = {"model_type": TEXT_TYPES[outer_type], **inner}
    config["model_type"] = RENAMED.get(str(config["model_type"]), config["model_type"])
    if outer_type in FIXED:
        config["model_type"] = TEXT_TYPES[outer_type]
    config = _with_sizes(config)
    key = "tie_word_embeddings"
    tied = [each[key] for each in (values, inner) if key in each]
    if len(set(map(str, tied))) > 1:
        raise ExportError(
            f"{where}: {key} is {tied[0]} at the top level and {tied[1]} in text_config, and "
            "programs differ in which they use: make both values equal"
        )
    if tied:
        config[key] = tied[0]
    outer = {name: values.get(name) for name in OUTER_KEYS}
    return config | {name: value for name, value in outer.items() if value is not None}


def _with_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Add the sizes that a wrapper's text_config omits because they are the class's defaults."""
    architecture = ARCHITECTURES.get(str(config["model_type"]))
    return config if architecture is None else {**architecture.sizes, **config}


def check_logits(values: Mapping[str, Any], text: ModelConfig, where: str) -> None:
    """Check that a wrapper computes the same logits as its text model alone.

    Raises:
        ExportError: if transformers leaves out a factor or a limit of the text model's logits.
    """
    changed = {"factor": text.logit_scale != 1.0, "limit": text.logit_cap is not None}
    if any(changed.values()) and values.get("model_type") not in CHANGED_LOGITS:
        kind = next(name for name in changed if changed[name])
        raise ExportError(
            f"{where}: {text.model_type} has a {kind} of its logits, which transformers leaves "
            f"out within {values.get('model_type')} and other programs apply: give the text model "
            "alone, with text_config as its config.json"
        )


def text_weights(stored: Iterable[str], where: str) -> tuple[dict[str, str], list[str]]:
    """Map the text model's weight names to names in the file; also return the omitted modules.

    Raises:
        ExportError: if a weight is in the file under two names.
    """
    names: dict[str, str] = {}
    left: dict[str, None] = {}
    for name in stored:
        inside = next((pair for pair in INSIDE if name.startswith(pair[0])), None)
        if inside is None and not name.startswith(HEADS):
            left[name.removeprefix("model.").split(".")[0]] = None
            continue
        ours = name if inside is None else inside[1] + name.removeprefix(inside[0])
        if names.setdefault(ours, name) != name:
            raise ExportError(
                f"{where}: {names[ours]} and {name} stand for the same weight: remove the wrong one"
            )
    return names, list(left)
