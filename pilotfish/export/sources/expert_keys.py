"""Read the experts of a configuration: number, width, and the layers that have experts."""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish.export.model_config import Layer
from pilotfish.export.parts import Experts
from pilotfish.export.sources.class_keys import ClassKeys
from pilotfish.export.sources.fields import format_value

MOST_EXPERTS = 4096


def read_experts(keys: ClassKeys, pattern: Sequence[Layer]) -> Experts | None:
    """Read the sizes of the mixtures of experts; None if the model has none.

    A class that lists the parts of its layers has none without such a layer in the `pattern`.

    Raises:
        ExportError: if a token uses more experts than there are.
    """
    mixture = keys.architecture.mixture
    unlisted = keys.architecture.one_part and not any(layer.experts for layer in pattern)
    if mixture is None or unlisted or not _has_experts(keys):
        return None
    count, chosen = keys.count("num_experts"), keys.count("num_experts_per_tok")
    if count > MOST_EXPERTS:
        raise keys.fields.error(
            f"{keys.class_key('num_experts')} is {count}, but at most {MOST_EXPERTS} experts are "
            "supported"
        )
    if chosen > count:
        raise keys.fields.error(
            f"{keys.class_key('num_experts_per_tok')} is {chosen}, but there are "
            f"{count} experts ({keys.class_key('num_experts')})"
        )
    width = keys.count(width_key(keys))
    shared, biased = None, mixture.biased
    if keys.has("shared_expert_intermediate_size"):
        shared = keys.count("shared_expert_intermediate_size")
    elif keys.has("n_shared_experts") and keys.raw("n_shared_experts") != 0:
        shared = width * keys.count("n_shared_experts")
    if keys.has("use_expert_bias"):
        biased = keys.flag("use_expert_bias")
    latent = keys.has("moe_latent_size") and keys.raw("moe_latent_size") is not None
    return Experts(
        count=count,
        chosen=chosen,
        width=width,
        normed=keys.flag("norm_topk_prob") if mixture.normed is None else mixture.normed,
        scores=mixture.scores,
        biased=biased,
        epsilon=mixture.epsilon,
        least=keys.optional("moe_norm_min") or 0.0,
        factor=keys.number("routed_scaling_factor"),
        latent=keys.count("moe_latent_size") if latent else None,
        shared=shared,
        shared_gate=mixture.shared_gate,
        steepness=keys.number("swiglu_alpha"),
        lift=mixture.lift,
        parallel_mlp=mixture.parallel_mlp,
        limit=keys.optional("swiglu_limit"),
    )


def width_key(keys: ClassKeys) -> str:
    """Return the key of the experts' width, by Llama's name."""
    return "moe_intermediate_size" if keys.has("moe_intermediate_size") else "intermediate_size"


def layers_of_experts(keys: ClassKeys, layers: int) -> list[bool]:
    """Return for each layer whether it has experts instead of a dense feed-forward part.

    Raises:
        ExportError: if a list of layers is malformed.
    """
    if not _has_experts(keys):
        return [False] * layers
    first = keys.whole("first_k_dense_replace")
    last = keys.whole("moe_layer_end_index", otherwise=-1)
    last = layers - 1 if last == -1 else last
    step = keys.count("decoder_sparse_step", otherwise=1)
    plain = keys.fields.items("mlp_only_layers") or [] if keys.has("mlp_only_layers") else []
    if any(type(layer) is not int for layer in plain):
        raise keys.fields.error(
            f"mlp_only_layers is {format_value(plain)}, but must be a list of layer numbers"
        )
    kinds = keys.fields.items("mlp_layer_types") if keys.has("mlp_layer_types") else None
    if kinds is not None:
        if len(kinds) != layers or not all(kind in ("dense", "sparse") for kind in kinds):
            raise keys.fields.error(
                f'mlp_layer_types must state "dense" or "sparse" for each of {layers} layers'
            )
        return [kind == "sparse" for kind in kinds]
    return [first <= i <= last and (i + 1) % step == 0 and i not in plain for i in range(layers)]


def _has_experts(keys: ClassKeys) -> bool:
    """Whether the model has experts, by its class or by a key."""
    mixture = keys.architecture.mixture
    return mixture is not None and (mixture.switch is None or keys.flag(mixture.switch))
