"""Parallel residual streams: AltUp (arXiv 2301.13310), with Laurel's low-rank path (Gemma 3n).

x [T, n, hidden] holds n streams. A layer predicts each stream as a mix of all streams, computes the
active stream, and corrects all streams by the error in the active stream's prediction. The
coefficients depend on the token.
"""

from __future__ import annotations

from collections.abc import Callable

from pilotfish.export.dialects import Dialect
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.parts import Streams
from pilotfish.export.token_inputs import add_layer_inputs

Part = Callable[[str], str]
"""A function that writes a part of a layer, [T, hidden] → [T, hidden]."""
# minimum of the mean square by which a value is divided, against division by 0
MIN_MEAN_SQUARE = 1e-5


def open_streams(net: Dialect, config: ModelConfig, x: str) -> str:
    """Expand the embeddings x [T, hidden] to all streams; return x if there is one stream."""
    if config.streams is None:
        return x
    hidden, magnitude = config.hidden, _magnitude(net, x)
    others = [
        _match_magnitude(
            net, net.linear(x, hidden, {f"model.altup_projections.{i}": hidden}), magnitude
        )
        for i in range(config.streams.count - 1)
    ]
    return net.graph.op("Concat", *(net.unsqueeze(each, 1) for each in (x, *others)), axis=1)


def join_streams(net: Dialect, config: ModelConfig, x: str) -> str:
    """Return the mean of all streams, [T, hidden], after scaling each to the first's magnitude."""
    if config.streams is None:
        return x
    hidden, streams = config.hidden, [_stream(net, x, i) for i in range(config.streams.count)]
    magnitude, total = _magnitude(net, streams[0]), streams[0]
    for i, each in enumerate(streams[1:]):
        projected = net.linear(each, hidden, {f"model.altup_unembed_projections.{i}": hidden})
        total = net.graph.op("Add", total, _match_magnitude(net, projected, magnitude))
    return net.scale(total, 1 / config.streams.count)


def write_streams(
    net: Dialect,
    config: ModelConfig,
    i: int,
    x: str,
    layer_inputs: str | None,
    attend: Part,
    feed: Part,
) -> str:
    """Write layer i; x [T, n, hidden] → [T, n, hidden]. `layer_inputs`: [T, width]."""
    layer, streams, hidden = f"model.layers.{i}", config.streams, config.hidden
    assert streams is not None
    predicted = _predict(net, streams, layer, x)
    active = _stream(net, predicted, streams.active)
    h = net.norm(active, f"{layer}.input_layernorm", hidden)
    low = net.linear(h, hidden, {f"{layer}.laurel.linear_left": streams.rank})
    wide = net.linear(low, streams.rank, {f"{layer}.laurel.linear_right": hidden})
    laurel = net.graph.op("Add", h, net.norm(wide, f"{layer}.laurel.post_laurel_norm", hidden))
    attended = net.norm(attend(h), f"{layer}.attention_out_norm", hidden)
    both = net.graph.op("Add", net.graph.op("Add", active, attended), laurel)
    x = net.scale(both, 0.5**0.5)
    fed = feed(net.norm(x, f"{layer}.post_attention_layernorm", hidden))
    mlp_out = net.norm(fed, f"{layer}.mlp_out_norm", hidden)
    corrected = _correct(net, streams, layer, predicted, net.graph.op("Add", x, mlp_out))
    return (
        corrected
        if layer_inputs is None
        else _add_inputs(net, streams, layer, corrected, layer_inputs)
    )


def _add_inputs(net: Dialect, streams: Streams, layer: str, x: str, layer_inputs: str) -> str:
    """Add the per-layer input, gated by the active stream, to all streams except the first."""
    active = _stream(net, x, streams.active)
    name = f"{layer}.altup.correct_output_scale"
    factors = net.read(name, net.config.hidden)  # files have this weight even if it has no effect
    if streams.scaled:
        active = net.multiply(active, net.weight(name, array=factors))
    part = add_layer_inputs(net, layer, active, layer_inputs)
    first, others = net.split(x, [1, streams.count - 1], axis=1)
    others = net.graph.op("Add", others, net.unsqueeze(part, 1))
    return net.graph.op("Concat", first, others, axis=1)


def _predict(net: Dialect, streams: Streams, layer: str, x: str) -> str:
    """Predict each stream as its old value plus a mix of all streams."""
    modalities = _modalities(net, streams, layer, _stream(net, x, streams.active))
    count = streams.count
    outputs = {f"{layer}.altup.prediction_coefs": count * count}
    mix = net.linear(modalities, count, outputs, rounded=False)
    mixed = net.graph.op("MatMul", net.reshape(mix, [-1, count, count]), x)
    return net.graph.op("Add", mixed, x)


def _correct(net: Dialect, streams: Streams, layer: str, predicted: str, active: str) -> str:
    """Add to each stream its share of the active stream's prediction error."""
    op = net.graph.op
    modalities = _modalities(net, streams, layer, active)
    outputs = {f"{layer}.altup.correction_coefs": streams.count}
    shares = net.linear(modalities, streams.count, outputs, rounded=False)
    shares = op("Add", shares, net.graph.constant(1.0, net.float))  # [T, n]
    error = net.unsqueeze(op("Sub", active, _stream(net, predicted, streams.active)), 1)
    return op("Add", predicted, net.multiply(net.unsqueeze(shares, 2), error))


def _modalities(net: Dialect, streams: Streams, layer: str, x: str) -> str:
    """Compute each token's modality vector, [T, n], which determines the mixing coefficients."""
    hidden = net.config.hidden
    normed = net.scale(net.norm(x, f"{layer}.altup.router_norm", hidden), 1 / hidden)
    outputs = {f"{layer}.altup.modality_router": streams.count}
    return net.graph.op("Tanh", net.linear(normed, hidden, outputs, rounded=False))


def _stream(net: Dialect, x: str, index: int) -> str:
    return net.graph.op("Gather", x, net.graph.constant(index, "int64"), axis=1)


def _magnitude(net: Dialect, x: str) -> str:
    return net.graph.op("Sqrt", net.mean(net.multiply(x, x)))


def _match_magnitude(net: Dialect, x: str, magnitude: str) -> str:
    """Scale each token of x to the root mean square `magnitude`."""
    op = net.graph.op
    squares = op(
        "Clip", net.mean(net.multiply(x, x)), net.graph.constant(MIN_MEAN_SQUARE, net.float)
    )
    return net.multiply(x, op("Div", magnitude, op("Sqrt", squares)))
