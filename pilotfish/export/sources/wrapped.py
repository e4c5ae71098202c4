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

# model_type of a wrapper → default model_type of its text_config.
TEXT_TYPES = {
    "exaone4_5": "exaone4",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "idefics3": "llama",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "smolvlm": "llama",
}
FLAT = ("qwen2_vl", "qwen2_5_vl")  # wrappers whose files may lack text_config
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
OUTER_KEYS = ("bos_token_id", "eos_token_id", "quantization_config")
# Wrappers that change logits as their text model does; transformers' others only apply the head.
CHANGED_LOGITS = ("gemma3", "gemma3n", "gemma4", "gemma4_unified", "paligemma")


def text_config(values: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return the text model's configuration; None if `values` itself is a text model's.

    Raises:
        ExportError: if wrapper and text model contradict each other.
    """
    inner, outer_type = values.get("text_config"), str(values.get("model_type"))
    if inner is None and outer_type in FLAT:
        return {**values, "model_type": TEXT_TYPES[outer_type]}
    if not isinstance(inner, dict) or outer_type in ARCHITECTURES:
        return None
    config = {"model_type": TEXT_TYPES.get(outer_type, ""), **inner}
    config["model_type"] = RENAMED.get(config["model_type"], config["model_type"])
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


def text_weights(stored: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Map the text model's weight names to names in the file; also return the omitted modules."""
    names: dict[str, str] = {}
    left: dict[str, None] = {}
    for name in stored:
        inside = next((pair for pair in INSIDE if name.startswith(pair[0])), None)
        if inside is not None:
            names[inside[1] + name.removeprefix(inside[0])] = name
        elif name.startswith(HEADS):
            names[name] = name
        else:
            left[name.removeprefix("model.").split(".")[0]] = None
    return names, list(left)
