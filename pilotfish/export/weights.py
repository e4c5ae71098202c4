"""The names and shapes of a model's weights.

In: a `ModelConfig`. Out: name and shape of each weight. Names are those of Llama's modules in
Hugging Face's checkpoints, even if a file uses others:

    model.embed_tokens, model.embed_positions, model.embed_norm, model.project_in, model.project_out
    model.layers.{i}.input_layernorm            before attention
    model.layers.{i}.attention_out_norm         after it, before the sum
    model.layers.{i}.post_attention_layernorm   before the feed-forward part
    model.layers.{i}.mlp_out_norm               after it, before the sum
    model.layers.{i}.self_attn.{q,k,v,o}_proj, .gate_proj, .q_norm, .k_norm, .sub_norm
    model.layers.{i}.self_attn.sinks [heads]
    model.layers.{i}.conv.{in,out}_proj, .conv                            instead of attention
    model.layers.{i}.linear_attn.in_proj_{qkv,z,b,a}, .out_proj, .conv1d, .norm, .A_log, .dt_bias
    model.layers.{i}.mamba.{in,out}_proj, .conv1d, .norm, .A_log, .D, .dt_bias, .x_proj,
        .dt_proj
    model.layers.{i}.mlp.{gate,up,down}_proj, .sub_norm, .act_fn.{alpha_p,alpha_n,beta,eps}
    model.layers.{i}.mlp.router, .experts.{j}.{gate,up,down}_proj, .shared_expert.{…}_proj,
        .shared_expert_gate                     mixture of experts
    model.norm, lm_head
    model.embed_tokens_per_layer, .per_layer_model_projection, .per_layer_projection_norm and, in a
        layer, .per_layer_input_gate, .per_layer_projection, .post_per_layer_input_norm,
        .layer_scalar                           Gemma 3n and 4
    model.altup_projections.{j}, .altup_unembed_projections.{j} and, in a layer, .altup.{…},
        .laurel.{…}                             Gemma 3n
    model.layers.{i}.mlp.router_norm, .router_scale, .own_norm, .experts_norm, .experts_out_norm
                                                mixture parallel to a dense part
"""

from __future__ import annotations

from pilotfish.export.model_config import CACHED, Layer, ModelConfig
from pilotfish.export.state_weights import STATES
from pilotfish.export.weight_sizes import (
    Weights,
    WeightSize,
    layer_size,
    linear_weights,
    multiply_sizes,
    norm_weights,
    size_of,
)

EMBEDDING, HEAD, HEAD_BIAS = "model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"
TOKEN_TABLE = "model.embed_tokens_per_layer.weight"
TOKEN_PROJECTION = "model.per_layer_model_projection"
XIELU = ("alpha_p", "alpha_n", "beta", "eps")


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight."""
    return {name: tuple(size.value for size in sizes) for name, sizes in weights(config)}


def weights(config: ModelConfig) -> Weights:
    """Yield name and shape of every weight, the embedding first."""
    form, hidden, vocabulary = config.form, size_of(config, "hidden"), size_of(config, "vocab_size")
    width = size_of(config, "embedding") if config.embedding else hidden
    yield EMBEDDING, (vocabulary, width)
    if form.learned_positions:
        rows = WeightSize(config.context + config.position_offset, ("context",))
        yield "model.embed_positions.weight", (rows, hidden)
    if config.embedding:
        yield "model.project_in.weight", (hidden, width)
        yield "model.project_out.weight", (width, hidden)
    if form.embed_norm:
        yield from norm_weights(config, "model.embed_norm", hidden)
    yield from _outer_inputs(config)
    for i in range(config.layers):
        for name, sizes in _layer_weights(config, i):
            yield f"model.layers.{i}.{name}", sizes
    if form.final_norm:
        yield from norm_weights(config, "model.norm", hidden)
    head_rows = vocabulary if config.head_tokens is None else size_of(config, "head_tokens")
    if not config.tied:
        yield HEAD, (head_rows, width)
    if "lm_head" in form.biases:
        yield HEAD_BIAS, (head_rows,)


def _outer_inputs(config: ModelConfig) -> Weights:
    """Yield the weights outside the layers for per-layer inputs and parallel streams."""
    hidden = size_of(config, "hidden")
    if config.token_inputs is not None:
        width = size_of(config, "token_inputs.width")
        each = WeightSize(config.layers * width.value, ("layers", *width.fields))
        yield TOKEN_TABLE, (size_of(config, "token_inputs.rows"), each)
        yield f"{TOKEN_PROJECTION}.weight", (each, hidden)
        yield "model.per_layer_projection_norm.weight", (width,)
    if config.streams is not None:
        for name in ("altup_projections", "altup_unembed_projections"):
            for i in range(config.streams.count - 1):
                yield f"model.{name}.{i}.weight", (hidden, hidden)


def _layer_inputs(config: ModelConfig) -> Weights:
    """Yield a layer's weights for its per-layer inputs."""
    hidden = size_of(config, "hidden")
    if config.token_inputs is not None:
        width = size_of(config, "token_inputs.width")
        yield "per_layer_input_gate.weight", (width, hidden)
        yield "per_layer_projection.weight", (hidden, width)
        yield "post_per_layer_input_norm.weight", (hidden,)
    if config.form.layer_scale:
        yield "layer_scalar", (WeightSize(1, ("model_type",)),)


def _streams(config: ModelConfig) -> Weights:
    """Yield a layer's weights of AltUp and Laurel."""
    if config.streams is None:
        return
    hidden, rank = size_of(config, "hidden"), size_of(config, "streams.rank")
    count = size_of(config, "streams.count")
    yield "altup.correct_output_scale", (hidden,)
    yield "altup.correction_coefs.weight", (count, count)
    yield "altup.prediction_coefs.weight", (size_of(config, *["streams.count"] * 2), count)
    yield "altup.modality_router.weight", (count, hidden)
    yield "altup.router_norm.weight", (hidden,)
    yield "laurel.linear_left.weight", (rank, hidden)
    yield "laurel.linear_right.weight", (hidden, rank)
    yield "laurel.post_laurel_norm.weight", (hidden,)


def _layer_weights(config: ModelConfig, index: int) -> Weights:
    """Yield the weights of a layer, by names relative to the layer."""
    form, layer = config.form, config.layer(index)
    inner = layer_size(config, "intermediate", layer.intermediate)
    for name in form.norms if layer.has_mixer and layer.has_mlp else ("input_layernorm",):
        yield from norm_weights(config, name, size_of(config, "hidden"))
    if layer.kind in CACHED:
        yield from _attention_weights(config, layer)
    if layer.kind in STATES:
        yield from STATES[layer.kind](config)
    if not layer.has_mlp:
        return
    parallel = config.experts is not None and config.experts.parallel_mlp
    if layer.experts:
        yield from _experts(config)
    if parallel or not layer.experts:
        yield from _mlp(config, "mlp", inner)
    if form.sub_norms:
        yield "mlp.sub_norm.weight", (inner,)
    yield from _layer_inputs(config)
    yield from _streams(config)
    if config.activation == "xielu":
        for name in XIELU:
            yield f"mlp.act_fn.{name}", (WeightSize(1, ("activation",)),)


def _experts(config: ModelConfig) -> Weights:
    hidden, experts = size_of(config, "hidden"), config.experts
    if experts is None:
        raise ValueError("layers with experts need `ModelConfig.experts`")
    yield from linear_weights(config, "mlp.router", size_of(config, "experts.count"), hidden)
    for j in range(experts.count):
        yield from _mlp(config, f"mlp.experts.{j}", size_of(config, "experts.width"))
    if experts.shared is not None:
        yield from _mlp(config, "mlp.shared_expert", size_of(config, "experts.shared"))
        if experts.shared_gate:
            yield "mlp.shared_expert_gate.weight", (WeightSize(1, ("model_type",)), hidden)
    if experts.parallel_mlp:
        yield "mlp.router_scale", (size_of(config, "experts.count"),)
        for norm in ("router_norm", "own_norm", "experts_norm", "experts_out_norm"):
            yield f"mlp.{norm}.weight", (hidden,)


def _mlp(config: ModelConfig, module: str, inner: WeightSize) -> Weights:
    hidden = size_of(config, "hidden")
    if config.form.gated:
        yield from linear_weights(config, f"{module}.gate_proj", inner, hidden)
    yield from linear_weights(config, f"{module}.up_proj", inner, hidden)
    yield from linear_weights(config, f"{module}.down_proj", hidden, inner)


def _attention_weights(config: ModelConfig, layer: Layer) -> Weights:
    form, hidden = config.form, size_of(config, "hidden")
    dim = layer_size(config, "head_dim", layer.head_dim)
    queries = multiply_sizes(size_of(config, "heads"), dim)
    keys = multiply_sizes(layer_size(config, "kv_heads", layer.kv_heads), dim)
    gate = [("self_attn.gate_proj", queries, hidden)] if form.gated_attention else []
    projections = (
        ("self_attn.q_proj", queries, hidden),
        *gate,
        ("self_attn.k_proj", keys, hidden),
        ("self_attn.v_proj", keys, hidden),
        ("self_attn.o_proj", hidden, queries),
    )
    for name, rows, columns in projections:
        if name in absent_projections(layer):
            continue
        yield from linear_weights(config, name, rows, columns)
    if form.sinks:
        yield "self_attn.sinks", (size_of(config, "heads"),)
    if form.learned_norms:
        yield from _head_norms(config, layer)
    if form.sub_norms:
        yield "self_attn.sub_norm.weight", (queries,)


def absent_projections(layer: Layer) -> tuple[str, ...]:
    """Return the projections that this layer's attention does not have."""
    if layer.kv_source is not None:
        return "self_attn.k_proj", "self_attn.v_proj"
    return ("self_attn.v_proj",) if layer.tied_values else ()


def _head_norms(config: ModelConfig, layer: Layer) -> Weights:
    width = layer_size(config, "head_dim", layer.head_dim)
    normed = (("q_norm", "heads"), ("k_norm", "kv_heads"))
    for name, heads in normed if layer.kv_source is None else normed[:1]:
        forms = {
            "head": (width,),
            "heads": (size_of(config, heads), width),
            "all": (size_of(config, heads, "head_dim"),),
        }
        if config.form.qk_norm is not None:
            yield f"self_attn.{name}.weight", forms[config.form.qk_norm]
