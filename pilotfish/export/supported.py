"""List the supported models, for `pilotfish export list --supported` and docs/models.md."""

from __future__ import annotations

import msgspec

from pilotfish.export.architectures import ARCHITECTURES, Architecture
from pilotfish.export.dialects import DIALECTS
from pilotfish.export.dialects.opset17 import Opset17
from pilotfish.export.dialects.tensorrt import TensorRT

# Version of transformers in tests/reference.
TRANSFORMERS = "5.23"
TREES = "trees and chains"


class SupportedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A class of models.

    Attributes:
        model_type: `model_type` in config.json.
        models: published models of this class.
        dialects: dialect → its precisions.
        drafts: supported drafts: token trees and chains, or chains only.
        stages: whether models can be cut into pipeline stages, in a standard dialect. If layers of
        the class can share keys and values, this is true only of models without such layers.
        gguf: whether the class's GGUF files can be exported as graphs.
        tested: version of transformers that the tests compare with.
        hidden_states: whether the graph returns hidden states; always true.
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
    """Return the dialects that support this class, with their precisions."""
    loops = {"delta", "selective"} & set(architecture.states.values())
    return {
        name: list(dialect.precisions)
        for name, dialect in DIALECTS.items()
        if not (loops and dialect is Opset17)
        if not (architecture.states and dialect is TensorRT)
    }
