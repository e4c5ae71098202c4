"""Make a small checkpoint of a published config.json, as its publisher would have written it.

Weights have the names that published files have; config.json is the published one with small sizes
(`published_sizes`), not what transformers would save.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.reference.families import liven
from tests.reference.published_sizes import shrink
from tests.support.small_checkpoints import tokenizer_json

# A wrapper's model_type → prefix of its text model's weights in published files, if transformers
# does not write it. Text models alone have "model." there.
TEXT = {
    "gemma3n": "model.language_model.",
    "gemma4": "model.language_model.",
    "qwen3_vl": "model.language_model.",
    "qwen3_vl_moe": "model.language_model.",
    "qwen3_5": "model.language_model.",
    "qwen3_5_moe": "model.language_model.",
    "idefics3": "model.text_model.",
    "smolvlm": "model.text_model.",
    "qwen2_vl": "model.",
    "qwen2_5_vl": "model.",
}
OTHERWISE = "language_model.model."  # LLaVA, Mistral 3, Aya Vision, Gemma 3


class CannotMakeError(Exception):
    """Transformers cannot make a model of this file."""


class Made(NamedTuple):
    """A checkpoint, and the model that transformers loads from it."""

    path: Path
    model: Any
    names: list[str]  # kinds of weights, without numbers
    note: str  # what is not as published


def small_config(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Shrink the file; without transformers' class of it, only what the file itself says."""
    from transformers import AutoConfig

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values), "utf-8")
    try:
        full = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception:  # any class of error: transformers' checks of a configuration raise many
        full = None
    small = shrink(values, full)
    (folder / "config.json").write_text(json.dumps(small), "utf-8")
    (folder / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    return small


def make_checkpoint(folder: Path) -> Made:
    """Write weights beside a config.json, and load the folder as transformers does.

    Raises:
        CannotMakeError: if transformers does not know the model, or does not find its weights.
    """
    import torch
    import transformers
    from transformers import AutoConfig

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(5)
    values = json.loads((folder / "config.json").read_text("utf-8"))
    note = ""
    if values.pop("quantization_config", None) is not None:
        (folder / "config.json").write_text(json.dumps(values), "utf-8")
        note = "as if not quantised"
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kind = _model_class(config, values)
        _untie(config, values)
        model = kind._from_config(config, attn_implementation="eager").float()
    except Exception as error:
        return _text_alone(folder, values, error)
    liven(model)
    return _written(folder, model, kind)._replace(note=note)


def _untie(config: Any, values: Mapping[str, Any]) -> None:
    """Store a head where the file says nothing and the text model's class has one of its own.

    Wrappers of transformers 5 tie by default, but published ones of such text models are not tied;
    transformers keeps a head that it finds in the file.
    """
    inner = values.get("text_config")
    stated = any("tie_word_embeddings" in each for each in (values, inner or {}))
    if isinstance(inner, dict) and not stated:
        config.tie_word_embeddings = type(config.get_text_config())().tie_word_embeddings


def _model_class(config: Any, values: Mapping[str, Any]) -> Any:
    """The class that the file names, else the one of its model_type."""
    import transformers

    for name in values.get("architectures") or []:
        named = getattr(transformers, name, None)
        if named is not None and isinstance(config, named.config_class):
            return named
    for auto in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
        mapping = getattr(transformers, auto)._model_mapping
        if type(config) in mapping:
            return mapping[type(config)]
    raise CannotMakeError(f"transformers has no model of {type(config).__name__}")


def _written(folder: Path, model: Any, kind: Any) -> Made:
    from safetensors.torch import load_file, save_file

    stored = folder / "stored"
    model.save_pretrained(stored)
    weights = {}
    for file in stored.glob("*.safetensors"):
        weights |= load_file(file)
    shutil.rmtree(stored)
    if getattr(model.config, "model_type", "") == "qwen3_vl_moe":  # published ones are transposed
        stacked = [name for name in weights if ".mlp.experts." in name]
        weights |= {name: weights[name].transpose(1, 2).contiguous() for name in stacked}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    loaded = _load(folder, kind, model.config)
    return Made(folder, loaded, _kinds(weights), "")


def _load(folder: Path, kind: Any, known: Any) -> Any:
    import torch
    from transformers import AutoConfig

    # The same class as before: InternLM 3 has a configuration class of its own, and Llama's model.
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    assert type(config) is type(known)
    try:
        model, result = kind.from_pretrained(
            folder,
            config=config,
            attn_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
        )
    except RuntimeError as error:
        raise CannotMakeError(f"transformers does not load its own weights: {error}") from None
    odd = {key: list(value)[:3] for key, value in result.items() if value}
    if odd:
        raise CannotMakeError(f"transformers does not find its own weights: {odd}")
    return model.eval()


def _text_alone(folder: Path, values: Mapping[str, Any], error: Exception) -> Made:
    """Make only the text model of a wrapper, whose other parts cannot be made here."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    reason = f"{type(error).__name__}: {str(error).strip()[:200]}"
    if "text_config" not in values:
        raise CannotMakeError(reason)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text = config.get_text_config()
        text.tie_word_embeddings = config.tie_word_embeddings
        model = AutoModelForCausalLM.from_config(text, attn_implementation="eager").float()
    except Exception as second:
        raise CannotMakeError(f"{reason}; and its text: {str(second).strip()[:200]}") from None
    liven(model)
    stored = folder / "stored"
    model.save_pretrained(stored)
    weights = {}
    prefix = TEXT.get(values["model_type"], OTHERWISE)
    for file in stored.glob("*.safetensors"):
        for name, weight in load_file(file).items():
            inside = name.startswith("model.")
            other = "" if prefix.startswith("model.") else "language_model."
            weights[prefix + name.removeprefix("model.") if inside else other + name] = weight
    shutil.rmtree(stored)
    weights["vision_tower.patches.weight"] = torch.ones(2, 2)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return Made(folder, model.eval(), _kinds(weights), f"text alone, in memory ({reason})")


def _kinds(names: Mapping[str, Any]) -> list[str]:
    """Names with their numbers left out."""
    return sorted({".".join("N" if p.isdigit() else p for p in n.split(".")) for n in names})
