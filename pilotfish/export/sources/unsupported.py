"""The error for a model whose architecture is not in the table: what the model is, and what to do.

llama.cpp runs more architectures, but `--dialect llamacpp` refuses some of its models
(`export.sources.gguf_kind`).
"""

from __future__ import annotations

from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.fields import Fields, format_value

# model_type of older files → the newer files of the same models.
NEWER = {
    "phi-msft": "take the model's newer files, with model_type phi",
}
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
# Signs of recurrent states: beginnings of model_type and of keys, and kinds of layers.
STATE_MODELS = ("jamba", "plamo2", "rwkv", "xlstm", "zamba")
STATE_KEYS = ("mamba_", "ssm_", "lru_", "linear_attn_", "linear_conv_", "linear_key_")
STATE_LAYERS = {"linear_attention", "mamba", "recurrent"}
LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
# Ends of the names of classes that do not generate a text token by token.
ENCODERS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")


def unsupported_model(fields: Fields, model_type: str) -> ExportError:
    """Build the error for a configuration with this `model_type`."""
    stated = [fields.values[key] for key in EXPERT_COUNTS if fields.values.get(key) is not None]
    problem = f"architecture {format_value(model_type)} is not supported"
    if any(stated) if stated else "moe" in model_type:
        bare = format_value(model_type, quoted=False)
        problem = f"this mixture-of-experts model is not supported ({bare})"
    advice = (
        "take a GGUF file with --dialect llamacpp, if llama.cpp has this model and it is a decoder "
        "without recurrent states"
    )
    if _has_states(fields, model_type):
        advice = "choose another model, since --dialect llamacpp refuses recurrent states, too"
    elif _is_encoder(fields):
        advice = "choose a decoder, which generates a text token by token"
    return fields.error(
        f"{problem}, see `pilotfish export list --supported`: {NEWER.get(model_type, advice)}"
    )


def _has_states(fields: Fields, model_type: str) -> bool:
    lists = [fields.values.get(key) for key in LAYER_LISTS]
    kinds = [kind for each in lists if isinstance(each, list) for kind in each]
    return (
        model_type.startswith(STATE_MODELS)
        or any(key.startswith(STATE_KEYS) for key in fields.values)
        or any(isinstance(kind, str) and kind in STATE_LAYERS for kind in kinds)
    )


def _is_encoder(fields: Fields) -> bool:
    names = fields.values.get("architectures")
    listed = names if isinstance(names, list) else []
    return fields.values.get("is_encoder_decoder") is True or any(
        isinstance(name, str) and name.endswith(ENCODERS) for name in listed
    )
