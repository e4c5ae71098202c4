"""The weights of a model: their names and shapes.

In: a `ModelConfig`, and the shapes that a file states. Out: nothing, or an ExportError that names
the tensor and the setting that contradict each other. Names are those of Llama's modules in Hugging
Face's checkpoints, whatever a file calls them:

    model.embed_tokens, model.embed_positions, model.embed_norm, model.project_in, model.project_out
    model.layers.{i}.input_layernorm            before attention
    model.layers.{i}.attention_out_norm         behind it, before the sum
    model.layers.{i}.post_attention_layernorm   before the feed-forward part
    model.layers.{i}.mlp_out_norm               behind it, before the sum
    model.layers.{i}.self_attn.{q,k,v,o}_proj, .gate_proj, .q_norm, .k_norm, .sub_norm
    model.layers.{i}.self_attn.sinks [heads]
    model.layers.{i}.conv.{in,out}_proj, .conv                            instead of attention
    model.layers.{i}.linear_attn.in_proj_{qkv,z,b,a}, .out_proj, .conv1d, .norm, .A_log, .dt_bias
    model.layers.{i}.mamba.{in,out}_proj, .conv1d, .norm, .A_log, .D, .dt_bias, .x_proj,
        .dt_proj
    model.layers.{i}.mlp.{gate,up,down}_proj, .sub_norm, .act_fn.{alpha_p,alpha_n,beta,eps}
    model.layers.{i}.mlp.router, .experts.{j}.{gate,up,down}_proj, .shared_expert.{…}_proj,
        .shared_expert_gate                     of a mixture of experts
    model.norm, lm_head
    model.embed_tokens_per_layer, .per_layer_model_projection, .per_layer_projection_norm and, of a
        layer, .per_layer_input_gate, .per_layer_projection, .post_per_layer_input_norm,
        .layer_scalar                           Gemma 3n and 4
    model.altup_projections.{j}, .altup_unembed_projections.{j} and, of a layer, .altup.{…},
        .laurel.{…}                             Gemma 3n
    model.layers.{i}.mlp.router_norm, .router_scale, .own_norm, .experts_norm, .experts_out_norm
                                                of a mixture beside a part of the layer's own
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from pilotfish.export.config import CACHED, Kind, Layer, ModelConfig
from pilotfish.export.errors import ExportError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKEN_TABLE = "model.embed_tokens_per_layer.weight"
TOKEN_PROJECTION = "model.per_layer_model_projection"
LAYER = re.compile(r"\.layers\.(\d+)\.")
NUMBER = re.compile(r"\.\d+\.")
XIELU = ("alpha_p", "alpha_n", "beta", "eps")


class Size(NamedTuple):
    """One dimension of a weight, and the fields of the configuration that it follows from."""

    value: int
    fields: tuple[str, ...]


Weights = Iterator[tuple[str, tuple[Size, ...]]]
"""Name and shape of one weight after the other: a damaged number of layers costs nothing."""


class FileSettings(NamedTuple):
    """What a file calls the settings of its model, for errors.

    Attributes:
        keys: field of `ModelConfig`, or "experts." and one of `Experts` → the file's key.
        switches: part of a weight's name → the setting that decides whether it exists.
    """

    keys: Mapping[str, str]
    switches: Mapping[str, str]

    def say(self, config: ModelConfig, *fields: str) -> str:
        """Format keys and their values, as in "num_attention_heads 4 × head_dim 8"."""
        return " × ".join(f"{self.keys[name]} {attrgetter(name)(config)}" for name in fields)

    def why(self, config: ModelConfig, name: str) -> str:
        """Name the setting that decides whether there is such a weight."""
        for part, setting in self.switches.items():
            if part in name:
                return setting
        return self.say(config, "model_type")

    def blame(self, config: ModelConfig, sizes: tuple[Size, ...], found: tuple[int, ...]) -> str:
        """Name the settings behind the dimensions that differ."""
        if len(sizes) != len(found):
            return self.say(config, "model_type")
        pairs = zip(sizes, found, strict=True)
        wrong = [size.fields for size, there in pairs if size.value != there]
        return ", ".join(self.say(config, *fields) for fields in dict.fromkeys(wrong))


def check_weights(
    config: ModelConfig,
    found: Mapping[str, tuple[int, ...]],
    settings: FileSettings,
    where: str,
    called: Callable[[str], str] = str,
) -> None:
    """Check that a file has the weights that its configuration asks for, and no others.

    Args:
        config: the model's configuration.
        found: the shape of each weight there is.
        settings: what the file calls its settings.
        where: path of the file, for errors.
        called: a weight's name → the file's, for errors.

    Raises:
        ExportError: naming the first weight that is missing, left over or of another shape, and
            the setting that it contradicts.
    """
    wanted = set()
    for name, sizes in weights(config):
        wanted.add(name)
        if name not in found:
            absent = not any(_layer(other) == _layer(name) for other in found)
            asking = settings.why(config, name)
            if absent and _layer(name) is not None:
                asking = settings.say(config, "layers")
            raise ExportError(f"{where} has no {called(name)}, which {asking} asks for")
        shape = tuple(size.value for size in sizes)
        if found[name] != shape:
            raise ExportError(
                f"{where}: {called(name)} has shape {list(found[name])}, but "
                f"{settings.blame(config, sizes, found[name])} asks for {list(shape)}"
            )
    for name in found:
        if name not in wanted:
            beyond = (_layer(name) or 0) >= config.layers
            asking = settings.say(config, "layers") if beyond else settings.why(config, name)
            raise ExportError(
                f"{where} holds {called(name)}, for which {asking} has no use: the model might "
                "come out as another one"
            )


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight."""
    return {name: tuple(size.value for size in sizes) for name, sizes in weights(config)}


def weights(config: ModelConfig) -> Weights:
    """Yield name and shape of every weight, the embedding first."""
    form, hidden, vocabulary = config.form, _size(config, "hidden"), _size(config, "vocab_size")
    width = _size(config, "embedding") if config.embedding else hidden
    yield EMBEDDING, (vocabulary, width)
    if form.learned_positions:
        rows = Size(config.context + config.position_offset, ("context",))
        yield "model.embed_positions.weight", (rows, hidden)
    if config.embedding:
        yield "model.project_in.weight", (hidden, width)
        yield "model.project_out.weight", (width, hidden)
    if form.embed_norm:
        yield from _norm(config, "model.embed_norm", hidden)
    yield from _outer_inputs(config)
    for i in range(config.layers):
        for name, sizes in _layer_weights(config, i):
            yield f"model.layers.{i}.{name}", sizes
    if form.final_norm:
        yield from _norm(config, "model.norm", hidden)
    if not config.tied:
        yield HEAD, (vocabulary, width)
    if "lm_head" in form.biases:
        yield "lm_head.bias", (vocabulary,)


def _outer_inputs(config: ModelConfig) -> Weights:
    """Yield what makes the layers' own inputs, and further streams."""
    hidden = _size(config, "hidden")
    if config.token_inputs is not None:
        width = _size(config, "token_inputs.width")
        each = Size(config.layers * width.value, ("layers", *width.fields))
        yield TOKEN_TABLE, (_size(config, "token_inputs.rows"), each)
        yield f"{TOKEN_PROJECTION}.weight", (each, hidden)
        yield "model.per_layer_projection_norm.weight", (width,)
    if config.streams is not None:
        for name in ("altup_projections", "altup_unembed_projections"):
            for i in range(config.streams.count - 1):
                yield f"model.{name}.{i}.weight", (hidden, hidden)


def _layer_inputs(config: ModelConfig) -> Weights:
    """Yield what takes in a layer's own inputs."""
    hidden = _size(config, "hidden")
    if config.token_inputs is not None:
        width = _size(config, "token_inputs.width")
        yield "per_layer_input_gate.weight", (width, hidden)
        yield "per_layer_projection.weight", (hidden, width)
        yield "post_per_layer_input_norm.weight", (hidden,)
    if config.form.layer_scale:
        yield "layer_scalar", (Size(1, ("model_type",)),)


def _streams(config: ModelConfig) -> Weights:
    """Yield what AltUp and Laurel have in a layer."""
    if config.streams is None:
        return
    hidden, rank = _size(config, "hidden"), _size(config, "streams.rank")
    count = _size(config, "streams.count")
    yield "altup.correct_output_scale", (hidden,)
    yield "altup.correction_coefs.weight", (count, count)
    yield "altup.prediction_coefs.weight", (_size(config, *["streams.count"] * 2), count)
    yield "altup.modality_router.weight", (count, hidden)
    yield "altup.router_norm.weight", (hidden,)
    yield "laurel.linear_left.weight", (rank, hidden)
    yield "laurel.linear_right.weight", (hidden, rank)
    yield "laurel.post_laurel_norm.weight", (hidden,)


def _layer_weights(config: ModelConfig, index: int) -> Weights:
    """Yield the weights of a layer, named without it."""
    form, layer = config.form, config.layer(index)
    inner = _own(config, "intermediate", layer.intermediate)
    for name in form.norms if layer.mixes and layer.fed else ("input_layernorm",):
        yield from _norm(config, name, _size(config, "hidden"))
    if layer.kind in CACHED:
        yield from _attention_weights(config, layer)
    if layer.kind in STATES:
        yield from STATES[layer.kind](config)
    if not layer.fed:
        return
    beside = config.experts is not None and config.experts.beside
    if layer.experts:
        yield from _experts(config)
    if beside or not layer.experts:
        yield from _mlp(config, "mlp", inner)
    if form.sub_norms:
        yield "mlp.sub_norm.weight", (inner,)
    yield from _layer_inputs(config)
    yield from _streams(config)
    if config.activation == "xielu":
        for name in XIELU:
            yield f"mlp.act_fn.{name}", (Size(1, ("activation",)),)


def _experts(config: ModelConfig) -> Weights:
    hidden, experts = _size(config, "hidden"), config.experts
    if experts is None:
        raise ValueError("layers of experts need the configuration of experts")
    yield from _linear(config, "mlp.router", _size(config, "experts.count"), hidden)
    for j in range(experts.count):
        yield from _mlp(config, f"mlp.experts.{j}", _size(config, "experts.width"))
    if experts.shared is not None:
        yield from _mlp(config, "mlp.shared_expert", _size(config, "experts.shared"))
        if experts.shared_gate:
            yield "mlp.shared_expert_gate.weight", (Size(1, ("model_type",)), hidden)
    if experts.beside:
        yield "mlp.router_scale", (_size(config, "experts.count"),)
        for norm in ("router_norm", "own_norm", "experts_norm", "experts_out_norm"):
            yield f"mlp.{norm}.weight", (hidden,)


def _mlp(config: ModelConfig, module: str, inner: Size) -> Weights:
    hidden = _size(config, "hidden")
    if config.form.gated:
        yield from _linear(config, f"{module}.gate_proj", inner, hidden)
    yield from _linear(config, f"{module}.up_proj", inner, hidden)
    yield from _linear(config, f"{module}.down_proj", hidden, inner)


def _linear(config: ModelConfig, name: str, rows: Size, columns: Size) -> Weights:
    yield f"{name}.weight", (rows, columns)
    if of_any(name) in config.form.biases:
        yield f"{name}.bias", (rows,)


def of_any(name: str) -> str:
    """Replace the number in a name within a layer, an expert's, by *."""
    return NUMBER.sub(".*.", name)


def _attention_weights(config: ModelConfig, layer: Layer) -> Weights:
    form, hidden = config.form, _size(config, "hidden")
    dim = _own(config, "head_dim", layer.head_dim)
    queries = _times(_size(config, "heads"), dim)
    keys = _times(_own(config, "kv_heads", layer.kv_heads), dim)
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
        yield from _linear(config, name, rows, columns)
    if form.sinks:
        yield "self_attn.sinks", (_size(config, "heads"),)
    if form.learned_norms:
        yield from _head_norms(config, layer)
    if form.sub_norms:
        yield "self_attn.sub_norm.weight", (queries,)


def absent_projections(layer: Layer) -> tuple[str, ...]:
    """Name the projections that attention of this kind does without."""
    if layer.reads is not None:
        return "self_attn.k_proj", "self_attn.v_proj"
    return ("self_attn.v_proj",) if layer.tied_values else ()


def _conv_weights(config: ModelConfig) -> Weights:
    """Yield those of a gated short convolution."""
    hidden, taps = _size(config, "hidden"), _size(config, "recurrence.taps")
    both = Size(3 * hidden.value, hidden.fields)
    yield from _linear(config, "conv.in_proj", both, hidden)
    yield from _linear(config, "conv.out_proj", hidden, hidden)
    yield "conv.conv.weight", (hidden, Size(1, ()), taps)
    if "conv.conv" in config.form.biases:
        yield "conv.conv.bias", (hidden,)


def _delta_weights(config: ModelConfig) -> Weights:
    """Yield those of linear attention by the gated delta rule."""
    hidden, taps = _size(config, "hidden"), _size(config, "recurrence.taps")
    channels, values = _size(config, "recurrence.channels"), _size(config, "recurrence.values")
    heads = _size(config, "recurrence.heads")
    projections = (
        ("linear_attn.in_proj_qkv", channels, hidden),
        ("linear_attn.in_proj_b", heads, hidden),
        ("linear_attn.in_proj_a", heads, hidden),
        ("linear_attn.in_proj_z", values, hidden),
        ("linear_attn.out_proj", hidden, values),
    )
    for name, rows, columns in projections:
        yield from _linear(config, name, rows, columns)
    yield "linear_attn.conv1d.weight", (channels, Size(1, ()), taps)
    yield "linear_attn.norm.weight", (_size(config, "recurrence.value_dim"),)
    yield "linear_attn.A_log", (heads,)
    yield "linear_attn.dt_bias", (heads,)


def _space_weights(config: ModelConfig) -> Weights:
    """Yield those of a state space."""
    hidden, taps = _size(config, "hidden"), _size(config, "recurrence.taps")
    channels, values = _size(config, "recurrence.channels"), _size(config, "recurrence.values")
    heads = _size(config, "recurrence.heads")
    yield from _linear(config, "mamba.in_proj", _size(config, "recurrence.projected"), hidden)
    yield from _linear(config, "mamba.out_proj", hidden, values)
    yield "mamba.conv1d.weight", (channels, Size(1, ()), taps)
    if "mamba.conv1d" in config.form.biases:
        yield "mamba.conv1d.bias", (channels,)
    if config.recurrence and config.recurrence.space and config.recurrence.space.norm:
        yield "mamba.norm.weight", (values,)
    for name in ("A_log", "D", "dt_bias"):
        yield f"mamba.{name}", (heads,)


def _selective_weights(config: ModelConfig) -> Weights:
    """Yield those of a selective state space, whose heads are channels."""
    hidden, taps = _size(config, "hidden"), _size(config, "recurrence.taps")
    values, low = _size(config, "recurrence.values"), _size(config, "recurrence.low")
    yield from _linear(config, "mamba.in_proj", _size(config, "recurrence.projected"), hidden)
    yield from _linear(config, "mamba.out_proj", hidden, values)
    yield from _linear(config, "mamba.x_proj", low, values)
    yield from _linear(config, "mamba.dt_proj", values, _size(config, "recurrence.space.rank"))
    yield "mamba.conv1d.weight", (values, Size(1, ()), taps)
    if "mamba.conv1d" in config.form.biases:
        yield "mamba.conv1d.bias", (values,)
    yield "mamba.A_log", (values, _size(config, "recurrence.key_dim"))
    yield "mamba.D", (values,)


STATES: Mapping[Kind, Callable[[ModelConfig], Weights]] = {
    "conv": _conv_weights,
    "delta": _delta_weights,
    "space": _space_weights,
    "both": _space_weights,
    "selective": _selective_weights,
}


def _head_norms(config: ModelConfig, layer: Layer) -> Weights:
    width = _own(config, "head_dim", layer.head_dim)
    normed = (("q_norm", "heads"), ("k_norm", "kv_heads"))
    for name, heads in normed if layer.reads is None else normed[:1]:
        forms = {
            "head": (width,),
            "heads": (_size(config, heads), width),
            "all": (_size(config, heads, "head_dim"),),
        }
        if config.form.qk_norm is not None:
            yield f"self_attn.{name}.weight", forms[config.form.qk_norm]


def _norm(config: ModelConfig, name: str, width: Size) -> Weights:
    """Yield weight and bias of a norm, as far as there are any."""
    if config.form.learned_norms:
        yield f"{name}.weight", (width,)
        if config.form.norm_bias:
            yield f"{name}.bias", (width,)


def _layer(name: str) -> int | None:
    match = LAYER.search(name)
    return None if match is None else int(match[1])


def _own(config: ModelConfig, field: str, stated: int | None) -> Size:
    """Return a layer's own size, or the model's."""
    return _size(config, field) if stated is None else Size(stated, ("model_type",))


def _times(*sizes: Size) -> Size:
    """Multiply sizes; what one of them follows from alone is not said of the product."""
    fields = tuple(field for size in sizes for field in size.fields)
    own = ("model_type",) if "model_type" in fields else fields
    return Size(math.prod(size.value for size in sizes), own)


def _size(config: ModelConfig, *fields: str) -> Size:
    """Multiply these fields."""
    return Size(math.prod(attrgetter(name)(config) for name in fields), fields)
