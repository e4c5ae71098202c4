"""What can be exported, for `pilotfish export list --supported` and the table in docs/models.md."""

from __future__ import annotations

import msgspec

from pilotfish.export.architectures import ARCHITECTURES, Architecture
from pilotfish.export.dialects import DIALECTS
from pilotfish.export.dialects.opset17 import Opset17

# The version that tests/reference compares with.
TRANSFORMERS = "5.23"
TREES = "trees and chains"


class SupportedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One class of models.

    Attributes:
        model_type: as config.json says it.
        models: published ones of this class.
        dialects: dialect → its precisions.
        drafts: what it reads: token trees as well as chains, or chains alone.
        stages: a pipeline's stages can be cut of it, under a standard dialect; of a class whose
            layers may share keys and values, of its models in which none do.
        gguf: its GGUF files are read into graphs, too.
        hidden_states: it gives them, as every graph does.
        tested: against which version of transformers.
    """

    model_type: str
    models: str
    dialects: dict[str, list[str]]
    drafts: str
    stages: bool
    gguf: bool
    tested: str
    hidden_states: bool = True


def supported() -> list[SupportedModel]:
    """List all classes, in the order of the table of architectures."""
    return [
        SupportedModel(
            model_type=model_type,
            models=architecture.models,
            dialects=_dialects(architecture),
            drafts="chains" if architecture.states else TREES,
            stages=not architecture.states and not architecture.keys.get("num_kv_shared_layers"),
            gguf=architecture.gguf is not None,
            tested=f"transformers {TRANSFORMERS}",
        )
        for model_type, architecture in ARCHITECTURES.items()
    ]


def _dialects(architecture: Architecture) -> dict[str, list[str]]:
    """Return the dialects that can express this class, with their precisions."""
    loops = {"delta", "selective"} & set(architecture.states.values())
    return {
        name: list(dialect.precisions)
        for name, dialect in DIALECTS.items()
        if not (loops and dialect is Opset17)
    }
