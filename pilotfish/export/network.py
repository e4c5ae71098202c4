"""Write the network that a `ModelConfig` describes, for any architecture.

The order of operations is Llama's; `Form` and the factors of `ModelConfig` add, omit or scale
parts. The dialect decides how an operation and the experts are written. The value between layers is
the residual stream, [T, hidden], or several parallel streams, [T, streams, hidden].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist

from pilotfish.export.dialects import Dialect
from pilotfish.export.model_config import Kind, ModelConfig
from pilotfish.export.parts import Experts
from pilotfish.export.recurrent import write_delta_rule, write_short_conv
from pilotfish.export.selective_scan import write_selective_scan
from pilotfish.export.state_space import write_state_space
from pilotfish.export.streams import join_streams, open_streams, write_streams
from pilotfish.export.token_inputs import add_layer_inputs, write_token_inputs
from pilotfish.export.weights import EMBEDDING, HEAD


def write_network(net: Dialect, config: ModelConfig) -> None:
    """Write the whole network; `net.finish` declares its outputs."""
    x, layer_inputs = write_inputs(net, config)
    for i in range(config.layers):
        x = write_layer(net, config, i, x, layer_inputs[i] if layer_inputs else None)
    write_head(net, config, x)


def write_inputs(net: Dialect, config: ModelConfig) -> tuple[str, Sequence[str]]:
    """Write the embedding of the tokens.

    Return the first layer's input, and each layer's second input, [T, width], if there are any.
    """
    x = net.scale(net.embed(EMBEDDING), config.embed_scale)  # [T, hidden]
    if config.embedding:
        x = net.linear(x, config.embedding, {"model.project_in": config.hidden})
    if config.form.learned_positions:
        x = net.add(x, net.embed_positions("model.embed_positions.weight"))
    if config.form.embed_norm:
        x = net.norm(x, "model.embed_norm", config.hidden)
    layer_inputs = write_token_inputs(net, config, x)
    return open_streams(net, config, x), layer_inputs


def write_head(net: Dialect, config: ModelConfig, x: str) -> None:
    """Write the final norm and the head, from the last layer's output x."""
    x = join_streams(net, config, x)
    if config.form.final_norm:
        x = net.norm(x, "model.norm", config.hidden)
    if config.embedding:
        x = net.linear(x, config.hidden, {"model.project_out": config.embedding})
    net.finish(x, EMBEDDING if config.tied else HEAD)


def write_layer(
    net: Dialect, config: ModelConfig, i: int, x: str, layer_inputs: str | None = None
) -> str:
    """Write layer i and return its output, in the shape of x; `layer_inputs`: [T, width]."""
    if config.streams is not None:
        return write_streams(
            net,
            config,
            i,
            x,
            layer_inputs,
            lambda h: _attention(net, config, i, h),
            lambda h: _mlp(net, config, i, h),
        )
    x = _write_plain(net, config, i, x)
    if layer_inputs is not None:
        x = net.add(x, add_layer_inputs(net, f"model.layers.{i}", x, layer_inputs))
    if config.form.layer_scale:
        x = net.multiply(x, net.weight(f"model.layers.{i}.layer_scalar", 1))
    return x


def _write_plain(net: Dialect, config: ModelConfig, i: int, x: str) -> str:
    """Write a layer's attention and feed-forward part, [T, hidden] → [T, hidden]."""
    form, layer = config.form, f"model.layers.{i}"

    def norm(value: str, name: str, *, summed: bool = False) -> str:
        """Apply the norm `name` if the layer has this norm before (`summed`: after) the sum."""
        here = name in form.norms and summed == form.sum_norms
        return net.norm(value, f"{layer}.{name}", config.hidden) if here else value

    def plus(value: str, part: str) -> str:
        return net.add(value, net.scale(part, config.residual_scale))

    h = norm(x, "input_layernorm")
    kind = config.layer(i)
    if not kind.has_mixer:
        return plus(x, _mlp(net, config, i, h))
    mixed = norm(MIXERS[kind.kind](net, config, i, h), "attention_out_norm")
    if not kind.has_mlp:
        return plus(x, mixed)
    if form.parallel:
        has_second_norm = "post_attention_layernorm" in form.norms
        mlp_out = _mlp(
            net, config, i, norm(x, "post_attention_layernorm") if has_second_norm else h
        )
        return plus(plus(x, mixed), norm(mlp_out, "mlp_out_norm"))
    x = norm(plus(x, mixed), "input_layernorm", summed=True)
    mlp_out = _mlp(net, config, i, norm(x, "post_attention_layernorm"))
    if config.experts is not None and config.experts.parallel_mlp:
        mlp_out = write_parallel_mlp(net, config.experts, f"{layer}.mlp", x, mlp_out)
    x = plus(x, norm(mlp_out, "mlp_out_norm"))
    return norm(x, "post_attention_layernorm", summed=True)


def _attention(net: Dialect, config: ModelConfig, i: int, h: str) -> str:
    module, layer, heads = f"model.layers.{i}.self_attn", config.layer(i), config.heads_of(i)
    queries, keys = heads.queries * heads.dim, heads.keys * heads.dim
    outputs = {f"{module}.q_proj": queries}
    if layer.kv_source is None:
        outputs[f"{module}.k_proj"] = keys
    if layer.kv_source is None and not layer.tied_values:
        outputs[f"{module}.v_proj"] = keys
    if config.form.gated_attention:
        outputs[f"{module}.gate_proj"] = queries
    qkv = net.linear(h, config.hidden, outputs)
    gate = None
    if config.form.gated_attention:
        qkv, gate = net.split(qkv, [queries + 2 * keys, queries])
    if config.form.qk_norm == "all":
        q, k, v = net.split(qkv, [queries, keys, keys])
        q, k = net.norm(q, f"{module}.q_norm", queries), net.norm(k, f"{module}.k_norm", keys)
        qkv = net.concat(q, k, v)
    attended = net.attention(i, qkv)
    if gate is not None:
        attended = net.multiply(attended, net.sigmoid(gate))
    if config.form.sub_norms:
        attended = net.norm(attended, f"{module}.sub_norm", queries)
    return net.linear(attended, queries, {f"{module}.o_proj": config.hidden})


def _attention_and_space(net: Dialect, config: ModelConfig, i: int, h: str) -> str:
    """Sum the outputs of attention and of a state space on the same input (Falcon-H1)."""
    factors = config.factors
    space_out = write_state_space(net, config, i, net.scale(h, factors.space_in))
    attention_out = _attention(net, config, i, net.scale(h, factors.attention_in))
    space_out = net.scale(space_out, factors.space_out)
    return net.graph.op("Add", space_out, net.scale(attention_out, factors.attention_out))


MIXERS: dict[Kind, Callable[[Dialect, ModelConfig, int, str], str]] = {
    "attention": _attention,
    "conv": write_short_conv,
    "delta": write_delta_rule,
    "space": write_state_space,
    "both": _attention_and_space,
    "selective": write_selective_scan,
}


def _mlp(net: Dialect, config: ModelConfig, i: int, h: str) -> str:
    module = f"model.layers.{i}.mlp"
    layer = config.layer(i)
    if config.experts is not None and layer.experts and not config.experts.parallel_mlp:
        return write_experts(net, config.experts, module, h)
    width, factor = layer.intermediate or config.intermediate, config.factors.gate
    inner = write_inner(net, module, width, h, factor=factor, sparsity=layer.sparsity)
    if config.form.sub_norms:
        inner = net.norm(inner, f"{module}.sub_norm", width)
    down = net.linear(inner, width, {f"{module}.down_proj": config.hidden})
    return net.scale(down, config.factors.mlp_out)


# --- feed-forward parts ---------------------------------------------------------------------------


def write_experts(net: Dialect, experts: Experts, module: str, h: str) -> str:
    """Write a mixture of experts, the feed-forward part `module`; h [T, hidden] → [T, hidden]."""
    hidden, inputs = net.config.hidden, h
    if experts.latent is not None:
        inputs = net.linear(h, hidden, {f"{module}.latent_in": experts.latent})
    mixed = net.experts(inputs, net.route(h, f"{module}.router"), module)
    if experts.latent is not None:
        mixed = net.linear(mixed, experts.latent, {f"{module}.latent_out": hidden})
    if experts.shared is None:
        return mixed
    name = f"{module}.shared_expert"
    inner = write_inner(net, name, experts.shared, h)
    shared = net.linear(inner, experts.shared, {f"{name}.down_proj": hidden})
    if experts.shared_gate:
        gate = net.linear(h, hidden, {f"{module}.shared_expert_gate": 1}, rounded=False)
        gate = net.sigmoid(gate)
        shared = net.multiply(shared, gate)
    return net.add(mixed, shared)


def write_parallel_mlp(net: Dialect, experts: Experts, module: str, x: str, mlp_out: str) -> str:
    """Write a mixture of experts that is parallel to a dense feed-forward part (Gemma 4).

    Args:
        x: residual stream before the feed-forward part, [T, hidden], the input of router and
        experts.
        mlp_out: output of the dense part, [T, hidden].
    """
    hidden = net.config.hidden
    # The router's input has root mean square 1 / √hidden, so that scores do not grow with the
    # width.
    router_input = net.scale(net.norm(x, f"{module}.router_norm", hidden), hidden**-0.5)
    scores = net.route(router_input, f"{module}.router")
    mixed = net.experts(net.norm(x, f"{module}.experts_norm", hidden), scores, module)
    mlp_out = net.norm(mlp_out, f"{module}.own_norm", hidden)
    return net.add(mlp_out, net.norm(mixed, f"{module}.experts_out_norm", hidden))


def write_inner(
    net: Dialect, module: str, width: int, h: str, *, factor: float = 1.0, sparsity: float = 0.0
) -> str:
    """Write activation(factor · gate) · up, or activation(up); h [T, hidden] → [T, width].

    `sparsity`: see `Layer`.
    """
    outputs = {f"{module}.gate_proj": width, f"{module}.up_proj": width}
    if not net.config.form.gated:
        del outputs[f"{module}.gate_proj"]
        return net.activation(net.linear(h, net.config.hidden, outputs), module)
    gate_up = net.linear(h, net.config.hidden, outputs)
    gate, up = net.split(gate_up, [width] * 2)
    gate = net.scale(gate, factor)
    if sparsity:
        gate = _sparsify(net, gate, sparsity)
    return net.multiply(net.activation(gate, module), up)


def _sparsify(net: Dialect, gate: str, sparsity: float) -> str:
    """Compute max(gate − cutoff, 0); the cutoff is the `sparsity` quantile of a normal gate."""
    op = net.graph.op
    mean = net.mean(gate)
    centred = op("Sub", gate, mean)
    deviation = op("Sqrt", net.mean(net.multiply(centred, centred)))
    cutoff = net.scale(deviation, NormalDist().inv_cdf(sparsity))
    return op("Relu", op("Sub", centred, cutoff))
