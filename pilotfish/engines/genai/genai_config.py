"""Read `genai_config.json`, and compare it with the graph's inputs and outputs.

ONNX Runtime GenAI's model builder writes the file next to each graph. This module reads only the
parts that a run needs: names of inputs and outputs, sizes, and the window. The exporter calls
`check_graph` with the inputs and outputs that `onnx` reports; the engine calls it with the inputs
and outputs that ONNX Runtime reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec

from pilotfish.base.reading import read_content, reading_file
from pilotfish.engines.engine_errors import ArtifactError

MOST_CONFIG_BYTES = 1 << 20
FLOAT_DTYPES = ("float32", "float16")  # numpy has no bfloat16
KNOWN_INPUTS = {"input_ids", "attention_mask", "position_ids", "past_key_names", "past_value_names"}
HIDDEN_STATES = "hidden_states"

# Bounds on numbers, so that no file can cause a huge allocation.
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Few = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]
Positions = Annotated[int, msgspec.Meta(ge=2, le=1 << 24)]


class SlidingWindow(msgspec.Struct, frozen=True):
    """The section `model.decoder.sliding_window`; it applies to all layers if `layers` is empty."""

    window_size: int
    layers: list[int] = []


class DecoderSection(msgspec.Struct, frozen=True):
    """`model.decoder`."""

    head_size: Few
    hidden_size: Count
    num_attention_heads: Few
    num_hidden_layers: Few
    num_key_value_heads: Few
    inputs: dict[str, str]
    outputs: dict[str, str]
    filename: str = "model.onnx"
    sliding_window: SlidingWindow | None = None
    pipeline: Any = None


class ModelSection(msgspec.Struct, frozen=True):
    """`model`."""

    type: str
    context_length: Positions
    decoder: DecoderSection
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


class GenaiConfig(msgspec.Struct, frozen=True):
    """The part of `genai_config.json` that is read."""

    model: ModelSection

    def planes(self, side: Literal["past", "present"]) -> list[str]:
        """List the graph's names of keys and values, in the order of the tensors in `kv.KVCache`.

        Raises:
            ArtifactError: if the file has no such names.
        """
        section = self.model.decoder
        patterns = section.inputs if side == "past" else section.outputs
        names = [patterns.get(f"{side}_{role}_names", "") for role in ("key", "value")]
        if any(name.count("%") != 1 or "%d" not in name for name in names):
            raise ArtifactError(
                f"genai_config.json does not name the {side} keys and values of all layers, "
                "but this engine runs only models in which every layer has attention"
            )
        layers = range(section.num_hidden_layers)
        return [name.replace("%d", str(layer)) for layer in layers for name in names]


class Port(NamedTuple):
    """An input or output of a graph: its numpy dtype, and its shape with symbolic sizes as text."""

    kind: str
    shape: tuple[int | str | None, ...]


Ports: TypeAlias = Mapping[str, Port]


class GraphForm(NamedTuple):
    """Inputs and outputs of a graph that passed `check_graph`.

    positions: whether the graph has an input for positions. kv_dtype: dtype of keys and values.
    widths: row width of each output, logits last. kinds: dtype of each output.
    """

    positions: bool
    kv_dtype: Literal["float32", "float16"]
    widths: dict[str, int]
    kinds: dict[str, str]


def read_genai_config(path: Path) -> GenaiConfig:
    """Read and check a genai_config.json.

    Raises:
        ArtifactError: if the file cannot be read, or describes a model that this engine cannot run.
    """
    with reading_file(lambda problem: ArtifactError(f"{path} cannot be read: {problem}")):
        data = read_content(path, MOST_CONFIG_BYTES)
    complaint = f"{path} does not describe a text model as ONNX Runtime GenAI does"
    with reading_file(lambda problem: ArtifactError(f"{complaint}: {problem}")):
        config = msgspec.json.decode(data, type=GenaiConfig)
    problem = _unsupported(config)
    if problem:
        raise ArtifactError(f"{path}: {problem}")
    return config


def _unsupported(config: GenaiConfig) -> str | None:
    """Return the reason why this engine cannot run the model; None if it can."""
    section = config.model.decoder
    states = sorted(name for name in section.inputs if "conv" in name or "recurrent" in name)
    if states:
        return (
            f"{config.model.type} has recurrent states ({', '.join(states)}), which this "
            "engine cannot roll back: export the original checkpoint"
        )
    if section.pipeline is not None:
        return "this engine runs no model that consists of several graphs (pipeline)"
    if unknown := section.inputs.keys() - KNOWN_INPUTS:
        return f"the graph has unknown inputs: {', '.join(sorted(unknown))}"
    lacking = {"input_ids", "attention_mask"} - section.inputs.keys()
    if "logits" not in section.outputs:
        lacking |= {"logits"}
    if lacking:
        return (
            f"the graph has no {', '.join(sorted(lacking))}, but this engine runs only text models"
        )
    return None


def check_graph(config: GenaiConfig, inputs: Ports, outputs: Ports) -> GraphForm:
    """Compare a graph's inputs and outputs with its genai_config.json.

    Raises:
        ArtifactError: if they differ, or the graph has unknown inputs or outputs.
    """
    section = config.model.decoder
    input_names, output_names = section.inputs, section.outputs
    past, present = config.planes("past"), config.planes("present")
    rows = [
        input_names[name]
        for name in ("input_ids", "attention_mask", "position_ids")
        if name in input_names
    ]
    if unmatched := inputs.keys() ^ {*rows, *past}:
        raise _mismatch(f"only one of the two has {', '.join(sorted(unmatched)[:4])}")
    for name in rows:
        _expect_port(name, inputs[name], ("int64",), (None, None))
    heads, width = section.num_key_value_heads, section.head_size
    kinds = {inputs[name].kind for name in past}
    for name in past:
        _expect_port(name, inputs[name], FLOAT_DTYPES, (None, heads, None, width))
    for name in present:
        _expect_port(name, _required_port(outputs, name), tuple(kinds), (None, heads, None, width))
    if len(kinds) > 1:
        raise _mismatch("its cached keys and values have more than one data type")
    widths, types = {}, {}
    for name, port_name in (
        (HIDDEN_STATES, output_names.get(HIDDEN_STATES, HIDDEN_STATES)),
        ("logits", output_names["logits"]),
    ):
        if name == HIDDEN_STATES and port_name not in outputs:
            continue
        port = _required_port(outputs, port_name)
        _expect_port(
            port_name,
            port,
            FLOAT_DTYPES,
            (None, None, section.hidden_size if name == HIDDEN_STATES else None),
        )
        *_, positions, last = port.shape
        if not isinstance(last, int) or last < 1 or isinstance(positions, int):
            raise _mismatch(f"the output {port_name} does not have a row for each token")
        widths[name], types[name] = last, port.kind
    kv_dtype: Any = kinds.pop()
    return GraphForm("position_ids" in input_names, kv_dtype, widths, types)


def _required_port(ports: Ports, name: str) -> Port:
    if name not in ports:
        raise _mismatch(f"the graph has no {name}")
    return ports[name]


def _expect_port(
    name: str, port: Port, kinds: tuple[str, ...], shape: tuple[int | None, ...]
) -> None:
    """Raise unless the port has one of these dtypes and this shape, where None means any size."""
    fits = len(port.shape) == len(shape) and all(
        not isinstance(size, int) or wanted is None or size == wanted
        for size, wanted in zip(port.shape, shape, strict=True)
    )
    if port.kind not in kinds or not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in port.shape)
        raise _mismatch(
            f"{name} is {port.kind} [{sizes}], and {' or '.join(kinds)} "
            f"[{', '.join('any' if size is None else str(size) for size in shape)}] is expected"
        )


def _mismatch(problem: str) -> ArtifactError:
    return ArtifactError(
        f"the graph contradicts its genai_config.json, or this engine does not support it: "
        f"{problem}"
    )
