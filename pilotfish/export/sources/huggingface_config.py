"""Read Hugging Face's config.json into a `ModelConfig`, by the table of architectures.

Unsupported settings are refused with an error that names them; the rule for unread keys is in
`export.sources.config_keys`. An absent key has the default of the model's configuration class in
transformers; classes differ: num_key_value_heads is 8 for Mistral and 32 for Qwen2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from pilotfish.engines.manifest import MOST_LAYERS
from pilotfish.export.architectures import ARCHITECTURES, Architecture
from pilotfish.export.architectures.architecture import ACTIVATIONS
from pilotfish.export.model_config import Activation, Form, ModelConfig
from pilotfish.export.parts import Recurrence, Streams, TokenInputs
from pilotfish.export.sources.class_keys import ClassKeys
from pilotfish.export.sources.config_keys import FIELDS, find_foreign_keys
from pilotfish.export.sources.expert_keys import read_experts, width_key
from pilotfish.export.sources.fields import Fields, format_value
from pilotfish.export.sources.layer_pattern import count_layers, read_pattern
from pilotfish.export.sources.mask_keys import (
    read_drafts_per_pass,
    read_mask_token,
    refuse_heads,
)
from pilotfish.export.sources.packing import Packing, read_packing
from pilotfish.export.sources.recurrence_keys import (
    read_factors,
    read_recurrence,
    recurrence_file_keys,
)
from pilotfish.export.sources.unsupported import unsupported_model
from pilotfish.export.sources.weight_check import FileSettings
from pilotfish.export.weights import HEAD

UNBOUNDED = 2**18  # context (positions) of a model that has no maximum
MTP = "num_nextn_predict_layers"


class Description:
    """The description of a model in its config.json.

    Args:
        values: the decoded JSON object.
        name: the model's name.
        where: path of the file, for errors.
        ignored: unknown keys to ignore.

    Attributes:
        values: the decoded JSON object.
        wrapped: whether the object is a part of the file, beside other models than the text model.
        architecture: the entry of its `model_type`.
        packing: quantisation of its matrices; None without one.
        aside: name prefixes of tensors that are not part of the model.
        config: the model's shape.
        settings: the file's names of settings, for errors about weights.
        foreign_keys: names of the keys that are ignored, because transformers' class does not read
        them.

    Raises:
        ExportError: if a setting is missing, malformed, not supported or unknown; the message names
        it.
    """

    def __init__(
        self, values: Mapping[str, Any], name: str, where: str, ignored: Collection[str] = ()
    ) -> None:
        self.values, self.wrapped = values, False
        fields = Fields(values, where)
        model_type = fields.get("model_type", str, "")
        architecture = self.architecture = _find(fields, model_type)
        refuse_heads(fields)
        fields = Fields(_rename_keys(fields, architecture.known.aliases), where)
        fields.mark_read("model_type")
        fields.mark_read("quantization_config")
        self.packing = _read_packing(fields, architecture)
        for key in architecture.not_null:
            if fields.values.get(key, key) is None:
                raise fields.error(f"{key} is null, but must be of type float")
        keys = ClassKeys(fields, architecture)
        self.config = _read(keys, model_type, name)
        self.aside = architecture.names.aside + _extra_layers(keys, self.config.layers)
        self.settings = FileSettings(_file_keys(keys, self.config), _switches(keys))
        self.foreign_keys = find_foreign_keys(fields, architecture, ignored)


def _extra_layers(keys: ClassKeys, layers: int) -> tuple[str, ...]:
    """Return the name prefixes of the layers for multi-token prediction, after the last layer."""
    names, last = keys.architecture.names, layers + min(keys.whole(MTP), MOST_LAYERS)
    return tuple(f"{names.body}.{names.stack}.{i}." for i in range(layers, last))


def _find(fields: Fields, model_type: str) -> Architecture:
    if model_type in ARCHITECTURES:
        architecture = ARCHITECTURES[model_type]
        plain = fields.values.get("num_local_experts") == 0
        return (
            architecture
            if architecture.with_experts is None or plain
            else architecture.with_experts
        )
    raise unsupported_model(fields, model_type)


def _rename_keys(fields: Fields, also: Mapping[str, str]) -> dict[str, Any]:
    """Return the values, with aliases of keys replaced by the class's names."""
    values = dict(fields.values)
    for other, key in also.items():
        if other in values and values.setdefault(key, values[other]) != values.pop(other):
            raise fields.error(
                f"{other} and {key} are two names of the same key, but have "
                "different values: remove the wrong one"
            )
    return values


def _read_packing(fields: Fields, architecture: Architecture) -> Packing | None:
    """Read the quantisation of matrices; None also for MXFP4 (see `export.sources.stored`)."""
    stated = fields.values.get("quantization_config", fields.values.get("quantization"))
    mxfp4 = isinstance(stated, dict) and stated.get("quant_method") == "mxfp4"
    if mxfp4 and architecture.names.stacked:
        return None
    return read_packing(stated, fields.where, gguf=architecture.gguf is not None)


def _read(keys: ClassKeys, model_type: str, name: str) -> ModelConfig:
    architecture, form, hidden = keys.architecture, _form(keys), keys.count("hidden_size")
    # the values of heads and head_dim are defaults for models without attention
    layers, heads, head_dim = count_layers(keys), 1, 1
    if keys.has("num_attention_heads"):
        heads = keys.count("num_attention_heads")
        head_dim = _head_dim(keys, hidden, heads)
    pattern = read_pattern(keys, layers, head_dim)
    recurrence = read_recurrence(keys, pattern)
    embedding = keys.count("word_embed_proj_dim", null=hidden, otherwise=hidden)
    root = float(hidden) ** 0.5
    mask_token = read_mask_token(keys.fields, keys.count("vocab_size"))
    return ModelConfig(
        name=name,
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(keys, heads),
        head_dim=head_dim,
        intermediate=_intermediate(keys, hidden, recurrence),
        context=keys.count("max_position_embeddings", otherwise=UNBOUNDED),
        vocab_size=keys.count("vocab_size"),
        tied=_is_tied(keys),
        norm_eps=keys.number("rms_norm_eps", otherwise=architecture.keys["rms_norm_eps"]),
        form=form,
        pattern=pattern,
        experts=read_experts(keys, pattern),
        activation=_activation(keys),
        embedding=None if embedding == hidden else embedding,
        position_offset=architecture.position_offset,
        score_scale=_score_scale(keys, head_dim),
        score_cap=keys.optional("attn_logit_softcapping"),
        logit_cap=keys.optional("final_logit_softcapping"),
        embed_scale=root if architecture.embed_root else keys.number("embedding_multiplier"),
        residual_scale=keys.number("residual_multiplier"),
        logit_scale=keys.number("logit_scale") / keys.number("logits_scaling"),
        recurrence=recurrence,
        factors=read_factors(keys),
        token_inputs=_token_inputs(keys),
        streams=_streams(keys),
        query_growth=_query_growth(keys),
        mask_token=mask_token,
        drafts_per_pass=None if mask_token is None else read_drafts_per_pass(keys.fields),
    )


def _form(keys: ClassKeys) -> Form:
    architecture = keys.architecture
    try:
        varied = architecture.vary(keys.form_value) if architecture.vary else {}
    except ValueError as error:
        raise keys.fields.error(str(error)) from None
    form = msgspec.structs.replace(architecture.form, **varied)
    biases = [
        module
        for key, modules in architecture.biases.items()
        if key == "" or keys.flag(key)
        for module in modules
        if form.gated or module != "mlp.gate_proj"
    ]
    return msgspec.structs.replace(form, biases=tuple(biases))


def _kv_heads(keys: ClassKeys, heads: int) -> int:
    if not keys.has("num_key_value_heads"):
        return heads
    if keys.has("multi_query"):  # Falcon: only the newer decoder uses the number of key heads
        keys.raw("num_key_value_heads")
        shared = 1 if keys.flag("multi_query") else heads
        if not keys.flag("new_decoder_architecture"):
            return shared
    kv_heads = keys.count("num_key_value_heads", null=heads)
    if heads % kv_heads:
        raise keys.fields.error(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    return kv_heads


def _head_dim(keys: ClassKeys, hidden: int, heads: int) -> int:
    if keys.has("head_dim"):
        width = keys.count("head_dim", null=hidden // heads)
    elif hidden % heads:
        raise keys.fields.error(
            f"{keys.class_key('hidden_size')} {hidden} is not a multiple of "
            f"{keys.class_key('num_attention_heads')} {heads}"
        )
    else:
        width = hidden // heads
        if keys.fields.values.get("head_dim") == width:
            keys.fields.mark_read("head_dim")
    if width % 2 and keys.architecture.unrotated != "all":
        raise keys.fields.error(
            f"heads of width {width} (head_dim, else hidden_size / num_attention_heads) "
            "cannot be rotated: it must be even"
        )
    return width


def _intermediate(keys: ClassKeys, hidden: int, recurrence: Recurrence | None) -> int:
    """Return the width of the feed-forward part; LFM2 derives it from the stated width.

    A model without a dense part returns the width of an expert or of the state spaces. Gemma 3n may
    list a width per layer (`export.sources.layer_sizes`).
    """
    if not keys.has("intermediate_size"):
        if recurrence is None or keys.has("moe_intermediate_size"):
            return keys.count("moe_intermediate_size")
        return recurrence.values
    listed = keys.fields.values.get("intermediate_size")
    if keys.has("activation_sparsity_pattern") and isinstance(listed, list) and listed:
        keys.fields.mark_read("intermediate_size")
        first = Fields({"intermediate_size": listed[0]}, keys.fields.where)
        return first.count("intermediate_size")
    stated = keys.count("intermediate_size", null=4 * hidden)
    if not keys.has("block_ff_dim"):
        return stated
    stated = keys.count("block_ff_dim", null=stated)
    factor = keys.optional("block_ffn_dim_multiplier")
    unit = keys.count("block_multiple_of")
    if not keys.flag("block_auto_adjust_ff_dim"):
        return stated
    width = int(2 * stated / 3)
    return width if factor is None else -(-int(factor * width) // unit) * unit


def _is_tied(keys: ClassKeys) -> bool:
    """Whether the head is the embedding; LFM2's older key overrides the newer one."""
    tied = keys.flag("tie_word_embeddings")
    if keys.has("tie_embedding") and keys.raw("tie_embedding") is not None:
        return keys.flag("tie_embedding")
    return tied


def _token_inputs(keys: ClassKeys) -> TokenInputs | None:
    """Read the sizes of the per-layer embeddings; a width of 0 or null means none."""
    if not keys.has("hidden_size_per_layer_input"):
        return None
    if keys.raw("hidden_size_per_layer_input") in (0, None) and not keys.has("altup_num_inputs"):
        keys.raw("vocab_size_per_layer_input")
        return None
    return TokenInputs(
        width=keys.count("hidden_size_per_layer_input"),
        rows=keys.count("vocab_size_per_layer_input"),
    )


def _streams(keys: ClassKeys) -> Streams | None:
    """Read Gemma 3n's AltUp and Laurel."""
    if not keys.has("altup_num_inputs"):
        return None
    streams = Streams(
        count=keys.count("altup_num_inputs"),
        active=keys.whole("altup_active_idx"),
        scaled=keys.flag("altup_correct_scale"),
        rank=keys.count("laurel_rank"),
    )
    if not 0 <= streams.active < streams.count or streams.count < 2:
        raise keys.fields.error(
            f"altup_active_idx {streams.active} must be at least 0 and below altup_num_inputs, "
            f"which is {streams.count} and must be at least 2"
        )
    return streams


def _activation(keys: ClassKeys) -> Activation:
    if not keys.has("hidden_act"):
        return ACTIVATIONS[keys.default("hidden_act")]
    name = keys.fields.get(keys.class_key("hidden_act"), str, keys.default("hidden_act"))
    known = {**ACTIVATIONS, **keys.architecture.activations}
    if name not in known:
        raise keys.fields.error(
            f"the activation {format_value(name)} is not supported; supported are "
            f"{', '.join(known)}"
        )
    return known[name]


def _score_scale(keys: ClassKeys, head_dim: int) -> float | None:
    if keys.architecture.score_scale is not None:
        return keys.architecture.score_scale
    if keys.has("key_multiplier"):  # Falcon-H1
        factor = keys.number("key_multiplier")
        return None if factor == 1.0 else float(factor * head_dim**-0.5)
    if keys.has("attention_multiplier"):
        return keys.number("attention_multiplier")
    if keys.has("query_pre_attn_scalar"):
        return float(keys.number("query_pre_attn_scalar") ** -0.5)
    return None


def _query_growth(keys: ClassKeys) -> tuple[float, int] | None:
    """Read Ministral 3's query growth; β is among the rotary parameters."""
    if "llama_4_scaling_beta" not in keys.architecture.rope_states:
        return None
    stated = [keys.fields.table(key) for key in ("rope_scaling", "rope_parameters")]
    default = Fields(keys.architecture.rope_default or {}, keys.fields.where)
    table = next((table for table in stated if table.values), default)
    beta, key = table.get("llama_4_scaling_beta", float), "original_max_position_embeddings"
    context = table.count(key, keys.count("max_position_embeddings"))
    return (beta, keys.fields.count(key, context)) if beta else None


# --- for errors ----------------------------------------------------------------------------------


def _file_keys(keys: ClassKeys, config: ModelConfig) -> dict[str, str]:
    """Map fields of `config` to their names in the file."""
    names = {field: keys.class_key(key) for field, key in FIELDS.items()}
    names |= {f"recurrence.{field}": key for field, key in recurrence_file_keys(keys).items()}
    stated = keys.fields.values
    if config.experts is not None:
        width = names["experts.width"] = keys.class_key(width_key(keys))
        if keys.has("n_shared_experts"):
            names["experts.shared"] = f"{width} · {keys.class_key('n_shared_experts')} ="
    for field in ("kv_heads", "head_dim"):
        if stated.get(names[field]) is None:
            names[field] += " (by default)"
    if config.head_dim * config.heads == config.hidden and stated.get("head_dim") is None:
        names["head_dim"] = "head_dim = hidden_size / num_attention_heads ="
    return names


def _switches(keys: ClassKeys) -> dict[str, str]:
    """Map parts of weight names to the setting that decides whether such weights exist."""
    switches = {HEAD: f"{keys.class_key('tie_word_embeddings')} {keys.flag('tie_word_embeddings')}"}
    for key, modules in keys.architecture.biases.items():
        if key:
            setting = f"{key} {keys.flag(key)}"
            switches |= {f"{module}.bias": setting for module in modules}
    listed = keys.architecture.one_part  # such a class may have no layer with experts
    if keys.has("num_experts") and not listed and keys.raw("num_experts") is not None:
        switches[".experts."] = f"{keys.class_key('num_experts')} {keys.count('num_experts')}"
    if keys.has("do_layer_norm_before"):
        switches["model.norm."] = f"do_layer_norm_before {keys.flag('do_layer_norm_before')}"
    return switches
