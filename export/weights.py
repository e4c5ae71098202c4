"""The weights of each architecture, and their shapes.

In: a `ModelConfig`, and the shapes that a file states. Out: nothing, or an ExportError that names
the tensor and the setting that contradict each other. Names are those of Hugging Face's modules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from pilotfish.export.config import ModelConfig
from pilotfish.export.errors import ExportError

HEAD = "lm_head.weight"
# Fields that decide whether weights exist.
SWITCHES = ("attention_bias", "output_bias", "mlp_bias", "qk_norm", "tied", "final_norm")
LAYER = re.compile(r"\.layers\.(\d+)\.")


class Size(NamedTuple):
    """One dimension of a weight, and the fields of the configuration that it follows from."""

    value: int
    fields: tuple[str, ...]


Weights = Iterator[tuple[str, tuple[Size, ...]]]
"""Name and shape of one weight after the other: a damaged number of layers costs nothing."""


def check_weights(
    config: ModelConfig,
    found: Mapping[str, tuple[int, ...]],
    keys: Mapping[str, str],
    where: str,
    called: Callable[[str], str] = str,
) -> None:
    """Check that a file has the weights that its configuration asks for, and no others.

    Args:
        config: the model's configuration.
        found: the shape of each weight there is.
        keys: field of `config` → what the file calls it; of fields that are not there, the
            model_type decides.
        where: path of the file, for errors.
        called: Hugging Face's name of a weight → the file's, for errors.

    Raises:
        ExportError: naming the first weight that is missing, left over or of another shape, and
            the setting that it contradicts.
    """
    said = _Settings(config, keys)
    wanted = set()
    for name, sizes in WEIGHTS[config.model_type](config):
        wanted.add(name)
        if name not in found:
            absent = not any(_layer(other) == _layer(name) for other in found)
            asking = said.say("layers") if absent and _layer(name) is not None else said.why(name)
            raise ExportError(f"{where} has no {called(name)}, which {asking} asks for")
        shape = tuple(size.value for size in sizes)
        if found[name] != shape:
            raise ExportError(
                f"{where}: {called(name)} has shape {list(found[name])}, but "
                f"{said.blame(sizes, found[name])} asks for {list(shape)}"
            )
    for name in found:
        if name not in wanted:
            beyond = (_layer(name) or 0) >= config.layers
            asking = said.say("layers") if beyond else said.why(name)
            raise ExportError(
                f"{where} holds {called(name)}, for which {asking} has no use: the model might "
                "come out as another one"
            )


class _Settings:
    """Names the settings of a model as its file does, for errors."""

    def __init__(self, config: ModelConfig, keys: Mapping[str, str]) -> None:
        self._config, self._keys = config, keys

    def say(self, *fields: str) -> str:
        """Format keys and their values, as in "num_attention_heads 4 × head_dim 8"."""
        return " × ".join(f"{self._keys[name]} {getattr(self._config, name)}" for name in fields)

    def why(self, name: str) -> str:
        """Name the switch that a weight depends on."""
        layers = (_layer(name) or 0) + 1
        for switch in SWITCHES:
            either = (
                msgspec.structs.replace(self._config, layers=layers, **{switch: on})
                for on in (False, True)
            )
            without, with_it = (dict(WEIGHTS[each.model_type](each)) for each in either)
            if (name in without) != (name in with_it) and switch in self._keys:
                return self.say(switch)
        return self.say("model_type")

    def blame(self, sizes: tuple[Size, ...], found: tuple[int, ...]) -> str:
        """Name the settings behind the dimensions that differ."""
        if len(sizes) != len(found):
            return self.say("model_type")
        pairs = zip(sizes, found, strict=True)
        wrong = [size.fields for size, there in pairs if size.value != there]
        return ", ".join(self.say(*fields) for fields in dict.fromkeys(wrong))


def embedding_of(config: ModelConfig) -> str:
    """Return the name of the embedding, the first weight of every architecture."""
    name, _ = next(WEIGHTS[config.model_type](config))
    return name


def _layer(name: str) -> int | None:
    match = LAYER.search(name)
    return None if match is None else int(match[1])


def _llama(config: ModelConfig) -> Weights:
    hidden, inner = _size(config, "hidden"), _size(config, "intermediate")
    queries, keys = _size(config, "heads", "head_dim"), _size(config, "kv_heads", "head_dim")
    yield "model.embed_tokens.weight", (_size(config, "vocab_size"), hidden)
    for i in range(config.layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        for name, rows, columns, bias in (
            ("self_attn.q_proj", queries, hidden, config.attention_bias),
            ("self_attn.k_proj", keys, hidden, config.attention_bias),
            ("self_attn.v_proj", keys, hidden, config.attention_bias),
            ("self_attn.o_proj", hidden, queries, config.output_bias),
            ("mlp.gate_proj", inner, hidden, config.mlp_bias),
            ("mlp.up_proj", inner, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, inner, config.mlp_bias),
        ):
            yield from _linear(f"{layer}.{name}", rows, columns, bias=bias)
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                yield f"{layer}.self_attn.{name}.weight", (_size(config, "head_dim"),)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config.tied:
        yield HEAD, (_size(config, "vocab_size"), hidden)


def _opt(config: ModelConfig) -> Weights:
    decoder = "model.decoder"
    hidden, inner = _size(config, "hidden"), _size(config, "intermediate")
    width = _size(config, "embedding") if config.embedding else hidden
    vocabulary = _size(config, "vocab_size")
    positions = Size(config.context + config.position_offset, ("context",))
    yield f"{decoder}.embed_tokens.weight", (vocabulary, width)
    yield f"{decoder}.embed_positions.weight", (positions, hidden)
    for i in range(config.layers):
        layer = f"{decoder}.layers.{i}"
        for part in "qkv":
            name = f"{layer}.self_attn.{part}_proj"
            yield from _linear(name, hidden, hidden, bias=config.attention_bias)
        yield from _linear(f"{layer}.self_attn.out_proj", hidden, hidden, bias=config.output_bias)
        yield from _norm(f"{layer}.self_attn_layer_norm", hidden)
        yield from _linear(f"{layer}.fc1", inner, hidden, bias=config.mlp_bias)
        yield from _linear(f"{layer}.fc2", hidden, inner, bias=config.mlp_bias)
        yield from _norm(f"{layer}.final_layer_norm", hidden)
    if config.final_norm:
        yield from _norm(f"{decoder}.final_layer_norm", hidden)
    if config.embedding:
        yield from _linear(f"{decoder}.project_in", hidden, width, bias=False)
        yield from _linear(f"{decoder}.project_out", width, hidden, bias=False)
    if not config.tied:
        yield HEAD, (vocabulary, width)


WEIGHTS: dict[str, Callable[[ModelConfig], Weights]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "opt": _opt,
}


def _size(config: ModelConfig, *fields: str) -> Size:
    """Multiply these fields."""
    return Size(math.prod(getattr(config, name) for name in fields), fields)


def _linear(name: str, rows: Size, columns: Size, *, bias: bool) -> Weights:
    """Yield the weight [rows, columns] of a projection, and its bias [rows]."""
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(name: str, width: Size) -> Weights:
    """Yield weight and bias of a layer norm."""
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)
