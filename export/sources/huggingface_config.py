"""Hugging Face's config.json → `ModelConfig`.

One function per architecture; what the exporter cannot write is refused by name. Absent keys take
the defaults of transformers' configuration classes. Rotary parameters are read in both forms:
`rope_theta` + `rope_scaling`, and `rope_parameters` (transformers 5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from export.config import ModelConfig, ModelType, RopeScaling
from export.errors import ExportError

T = TypeVar("T", int, float, bool, str)
MIXTURE_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
MISTRAL_WINDOW = 4096  # MistralConfig's default


class Fields:
    """Typed access to a JSON object; ExportError names the file and key that does not fit."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key`; null counts as absent."""
        value = self.values.get(key)
        if value is None:
            value = default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(f"{key} is {value!r}, and must be of type {kind.__name__}")
        return value

    def error(self, problem: str) -> ExportError:
        """The error to raise about this object."""
        return ExportError(f"{self.where}: {problem}")


def read_config(values: Mapping[str, Any], name: str, where: str) -> ModelConfig:
    """The model that a config.json describes.

    Args:
        values: the decoded JSON object.
        name: what to call the model.
        where: path of the file, for errors.

    Raises:
        ExportError: naming what is missing, malformed or not supported.
    """
    fields = Fields(values, where)
    model_type = fields.get("model_type", str, "")
    if quantised := values.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise fields.error(
            f"the checkpoint is quantised ({method}): give the original weights, or a GGUF file"
        )
    if any(values.get(key) for key in MIXTURE_KEYS) or "moe" in model_type:
        raise fields.error(f"mixture-of-experts models are not supported ({model_type})")
    if model_type not in READERS:
        raise fields.error(
            f"architecture {model_type!r} is not supported; supported are {', '.join(READERS)}"
        )
    return READERS[model_type](fields, name)


def _llama(fields: Fields, name: str) -> ModelConfig:
    bias = fields.get("attention_bias", bool, False)
    mlp_bias = fields.get("mlp_bias", bool, False)
    return _rotary_decoder(
        fields, name, "llama", attention_bias=bias, output_bias=bias, mlp_bias=mlp_bias
    )


def _mistral(fields: Fields, name: str) -> ModelConfig:
    if "sliding_window" not in fields.values or fields.values["sliding_window"] is not None:
        _refuse_window(fields, fields.get("sliding_window", int, MISTRAL_WINDOW))
    return _rotary_decoder(fields, name, "mistral")


def _qwen2(fields: Fields, name: str) -> ModelConfig:
    if fields.get("use_sliding_window", bool, False):
        _refuse_window(fields, fields.get("sliding_window", int, MISTRAL_WINDOW))
    return _rotary_decoder(fields, name, "qwen2", attention_bias=True)


def _qwen3(fields: Fields, name: str) -> ModelConfig:
    if fields.get("use_sliding_window", bool, False):
        _refuse_window(fields, fields.get("sliding_window", int, MISTRAL_WINDOW))
    bias = fields.get("attention_bias", bool, False)
    return _rotary_decoder(
        fields, name, "qwen3", attention_bias=bias, output_bias=bias, qk_norm=True
    )


def _opt(fields: Fields, name: str) -> ModelConfig:
    activation = fields.get("activation_function", str, "relu")
    if activation not in ("relu", "gelu"):
        raise fields.error(f"the activation {activation!r} is not supported here; relu, gelu are")
    if not fields.get("layer_norm_elementwise_affine", bool, True):
        raise fields.error("layer norms without weights are not supported")
    hidden, heads = fields.get("hidden_size", int), _heads(fields)
    embedding = fields.get("word_embed_proj_dim", int, hidden)
    pre_norm = fields.get("do_layer_norm_before", bool, True)
    bias = fields.get("enable_bias", bool, True)
    return ModelConfig(
        name=name,
        model_type="opt",
        layers=fields.get("num_hidden_layers", int),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=fields.get("ffn_dim", int),
        context=fields.get("max_position_embeddings", int),
        vocab_size=fields.get("vocab_size", int),
        tied=fields.get("tie_word_embeddings", bool, True),
        norm_eps=1e-5,  # torch's default, which OPT keeps
        rope_theta=None,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        activation="gelu" if activation == "gelu" else "relu",
        pre_norm=pre_norm,
        final_norm=pre_norm and not fields.get("_remove_final_layer_norm", bool, False),
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


def _rotary_decoder(
    fields: Fields,
    name: str,
    model_type: ModelType,
    *,
    attention_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    """What llama, mistral, qwen2 and qwen3 share; the keywords are where they differ."""
    if (activation := fields.get("hidden_act", str, "silu")) != "silu":
        raise fields.error(f"the activation {activation!r} is not supported here; silu is")
    if set(fields.values.get("layer_types") or ()) - {"full_attention"}:
        raise fields.error("layers with other than full attention are not supported")
    hidden, heads = fields.get("hidden_size", int), _heads(fields)
    theta, scaling = _rotary(fields)
    return ModelConfig(
        name=name,
        model_type=model_type,
        layers=fields.get("num_hidden_layers", int),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.get("num_key_value_heads", int, heads),
        head_dim=fields.get("head_dim", int, hidden // heads),
        intermediate=fields.get("intermediate_size", int),
        context=fields.get("max_position_embeddings", int),
        vocab_size=fields.get("vocab_size", int),
        tied=fields.get("tie_word_embeddings", bool, False),
        norm_eps=fields.get("rms_norm_eps", float, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias=attention_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def _heads(fields: Fields) -> int:
    heads = fields.get("num_attention_heads", int)
    if heads < 1:
        raise fields.error(f"num_attention_heads is {heads}")
    return heads


def _refuse_window(fields: Fields, window: int) -> None:
    """A window that covers the whole context never takes effect; any other is refused."""
    if window < fields.get("max_position_embeddings", int):
        raise fields.error(f"sliding-window attention is not supported (window {window})")


def _rotary(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embedding."""
    stated = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if not isinstance(stated, dict) or any(isinstance(value, dict) for value in stated.values()):
        raise fields.error("rotary parameters that differ between layers are not supported")
    rope = Fields(stated, fields.where)
    theta = rope.get("rope_theta", float, fields.get("rope_theta", float, 10000.0))
    part = rope.get("partial_rotary_factor", float, fields.get("partial_rotary_factor", float, 1.0))
    if part != 1.0:
        raise fields.error("rotary embedding of a part of the head is not supported")
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))  # `type`: older files
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise fields.error(f"rotary scaling {kind!r} is not supported; llama3 is")
    return theta, RopeScaling(
        factor=rope.get("factor", float),
        low_freq_factor=rope.get("low_freq_factor", float),
        high_freq_factor=rope.get("high_freq_factor", float),
        original_context=rope.get("original_max_position_embeddings", int),
    )
