"""Read Hugging Face's config.json into a `ModelConfig`.

One function per architecture. What the exporter cannot write is refused by name, and so is an
unread key (`export.sources.config_keys`). Absent keys take the defaults of transformers'
configuration classes, which differ: absent key heads are 8 in Mistral and 32 in Qwen2. Rotary
parameters are read in both forms: `rope_theta` + `rope_scaling`, and `rope_parameters`
(transformers 5).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from pilotfish.export.config import ModelConfig, ModelType, RopeScaling
from pilotfish.export.sources.config_keys import INERT, INERT_OF, NEUTRAL, NEUTRAL_OF
from pilotfish.export.sources.fields import MAX_COUNT, Fields

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
WINDOW = 4096  # the default of every class that has one
IN_GGUF = ("llama", "mistral", "qwen2", "qwen3")  # families whose GGUF files are read


def read_config(
    values: Mapping[str, Any], name: str, where: str, ignored: Collection[str] = ()
) -> ModelConfig:
    """Read the model that a config.json describes.

    Args:
        values: the decoded JSON object.
        name: what to call the model.
        where: path of the file, for errors.
        ignored: unknown keys to be ignored.

    Raises:
        ExportError: naming what is missing, malformed, not supported or not known.
    """
    fields = Fields(values, where)
    model_type = fields.get("model_type", str, "")
    if model_type not in READERS:
        supported = f"supported are {', '.join(READERS)}"
        if _has_experts(values, model_type):
            raise fields.error(
                f"mixture-of-experts models are not supported ({model_type}); {supported}"
            )
        raise fields.error(f"architecture {model_type!r} is not supported; {supported}")
    config = READERS[model_type](fields, name)
    if quantised := values.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        advice = ", or a GGUF file of the model" if model_type in IN_GGUF else ""
        raise fields.error(
            f"the checkpoint is quantised ({method}): give the original weights{advice}"
        )
    family = config.model_type
    fields.refuse_unknown(INERT | INERT_OF[family], NEUTRAL | NEUTRAL_OF.get(family, {}), ignored)
    return config


def _has_experts(values: Mapping[str, Any], model_type: str) -> bool:
    """Whether it is a mixture of experts, by their number or by the architecture's name."""
    stated = [values[key] for key in EXPERT_COUNTS if values.get(key) is not None]
    return any(stated) if stated else "moe" in model_type


def _llama(fields: Fields, name: str) -> ModelConfig:
    bias = fields.get("attention_bias", bool, False)
    mlp_bias = fields.get("mlp_bias", bool, False)
    return _rotary_decoder(
        fields,
        name,
        "llama",
        _head_shape(fields),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=mlp_bias,
    )


def _mistral(fields: Fields, name: str) -> ModelConfig:
    _refuse_window(fields)
    return _rotary_decoder(fields, name, "mistral", _head_shape(fields, kv_heads=8))


def _qwen2(fields: Fields, name: str) -> ModelConfig:
    if _uses_window(fields):
        _refuse_window(fields)
    return _rotary_decoder(
        fields, name, "qwen2", _head_shape(fields, kv_heads=32), attention_bias=True
    )


def _qwen3(fields: Fields, name: str) -> ModelConfig:
    if _uses_window(fields):
        _refuse_window(fields)
    bias = fields.get("attention_bias", bool, False)
    return _rotary_decoder(
        fields,
        name,
        "qwen3",
        _head_shape(fields, kv_heads=32, head_dim=128),
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


def _opt(fields: Fields, name: str) -> ModelConfig:
    activation = fields.get("activation_function", str, "relu")
    if activation not in ("relu", "gelu"):
        raise fields.error(f"the activation {activation!r} is not supported here; relu, gelu are")
    if not fields.get("layer_norm_elementwise_affine", bool, True):
        raise fields.error("layer norms without weights are not supported")
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if hidden % heads:
        raise fields.error(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    embedding = fields.count("word_embed_proj_dim", hidden, null=hidden)
    pre_norm = fields.get("do_layer_norm_before", bool, True)
    cut = fields.get("_remove_final_layer_norm", bool, False)
    bias = fields.get("enable_bias", bool, True)
    return ModelConfig(
        name=name,
        model_type="opt",
        layers=fields.count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=fields.count("ffn_dim"),
        context=fields.count("max_position_embeddings"),
        vocab_size=fields.count("vocab_size"),
        tied=fields.get("tie_word_embeddings", bool, True),
        norm_eps=1e-5,  # torch's default, which OPT keeps
        rope_theta=None,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        activation="gelu" if activation == "gelu" else "relu",
        pre_norm=pre_norm,
        final_norm=pre_norm and not cut,
        embedding=None if embedding == hidden else embedding,
        position_offset=2,
    )


READERS: dict[str, Callable[[Fields, str], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "opt": _opt,
}


class _Heads(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int


def _head_shape(
    fields: Fields, *, kv_heads: int | None = None, head_dim: int | None = None
) -> _Heads:
    """Return number and width of the heads; the keywords are the class's defaults, if any."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    keys = fields.count("num_key_value_heads", kv_heads or heads, null=heads)
    if head_dim is None:
        head_dim = fields.count("head_dim", hidden // heads, null=hidden // heads)
    else:
        head_dim = fields.count("head_dim", head_dim)
    if heads % keys:
        raise fields.error(
            f"num_attention_heads {heads} is no multiple of num_key_value_heads {keys}"
        )
    if head_dim % 2:
        raise fields.error(
            f"heads of width {head_dim} (head_dim, else hidden_size / num_attention_heads) "
            "cannot be rotated: it must be even"
        )
    return _Heads(heads, keys, head_dim)


def _rotary_decoder(
    fields: Fields,
    name: str,
    model_type: ModelType,
    shape: _Heads,
    *,
    attention_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    """Read what llama, mistral, qwen2 and qwen3 share; the keywords are their differences."""
    if (activation := fields.get("hidden_act", str, "silu")) != "silu":
        raise fields.error(f"the activation {activation!r} is not supported here; silu is")
    layers = fields.count("num_hidden_layers")
    _refuse_layer_types(fields, layers)
    theta, scaling = _rotary(fields)
    return ModelConfig(
        name=name,
        model_type=model_type,
        layers=layers,
        hidden=fields.count("hidden_size"),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate=fields.count("intermediate_size"),
        context=fields.count("max_position_embeddings"),
        vocab_size=fields.count("vocab_size"),
        tied=fields.get("tie_word_embeddings", bool, False),
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias=attention_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def _refuse_layer_types(fields: Fields, layers: int) -> None:
    """Refuse layers other than full attention."""
    if (kinds := fields.items("layer_types")) is None:
        return
    if any(kind != "full_attention" for kind in kinds):
        raise fields.error("layers with other than full attention are not supported (layer_types)")
    if len(kinds) != layers:
        raise fields.error(f"layer_types names {len(kinds)} layers, num_hidden_layers {layers}")


def _uses_window(fields: Fields) -> bool:
    """Whether Qwen's sliding_window is in effect; the file has it either way."""
    fields.get("sliding_window", int, WINDOW, null=MAX_COUNT)
    return fields.get("use_sliding_window", bool, False)


def _refuse_window(fields: Fields) -> None:
    """Refuse a window shorter than the context; a longer one never takes effect."""
    window = fields.get("sliding_window", int, WINDOW, null=MAX_COUNT)
    if window < fields.count("max_position_embeddings"):
        raise fields.error(f"sliding-window attention is not supported (sliding_window {window})")


def _rotary(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Read base and scaling of the rotary embedding.

    Where `rope_parameters` and `rope_scaling` differ, readers disagree on which counts, so that is
    refused.
    """
    tables = [fields.table("rope_parameters"), fields.table("rope_scaling")]
    found = [_read_rotary(fields, table) for table in tables if table.values]
    if not found:
        return _read_rotary(fields, tables[0])
    if found[0] != found[-1]:
        raise fields.error(
            "rope_parameters and rope_scaling both stand there and say different things: remove "
            "the one that is not meant"
        )
    return found[0]


def _read_rotary(fields: Fields, rope: Fields) -> tuple[float, RopeScaling | None]:
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise fields.error("rotary parameters that differ between layers are not supported")
    theta = rope.positive("rope_theta", fields.positive("rope_theta", 10000.0))
    part = fields.get("partial_rotary_factor", float, 1.0, null=1.0)
    if rope.get("partial_rotary_factor", float, part) != 1.0:
        raise fields.error("rotary embedding of a part of the head is not supported")
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))  # `type`: older files
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise fields.error(f"rotary scaling {kind!r} is not supported; llama3 is")
    scaling = RopeScaling(
        factor=rope.positive("factor"),
        low_freq_factor=rope.positive("low_freq_factor"),
        high_freq_factor=rope.positive("high_freq_factor"),
        original_context=rope.count(
            "original_max_position_embeddings", fields.count("max_position_embeddings")
        ),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise rope.error(f"{rope.prefix}low_freq_factor is not below {rope.prefix}high_freq_factor")
    return theta, scaling
