"""The sizes of a model that decide about memory and speed, before and after it is exported."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.manifest import CachedLayer, Manifest
from pilotfish.engines.tensorrt.gates import FLOATS

# Bits of a weight with the scales and offsets of its block, rounded up: blocks have 32 columns, and
# scales and offsets up to 32 bits each.
BITS = {"fp32": 32.0, "fp16": 16.0, "int8": 9.0, "int4": 6.0}
HEAD_BITS = {**BITS, "int4": 9.0}  # a head and a table keep 8 bits in int4
# Types of stored blocks with 4 bits, by the beginning of their names; all others count as 8 bits.
FOUR_BITS = ("Q2_", "Q3_", "Q4_", "IQ4_", "GPTQ", "AWQ", "MXFP4")
MIXED_BITS = 6.5  # where a source mixes blocks of 4 bits with wider ones
COPIES_TABLE = ("opset24", "tensorrt")  # dialects whose quantised head is no table of embeddings
# An artifact this many times larger than a dense model of its dimensions has experts.
MOST_OVER_DENSE = 1.6
KVElement = Literal[2, 4]


class Parameters(Struct, frozen=True, kw_only=True):
    """The numbers of a model's parameters, by what happens to them.

    Attributes:
        matrices: matrices that every token uses.
        experts: matrices of experts, all together.
        active_experts: matrices of the experts that one token uses.
        tables: tables of embeddings, of which a token reads one row.
        head: the output projection; 0 if the table of embeddings is also the head.
        others: norms, biases and the like, which stay floats.
    """

    matrices: int
    experts: int = 0
    active_experts: int = 0
    tables: int = 0
    head: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        """The number of all parameters."""
        return self.matrices + self.experts + self.tables + self.head + self.others


class ModelShape(Struct, frozen=True, kw_only=True):
    """The sizes of a model.

    Attributes:
        name: the model's name.
        context: its positions.
        longest: the positions that it can be exported with; None: `context`.
        cached: the layers with keys and values.
        parameters: None if the model is an artifact.
        tied: whether the table of embeddings is also the head.
        blocks: types of the quantised blocks that the source stores ("Q4_1", "gptq").
        states: whether it has recurrent states.
        dialect, precision: the form of the artifact; None before it is chosen.
        weights_bytes: size of the weights in this form; None: unknown.
        read_bytes: the part of `weights_bytes` that a pass of one token reads; None: unknown.
    """

    name: str
    context: int
    longest: int | None = None
    cached: tuple[CachedLayer, ...] = ()
    parameters: Parameters | None = None
    tied: bool = False
    blocks: tuple[str, ...] = ()
    states: bool = False
    dialect: str | None = None
    precision: str | None = None
    weights_bytes: int | None = None
    read_bytes: int | None = None

    @property
    def element_bytes(self) -> KVElement:
        """The size of a number among the keys and values."""
        return 2 if self.precision == "fp16" else 4

    def kv_bytes(self, context: int, slots: int) -> int:
        """Return the size of keys and values of `slots` sequences of `context` tokens."""
        numbers = sum(2 * each.kv_heads * each.head_dim for each in self.cached)
        return slots * context * numbers * self.element_bytes

    def in_form(self, dialect: str, precision: str) -> ModelShape:
        """Return the sizes in this dialect and precision, with an estimate of the weights."""
        form = msgspec.structs.replace(self, dialect=dialect, precision=precision)
        counts = self.parameters
        bits = self._bits(precision)
        if counts is None or bits is None:
            return form
        matrix, head = bits
        quantised = precision not in FLOATS
        table = head if not quantised or self.tied or dialect == "contrib" else matrix
        copy = self.tied and quantised and dialect in COPIES_TABLE
        per_pass = counts.matrices * matrix + counts.head * head
        per_pass += counts.others * (16 if precision == "fp16" else 32)
        if self.tied:
            per_pass += counts.tables * head
        embeddings = 0.0 if self.tied and not copy else counts.tables * table
        return msgspec.structs.replace(
            form,
            weights_bytes=round((per_pass + embeddings + counts.experts * matrix) / 8),
            read_bytes=round((per_pass + counts.active_experts * matrix) / 8),
        )

    def _bits(self, precision: str) -> tuple[float, float] | None:
        """Return the bits of a matrix's weight and of the head's; None for an unknown form."""
        if precision == "stored":
            four = [each.upper().startswith(FOUR_BITS) for each in self.blocks]
            if any(four) and not all(four):
                return MIXED_BITS, HEAD_BITS["int4"]
            precision = "int4" if any(four) else "int8"
        return (BITS[precision], HEAD_BITS[precision]) if precision in BITS else None


def shape_of(model: Artifact | Manifest) -> ModelShape:
    """Return the sizes of an artifact; of a manifest alone, without the size of its weights."""
    manifest = model.manifest if isinstance(model, Artifact) else model
    size = None
    if isinstance(model, Artifact):
        size = sum(
            path.stat().st_size
            for name, path in model.paths.items()
            if name.endswith((".data", ".gguf"))
        )
    return ModelShape(
        name=manifest.model,
        context=manifest.dimensions.context,
        cached=tuple(manifest.cached),
        states=manifest.states is not None,
        dialect=manifest.dialect,
        precision=manifest.precision,
        weights_bytes=size,
        read_bytes=None if size is None or _has_experts(manifest, size) else size,
    )


def _has_experts(manifest: Manifest, size: int) -> bool:
    """Whether the weights are so large that a token cannot use all of them."""
    sizes = manifest.dimensions
    layer = sizes.hidden * sizes.head_dim * 2 * (sizes.heads + sizes.kv_heads)
    layer += 3 * sizes.hidden * sizes.intermediate
    dense = sizes.layers * layer + 2 * manifest.padded_vocab_size * sizes.hidden
    bits = HEAD_BITS.get(manifest.precision, 32.0)
    return size > MOST_OVER_DENSE * dense * bits / 8
