"""Optimisation profiles: the ranges of input shapes that an engine is built for.

There are two profiles: `decode` takes up to NARROW tokens of every slot, `prefill` up to CHUNK
tokens of one slot. The decoder splits its passes (`Backend.narrow`, `Backend.widest`), so that
every run fits a profile. The head of a model in stages has only `decode`, for up to CHUNK rows.

    T packed tokens   N rows wanted   B slots   S tokens of the widest pass   C capacity
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from pilotfish.base.reading import reading_file
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.backends.backend import kv_names
from pilotfish.engines.device_cache import doubling_capacities
from pilotfish.engines.engine_errors import BuildError
from pilotfish.engines.manifest import OPSET24, Manifest
from pilotfish.engines.tensorrt.fixing import input_width

NARROW = 16  # tokens per slot in `decode`: enough for a chain or a small tree
CHUNK = 128  # tokens in `prefill`: an engine's chunk (`engines.engine.CHUNK`)
ALIGNMENT = 64  # capacities are multiples of this number of cells
FIRST_CAPACITY = 256
USUAL_CAPACITY = 1024
USUAL_SLOTS, USUAL_WINDOW = 8, 4

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


@dataclass(frozen=True)
class Profile:
    """The minimum, optimum and maximum shapes of all inputs, by input name."""

    name: str
    minimum: Shapes
    optimum: Shapes
    maximum: Shapes

    def holds(self, shapes: Shapes) -> bool:
        """Whether a run with these input shapes fits the profile."""
        return all(
            low <= size <= high
            for name, shape in shapes.items()
            for low, size, high in zip(self.minimum[name], shape, self.maximum[name], strict=True)
        )


@dataclass(frozen=True)
class Profiles:
    """The profiles of an engine; the capacity is constant if the dialect requires that.

    Attributes:
        prefill: None for a head.
        capacities: allowed capacities of the cache, ascending; none for a head.
    """

    decode: Profile
    prefill: Profile | None
    narrow: int
    widest: int
    capacities: tuple[int, ...]

    @classmethod
    def for_slots(
        cls, manifest: Manifest, slots: int, context: int, *, fixed: bool = False
    ) -> Profiles:
        """Make the profiles.

        `fixed`: whether the capacity is static (`engines.tensorrt.fixing`).
        """
        narrow, widest = min(NARROW, context), min(CHUNK, context)
        # In a shared run, each slot is padded to the widest pass, which may end beyond the slot's
        # context.
        cells = context + (narrow if slots > 1 else 0)
        last = -(-cells // ALIGNMENT) * ALIGNMENT
        capacities = [last] if fixed else doubling_capacities(min(FIRST_CAPACITY, last), last)
        least, most = capacities[0], last
        usual = max(least, min(USUAL_CAPACITY, last))
        batch, window = min(USUAL_SLOTS, slots), min(USUAL_WINDOW, narrow)

        def shapes(batch: int, size: int, rows: int, capacity: int) -> Shapes:
            return input_shapes(manifest, batch, size, batch * size, rows, capacity)

        smallest = shapes(1, 1, 1, least)
        return cls(
            decode=Profile(
                "decode",
                smallest,
                shapes(batch, window, batch * window, usual),
                shapes(slots, narrow, slots * narrow, most),
            ),
            prefill=Profile(
                "prefill",
                smallest,
                shapes(1, widest, 1, usual),
                shapes(1, widest, widest, most),
            ),
            narrow=narrow,
            widest=widest,
            capacities=tuple(capacities),
        )

    @classmethod
    def for_head(cls, width: int) -> Profiles:
        """Make the profile of a head that reads hidden states f32 [N, width]."""
        least, usual, most = (_head_shapes(rows, width) for rows in (1, USUAL_WINDOW, CHUNK))
        return cls(Profile("decode", least, usual, most), None, CHUNK, CHUNK, ())

    @classmethod
    def for_engine(
        cls, artifact: Artifact, slots: int, context: int, *, head: bool = False
    ) -> Profiles:
        """Make the profiles of an artifact's engine, or of its head's engine.

        Opset 24's TensorScatter needs a cache of fixed length.

        Raises:
            BuildError: if the head's graph cannot be read.
        """
        if not head:
            manifest = artifact.manifest
            return cls.for_slots(manifest, slots, context, fixed=manifest.opset == OPSET24)
        with reading_file(lambda problem: BuildError(f"TensorRT cannot read it: {problem}")):
            model = artifact.head_path.read_bytes()
        try:
            return cls.for_head(input_width(model))
        except ValueError as error:
            raise BuildError(f"{artifact.head_path}: {error}") from None

    @property
    def all(self) -> tuple[Profile, ...]:
        """The profiles, in the order in which an engine numbers them."""
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)

    def union(self) -> tuple[Shapes, Shapes, Shapes]:
        """Merge into one profile: minimum, optimum and maximum shapes over all."""
        maximum = {
            name: tuple(map(max, *(each.maximum[name] for each in self.all), shape))
            for name, shape in self.decode.maximum.items()
        }
        return self.decode.minimum, self.decode.optimum, maximum

    @property
    def digest(self) -> str:
        """A hash of all shapes, 16 hex digits."""
        listed = [[p.name, p.minimum, p.optimum, p.maximum] for p in self.all]
        return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()[:16]


def input_shapes(
    manifest: Manifest, batch: int, size: int, total: int, rows: int, capacity: int
) -> Shapes:
    """Return the input shapes of a run of `batch` slots; `size`: tokens of its widest pass.

    A stage that is not the first reads states instead of tokens; only the last knows wanted rows.
    """
    stage = manifest.stage
    reads_tokens, names_rows = stage is None or stage.first, stage is None or stage.last
    states = (total, manifest.dimensions.hidden)
    windowed = {} if manifest.window is None else {"cell_positions": (batch, capacity)}
    return {
        **({"input_ids": (total,)} if reads_tokens else {"states": states}),
        "position_ids": (total,),
        **({"logit_rows": (rows,)} if names_rows else {}),
        "unpack": (batch, size),
        "pack": (total,),
        "write_indices": (batch,),
        "attention_mask": (batch, 1, size, capacity),
        **windowed,
        **{
            f"past.{name}": (batch, each.kv_heads, capacity, each.head_dim)
            for each in manifest.cached
            for name in kv_names([each.layer])
        },
    }


def _head_shapes(rows: int, width: int) -> Shapes:
    """Return the input shapes of a head."""
    return {"hidden_states": (rows, width)}
