"""Read the experts of a configuration: number, width, and the layers that have experts."""

from __future__ import annotations

from pilotfish.export.parts import Experts
from pilotfish.export.sources.class_keys import ClassKeys


def read_experts(keys: ClassKeys) -> Experts | None:
    """Read the sizes of the mixtures of experts; None if the model has none.

    Raises:
        ExportError: if a token uses more experts than there are.
    """
    mixture = keys.architecture.mixture
    if mixture is None or not _has_experts(keys):
        return None
    width = "moe_intermediate_size" if keys.has("moe_intermediate_size") else "intermediate_size"
    count, chosen = keys.count("num_experts"), keys.count("num_experts_per_tok")
    if chosen > count:
        raise keys.fields.error(
            f"{keys.class_key('num_experts_per_tok')} is {chosen}, but there are "
            f"{count} experts ({keys.class_key('num_experts')})"
        )
    shared = "shared_expert_intermediate_size"
    return Experts(
        count=count,
        chosen=chosen,
        width=keys.count(width),
        normed=keys.flag("norm_topk_prob") if mixture.normed is None else mixture.normed,
        shared=keys.count(shared) if keys.has(shared) else None,
        shared_gate=mixture.shared_gate,
        steepness=keys.number("swiglu_alpha", otherwise=1.0),
        lift=mixture.lift,
        parallel_mlp=mixture.parallel_mlp,
        limit=keys.optional("swiglu_limit"),
    )


def layers_of_experts(keys: ClassKeys, layers: int) -> list[bool]:
    """Return for each layer whether it has experts instead of a dense feed-forward part.

    Raises:
        ExportError: if the list of dense layers contains anything but layer numbers.
    """
    if not _has_experts(keys):
        return [False] * layers
    if not keys.has("decoder_sparse_step"):
        return [True] * layers
    step, plain = keys.count("decoder_sparse_step"), keys.fields.items("mlp_only_layers") or []
    if any(not isinstance(layer, int) or isinstance(layer, bool) for layer in plain):
        raise keys.fields.error(
            f"mlp_only_layers is {plain!r}, but must be a list of layer numbers"
        )
    return [i not in plain and (i + 1) % step == 0 for i in range(layers)]


def _has_experts(keys: ClassKeys) -> bool:
    """Whether the model has experts, by its class or by a key."""
    mixture = keys.architecture.mixture
    return mixture is not None and (mixture.switch is None or keys.flag(mixture.switch))
