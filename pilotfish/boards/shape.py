"""The sizes of a model that decide about memory and speed, before and after it is exported."""

from __future__ import annotations

from msgspec import Struct

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.manifest import CachedLayer, Manifest


class Parameters(Struct, frozen=True, kw_only=True):
    """The numbers of a model's parameters, by what a precision does to them.

    Attributes:
        matrices: the matrices of all layers.
        embedding: the table of embeddings, of which a token reads one row.
        head: the output projection; 0 if it is the table of embeddings.
        others: norms, biases and the like, which stay floats.
    """

    matrices: int
    embedding: int
    head: int = 0
    others: int = 0


class ModelShape(Struct, frozen=True, kw_only=True):
    """The sizes of a model.

    Attributes:
        name: the model's name.
        context: its positions.
        cached: the layers with keys and values.
        parameters: None if the model is an artifact.
        blocks: types of the quantised blocks that the source stores ("Q4_1", "gptq").
        stored_bytes: size of the source's weights; None if unknown.
        states: whether it has recurrent states.
        weights_bytes: size of an artifact's weights; None before the export.
        read_bytes: the part of `weights_bytes` that each pass reads; None: unknown.
        precision, dialect: of an artifact; None before the export.
    """

    name: str
    context: int
    cached: tuple[CachedLayer, ...]
    parameters: Parameters | None = None
    blocks: tuple[str, ...] = ()
    stored_bytes: int | None = None
    states: bool = False
    weights_bytes: int | None = None
    read_bytes: int | None = None
    precision: str | None = None
    dialect: str | None = None

    def kv_elements(self, context: int, slots: int) -> int:
        """Return the number of keys and values of `slots` sequences of `context` tokens."""
        return slots * context * sum(2 * each.kv_heads * each.head_dim for each in self.cached)


def shape_of(model: Artifact | Manifest) -> ModelShape:
    """Return the sizes of an artifact; of a manifest alone, without the sizes of its weights."""
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
        weights_bytes=size,
        read_bytes=size,
        precision=manifest.precision,
        dialect=manifest.dialect,
    )
