"""Find our weights in a checkpoint, which may rename, fuse, stack, list or transpose tensors.

In: names and shapes in a checkpoint, and its architecture's `Names`. Out: the origin of each of our
weights (`export.weights`), and the weight itself, as a view of the stored tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.export.architectures import Names
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model_config import Layer, ModelConfig
from pilotfish.export.sources.expert_keys import MOST_EXPERTS
from pilotfish.export.weight_recorder import shapes
from pilotfish.export.weights import LAYER, wildcard_name

T = TypeVar("T", np.float32, np.int64)
LISTED = re.compile(r"(.*)\.(\d+)\.weight")


@dataclass(frozen=True)
class Origin:
    """The origin of one of our weights.

    Attributes:
        stored: names of tensors in the checkpoint; several tensors are stacked.
        part: index of this weight in `parts`, for a fused tensor; None = the whole tensor.
        parts: our names of the modules that the tensor fuses, or of the weights of each expert.
        expert: the expert's number if the tensor holds all experts.
    """

    stored: tuple[str, ...]
    part: int | None = None
    parts: tuple[str, ...] = ()
    expert: int | None = None


def find_weights(names: Names, stored: Mapping[str, tuple[int, ...]]) -> dict[str, Origin]:
    """Return the origin of each weight; unknown names stay as they are.

    Raises:
        ExportError: if two tensors stand for the same weight.
    """
    relevant = [name for name in stored if not name.endswith(names.dropped)]
    bare = not any(
        name.startswith(f"{names.body}.") for name in relevant
    )  # true if the names lack the prefix of the body
    parts_of_fused = {part: fused for fused, parts in names.fused.items() for part in parts}
    origins: dict[str, Origin] = {}
    listed: dict[str, dict[int, str]] = {}

    def add_origin(ours: str, origin: Origin) -> None:
        if ours in origins:
            both = f"{origins[ours].stored[0]} and {origin.stored[0]}"
            raise ExportError(f"{both} stand for the same weight: remove the wrong one")
        origins[ours] = origin

    for name in relevant:
        body, inner = _split_body(names, name, bare=bare)
        match = re.fullmatch(rf"{re.escape(names.stack)}\.(\d+)\.(.+)", inner) if body else None
        if match is None:
            add_origin(_outer(names, inner, body=body), Origin((name,)))
            continue
        prefix, rest = f"model.layers.{match[1]}.", match[2]
        module, _, kind = rest.rpartition(".")
        entry = LISTED.fullmatch(rest)
        if entry and entry[1] in names.listed:
            ours = f"{prefix}{names.listed[entry[1]]}.weight"
            listed.setdefault(ours, {})[int(entry[2])] = name
            continue
        if rest in names.stacked:
            parts = names.stacked[rest]
            for expert in range(min(stored[name][0], MOST_EXPERTS) if stored[name] else 0):
                for i, part in enumerate(parts):
                    add_origin(
                        prefix + _with_number(part, expert), Origin((name,), i, parts, expert)
                    )
            continue
        if rest in names.tensors or not module:
            add_origin(prefix + names.tensors.get(rest, rest), Origin((name,)))
            continue
        if module in names.fused:
            parts = names.fused[module]
            for i, part in enumerate(parts):
                add_origin(f"{prefix}{part}.{kind}", Origin((name,), i, parts))
            continue
        ours = _rename_module(names.modules, module)
        if ours == module and module in parts_of_fused:
            raise ExportError(
                f"{name} is no tensor of this model_type, whose files have "
                f"{parts_of_fused[module]}: model_type is wrong, or the tensors were changed"
            )
        add_origin(f"{prefix}{ours}.{kind}", Origin((name,)))
    for ours, members in listed.items():
        add_origin(ours, Origin(tuple(members[i] for i in sorted(members))))
    return origins


def drop_unread(origins: dict[str, Origin], config: ModelConfig) -> None:
    """Remove the projections of keys and values in layers that read those of earlier layers.

    Published files of Gemma 3n and 4 have them; transformers and llama.cpp do not read them.
    """
    for i, layer in enumerate(config.pattern):
        if layer.kv_source is not None:
            for part in ("k_proj", "v_proj", "k_norm"):
                origins.pop(f"model.layers.{i}.self_attn.{part}.weight", None)


def _rename_module(modules: Mapping[str, str], module: str) -> str:
    """Return the new name of a layer's module; * in the table stands for any number."""
    number = re.search(r"\.(\d+)\.", module)
    other = modules.get(wildcard_name(module), module)
    return other if number is None else _with_number(other, int(number[1]))


def _with_number(name: str, expert: int) -> str:
    return name.replace("*", str(expert))


def _split_body(names: Names, name: str, *, bare: bool) -> tuple[bool, str]:
    """Return whether a tensor is in the body, and its name within it."""
    prefix = f"{names.body}."
    if names.body and name.startswith(prefix):
        return True, name.removeprefix(prefix)
    return bare and not name.startswith("lm_head."), name


def _outer(names: Names, inner: str, *, body: bool) -> str:
    """Return our name for a weight outside the layers."""
    module, _, kind = inner.rpartition(".")
    ours = names.outer.get(module, module)
    return f"{'model.' if body and ours != 'lm_head' else ''}{ours}.{kind}"


def stored_name(names: Names, name: str) -> str:
    """Return the checkpoint's name for one of our weights, for errors."""
    body = f"{names.body}." if names.body else ""
    module, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if layer is None:
        ours = module.removeprefix("model.")
        other = {our_name: theirs for theirs, our_name in names.outer.items()}.get(ours, ours)
        return f"{other}.{kind}" if ours == "lm_head" else f"{body}{other}.{kind}"
    prefix = f"{body}{names.stack}.{layer[1]}."
    stacked = {
        our_name: theirs for theirs, several in names.stacked.items() for our_name in several
    }
    stacked |= {our_name: theirs for theirs, our_name in names.tensors.items()}
    if wildcard_name(f"{layer[2]}.{kind}") in stacked:
        return prefix + stacked[wildcard_name(f"{layer[2]}.{kind}")]
    known = {our_name: theirs for theirs, several in names.fused.items() for our_name in several}
    known |= {our_name: theirs for theirs, our_name in names.modules.items()}
    return f"{prefix}{_rename_module(known, layer[2])}.{kind}"


class TensorSlicer:
    """An extractor of our weights from stored tensors.

    Args:
        names: the checkpoint's naming and layout of weights.
        config: the model's shape, which determines the rows of each weight in a fused tensor.
    """

    def __init__(self, names: Names, config: ModelConfig) -> None:
        self._names, self._config = names, config
        self._rows = {
            LAYER.split(name)[-1]: shape[0]
            for kind in set(config.pattern)
            for name, shape in shapes(one_layer(config, kind)).items()
        }

    def take(self, name: str, origin: Origin, stored: list[NDArray[T]]) -> NDArray[T]:
        """Return the weight `name` from its stored arrays: a view, or a copy if there are several.

        For a tensor of all experts, `stored` holds the array of the origin's expert.
        """
        if len({array.shape for array in stored}) > 1:
            raise ExportError(f"{', '.join(origin.stored)} have different shapes")
        array = stored[0] if len(stored) == 1 else np.stack(stored)
        if self._names.transposed and array.ndim == 2 and ".layers." in name:
            array = array.T
        if ".act_fn." in name or name.endswith(".expert_bias"):
            return array.reshape(-1)  # some checkpoints store scalars, or a matrix with one row
        if origin.part is None or not array.ndim:
            return array
        if origin.expert is not None:
            return self._take_expert(array, origin)
        if self._names.by_head:
            return self._take_by_head(array, origin.part, origin.parts)
        return self._take_rows(array, origin.part, [f"{module}.weight" for module in origin.parts])

    def _take_expert(self, array: NDArray[T], origin: Origin) -> NDArray[T]:
        """Return a part of an expert's tensor."""
        part, parts = origin.part or 0, [_with_number(name, 0) for name in origin.parts]
        columns = self._names.columns
        if columns is None and array.ndim == 2:
            count = sum(self._rows[name] for name in parts)
            if array.shape == (count, count):
                raise ExportError(
                    f"the square tensor {origin.stored[0]} does not show which of its axes is the "
                    "input's, and programs differ in it: give a file with a tensor for each expert"
                )
            columns = len(array) != count
        if columns and array.ndim == 2:
            array = array.T
        if self._names.alternating:
            return array[part :: len(parts)]
        return self._take_rows(array, part, parts)

    def _take_rows(self, array: NDArray[T], part: int, names: Sequence[str]) -> NDArray[T]:
        """Return the rows of weight `part` from a tensor that concatenates the weights `names`."""
        sizes = [self._rows[name] for name in names]
        start = sum(sizes[:part])
        if part == len(sizes) - 1:
            # surplus rows are included, so that the check of shapes reports them
            return array[start:]
        return array[start : start + sizes[part]]

    def rows(self, name: str, origin: Origin, count: int) -> NDArray[np.int64]:
        """Return the row indices of this weight in a stored matrix of `count` rows, i64 [N]."""
        return self.take(name, origin, [np.arange(count)[:, None]])[:, 0]

    def _take_by_head(self, array: NDArray[T], part: int, parts: Sequence[str]) -> NDArray[T]:
        """Return a part from rows that are grouped by head (see `Names.by_head`)."""
        config, dims = self._config, self._config.recurrence
        if dims is not None and parts[0].startswith("linear_attn."):
            each = dims.heads // dims.key_heads
            values, groups = each * dims.value_dim, dims.key_heads
            is_qkv = parts[0].endswith("qkv")
            sizes = [[dims.key_dim, dims.key_dim, values], [values]] if is_qkv else [[each]] * 2
        elif len(parts) == 2:  # a head's queries and its gate
            groups, sizes = config.heads, [[config.head_dim]] * 2
        else:
            groups, rows = config.kv_heads, config.head_dim
            sizes = [[config.heads // groups * rows], [rows], [rows]]
        flat = [size for several in sizes for size in several]
        if len(array) != groups * sum(flat):
            return array  # the shape is wrong; the check of shapes reports it
        inner, first = array.shape[1:], sum(map(len, sizes[:part]))
        grouped = array.reshape(groups, sum(flat), *inner)
        pieces = np.split(grouped, np.cumsum(flat[:-1]).tolist(), axis=1)
        chosen = pieces[first : first + len(sizes[part])]
        taken = [piece.reshape(groups * piece.shape[1], *inner) for piece in chosen]
        return taken[0] if len(taken) == 1 else np.concatenate(taken)

    def shape(
        self, name: str, origin: Origin, stored: Mapping[str, tuple[int, ...]]
    ) -> tuple[int, ...]:
        """Return the shape of the array that `take` returns, without reading it."""
        index = slice(None if origin.expert is None else 1, None)
        empty = [np.broadcast_to(np.float32(0), stored[each][index]) for each in origin.stored]
        return self.take(name, origin, empty).shape


def one_layer(config: ModelConfig, kind: Layer) -> ModelConfig:
    """Return the model's configuration with a single layer, of this kind."""
    return msgspec.structs.replace(config, layers=1, pattern=(kind,))
