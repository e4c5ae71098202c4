"""What `genai_config.json` says of a graph, and whether the graph's inputs and outputs are so.

ONNX Runtime GenAI's model builder writes the file beside each graph. Only what a run needs is read:
the names of inputs and outputs, sizes, and the window. `check_graph` compares them with the graph;
the exporter calls it with what `onnx` reads of it, the engine with what ONNX Runtime does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec

from pilotfish.base.reading import read_content, reading_file
from pilotfish.engines.engine_errors import ArtifactError

MOST_BYTES = 1 << 20  # of genai_config.json
FLOATS = ("float32", "float16")  # numpy has no bfloat16
KNOWN = {"input_ids", "attention_mask", "position_ids", "past_key_names", "past_value_names"}
HIDDEN = "hidden_states"

# Bounded, so that no number in a file makes anything here large.
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Few = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]
Positions = Annotated[int, msgspec.Meta(ge=2, le=1 << 24)]


class SlidingWindow(msgspec.Struct, frozen=True):
    """`model.decoder.sliding_window`: of these layers, or of all that are not named."""

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
    """`genai_config.json`, as far as it is read."""

    model: ModelSection

    def planes(self, when: Literal["past", "present"]) -> list[str]:
        """Name the keys and values in the order of `kv.KVCache`.

        Raises:
            ArtifactError: if the file gives no such names.
        """
        section = self.model.decoder
        given = section.inputs if when == "past" else section.outputs
        names = [given.get(f"{when}_{what}_names", "") for what in ("key", "value")]
        if any(name.count("%") != 1 or "%d" not in name for name in names):
            raise ArtifactError(
                f"genai_config.json does not name the {when} keys and values of its layers: only "
                "models whose layers all attend are run"
            )
        layers = range(section.num_hidden_layers)
        return [name.replace("%d", str(layer)) for layer in layers for name in names]


class Port(NamedTuple):
    """An input or output of a graph: its type as numpy calls it, names for symbolic sizes."""

    kind: str
    shape: tuple[int | str | None, ...]


Ports: TypeAlias = Mapping[str, Port]


class GraphForm(NamedTuple):
    """What a graph that passed `check_graph` takes and gives.

    positions: whether it reads positions. kv_dtype: of keys and values. widths: of its answers'
    rows, logits last. kinds: the answers' dtypes.
    """

    positions: bool
    kv_dtype: Literal["float32", "float16"]
    widths: dict[str, int]
    kinds: dict[str, str]


def read_genai_config(path: Path) -> GenaiConfig:
    """Read and check a genai_config.json.

    Raises:
        ArtifactError: if it cannot be read, or describes what is not run here.
    """
    with reading_file(lambda problem: ArtifactError(f"{path} cannot be read: {problem}")):
        data = read_content(path, MOST_BYTES)
    saying = f"{path} does not say what ONNX Runtime GenAI says of a text model"
    with reading_file(lambda problem: ArtifactError(f"{saying}: {problem}")):
        config = msgspec.json.decode(data, type=GenaiConfig)
    problem = _not_run(config)
    if problem:
        raise ArtifactError(f"{path}: {problem}")
    return config


def _not_run(config: GenaiConfig) -> str | None:
    """Say what is described that cannot be run here; None if it can."""
    section = config.model.decoder
    states = sorted(name for name in section.inputs if "conv" in name or "recurrent" in name)
    if states:
        return (
            f"{config.model.type} keeps states that every token changes ({', '.join(states)}), and "
            "a rollback cannot take them back: export the checkpoint itself"
        )
    if section.pipeline is not None:
        return "a model in several graphs (pipeline) is not run here"
    if unknown := section.inputs.keys() - KNOWN:
        return f"the graph wants {', '.join(sorted(unknown))}, of which nothing is known here"
    lacking = {"input_ids", "attention_mask"} - section.inputs.keys()
    if "logits" not in section.outputs:
        lacking |= {"logits"}
    if lacking:
        return f"the graph has no {', '.join(sorted(lacking))}: only models of text are run here"
    return None


def check_graph(config: GenaiConfig, inputs: Ports, outputs: Ports) -> GraphForm:
    """Compare a graph's inputs and outputs with what its genai_config.json says.

    Raises:
        ArtifactError: if they differ, or the graph takes or gives what is not known here.
    """
    section = config.model.decoder
    given, answers = section.inputs, section.outputs
    past, present = config.planes("past"), config.planes("present")
    rows = [
        given[name] for name in ("input_ids", "attention_mask", "position_ids") if name in given
    ]
    if odd := inputs.keys() ^ {*rows, *past}:
        raise _differs(f"{', '.join(sorted(odd)[:4])} is in one and not in the other")
    for name in rows:
        _expect(name, inputs[name], ("int64",), (None, None))
    heads, width = section.num_key_value_heads, section.head_size
    kinds = {inputs[name].kind for name in past}
    for name in past:
        _expect(name, inputs[name], FLOATS, (None, heads, None, width))
    for name in present:
        _expect(name, _given(outputs, name), tuple(kinds), (None, heads, None, width))
    if len(kinds) > 1:
        raise _differs("its keys and values are of several types")
    widths, types = {}, {}
    for name, called in ((HIDDEN, answers.get(HIDDEN, HIDDEN)), ("logits", answers["logits"])):
        if name == HIDDEN and called not in outputs:
            continue
        port = _given(outputs, called)
        _expect(called, port, FLOATS, (None, None, section.hidden_size if name == HIDDEN else None))
        *_, positions, last = port.shape
        if not isinstance(last, int) or last < 1 or isinstance(positions, int):
            raise _differs(f"{called} is no answer to each of a pass's tokens")
        widths[name], types[name] = last, port.kind
    kv_dtype: Any = kinds.pop()
    return GraphForm("position_ids" in given, kv_dtype, widths, types)


def _given(ports: Ports, name: str) -> Port:
    if name not in ports:
        raise _differs(f"the graph gives no {name}")
    return ports[name]


def _expect(name: str, port: Port, kinds: tuple[str, ...], shape: tuple[int | None, ...]) -> None:
    """Raise unless the port is of one of these types and of this shape; None is any size."""
    fits = len(port.shape) == len(shape) and all(
        not isinstance(size, int) or wanted is None or size == wanted
        for size, wanted in zip(port.shape, shape, strict=True)
    )
    if port.kind not in kinds or not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in port.shape)
        raise _differs(
            f"{name} is {port.kind} [{sizes}], and {' or '.join(kinds)} "
            f"[{', '.join('any' if size is None else str(size) for size in shape)}] is expected"
        )


def _differs(problem: str) -> ArtifactError:
    return ArtifactError(
        f"the graph is not what its genai_config.json says, or of a kind not run here: {problem}"
    )
