"""Tell GGUF files of language models from other GGUF files.

In: an opened file. Out: the model's architecture, or an ExportError that says what the file is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.gguf_file import GgufFile

# Key prefixes of models with recurrent states (Mamba, RWKV, LFM2, hybrids).
STATES = ("ssm.", "wkv.", "shortconv.")
# `general.type`, or the architecture of older files → what the file is, and what to do.
OTHERS = {
    "adapter": "an adapter (LoRA), not a model: merge it into its model, as in "
    "`llama-export-lora -m MODEL.gguf --lora ADAPTER.gguf -o MERGED.gguf`",
    "mmproj": "the part of a multimodal model that reads images or sound (mmproj): give the GGUF "
    "file of its text model",
    "imatrix": "an importance matrix, which is data for quantisers: give the GGUF file of a model",
    "controlvector": "a control vector, not a model: give the GGUF file of a model",
}
OTHERS["clip"] = OTHERS["mmproj"]


def read_architecture(file: GgufFile) -> str:
    """Return the architecture of a whole language model.

    Raises:
        ExportError: if the file is something else, or one part of several.
    """
    path, metadata = file.path, file.metadata
    name = metadata.get("general.architecture")
    for kind in (metadata.get("general.type"), name):
        if isinstance(kind, str) and kind in OTHERS:
            raise ExportError(f"{path} is {OTHERS[kind]}")
    if metadata.get("split.count", 1) not in (0, 1):
        raise ExportError(
            f"{path} is one of several parts of a model: merge them, as in "
            "`llama-gguf-split --merge MODEL-00001-of-0000N.gguf MODEL.gguf`"
        )
    if not isinstance(name, str) or not name.isprintable():
        raise ExportError(f"{path} does not state general.architecture")
    return name


def find_obstacle(architecture: str, metadata: Mapping[str, Any]) -> str | None:
    """Return why llama.cpp cannot run a model as a drafter or a target; None if it can."""
    prefix = f"{architecture}."
    keys = {key.removeprefix(prefix) for key in metadata if key.startswith(prefix)}
    if any(key.startswith(STATES) for key in keys):
        return (
            f"{architecture} has recurrent states, which llama.cpp cannot roll back: choose a "
            "model with attention in all layers"
        )
    causal = metadata.get(f"{prefix}attention.causal")
    if causal is False or "decoder_start_token_id" in keys:
        return f"{architecture} does not generate a text token by token: choose a decoder"
    return None
