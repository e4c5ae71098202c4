"""Export a GGUF file unchanged, so that llama.cpp runs it, for every architecture of llama.cpp.

In: "default" or a GGUF file. Out: an artifact with that file (a hard link if the file system
allows), its tokenizer and a manifest. Files with an unknown tokenizer, and models that cannot be
rolled back, are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.manifest import (
    GGUF_NAME,
    LLAMACPP,
    MOST_LAYERS,
    Dimensions,
    Source,
)
from pilotfish.export.atomic import link_or_copy, replacing
from pilotfish.export.chat_check import check_chat
from pilotfish.export.export_errors import ExportError
from pilotfish.export.manifest_writer import write_manifest
from pilotfish.export.source_names import DEFAULT, REQUIREMENT
from pilotfish.export.sources.default import fetch_default
from pilotfish.export.sources.fields import Fields
from pilotfish.export.sources.gguf import gguf_vocabulary
from pilotfish.export.sources.gguf_config import PRECISION_SUFFIX
from pilotfish.export.sources.gguf_file import GgufFile
from pilotfish.export.sources.gguf_kind import find_obstacle, read_architecture
from pilotfish.export.sources.hashing import hash_files
from pilotfish.export.sources.source import Progress, silent

EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
BLOCK = re.compile(r"blk\.(\d+)\.")
EXPERT = re.compile(r"\.ffn_\w+\.\d+\.")  # files written before 2024 have a tensor per expert


def copy_gguf(
    source: str,
    out: str | Path,
    *,
    ignored: Collection[str] = (),
    progress: Progress | None = None,
) -> Artifact:
    """Write an artifact of the dialect llamacpp to `out`, replacing an artifact there.

    ignored: "chat_template" omits the chat templates.

    Raises:
        ExportError: if the file is not a complete GGUF file, if a weight is NaN or infinite, or if
        the model, tokenizer or chat template is unusable.
    """
    report = progress or silent
    kind: Literal["default", "gguf"] = "default" if source == DEFAULT else "gguf"
    path = fetch_default(report) if kind == "default" else Path(source)
    if not path.is_file():
        raise ExportError(
            f"{source} is not a GGUF file: the dialect {LLAMACPP} accepts only GGUF files"
        )
    file = GgufFile(path)
    dimensions, architecture = _dimensions(file), str(file.metadata["general.architecture"])
    vocabulary = gguf_vocabulary(file, PRECISION_SUFFIX.sub("", path.stem), ignored)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)  # checked by `gguf_vocabulary`
    warnings = check_chat(vocabulary)
    with replacing(Path(out)) as directory:
        link_or_copy(path, directory / GGUF_NAME)
        # Hash the artifact's file, because the source's file may change at any time.
        [digest] = hash_files([directory / GGUF_NAME], report).values()
        GgufFile(directory / GGUF_NAME).check_numbers()
        write_manifest(
            directory,
            vocabulary,
            {GGUF_NAME: digest},
            source=Source(
                kind=kind,
                location=REQUIREMENT if kind == "default" else path.name,
                sha256={path.name: digest},
                ignored_keys=list(ignored),
            ),
            architecture=architecture,
            precision="gguf",
            dialect=LLAMACPP,
            opset=None,
            dimensions=dimensions,
            padded_vocab_size=len(tokens),
            kv_dtype="float32",
            warnings=warnings,
        )
    return Artifact.open(out)


def _dimensions(file: GgufFile) -> Dimensions:
    """Read the sizes that every architecture states; refuse unusable models.

    If an architecture states a number per layer, the largest number is used.
    """
    path, metadata, architecture = file.path, file.metadata, read_architecture(file)
    if obstacle := find_obstacle(architecture, metadata):
        raise ExportError(f"{path}: {obstacle}")
    prefix = f"{architecture}."
    settings = {key.removeprefix(prefix): _largest(value) for key, value in metadata.items()
           if key.startswith(prefix)}  # fmt: skip
    fields = Fields(settings, str(path), prefix)
    heads, hidden = fields.count("attention.head_count"), fields.count("embedding_length")
    layers = fields.count("block_count")
    if layers > MOST_LAYERS:
        raise fields.error(
            f"{prefix}block_count is {layers}, but at most {MOST_LAYERS} are supported"
        )
    dimensions = Dimensions(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=fields.count("attention.head_count_kv", heads),
        head_dim=fields.count("attention.key_length", max(hidden // heads, 1)),
        intermediate=fields.count("feed_forward_length", _expert_width(settings, hidden)),
        context=fields.count("context_length"),
    )
    _check_consistency(fields, file.tensors, layers)
    return dimensions


def _check_consistency(fields: Fields, tensors: Collection[str], layers: int) -> None:
    """Refuse files with contradictions that make llama.cpp abort the process."""
    for key in EPSILONS:
        if key in fields.values and not math.isfinite(fields.positive(key)):
            raise fields.error(f"{fields.prefix}{key} is not a number")
    numbers = {int(match[1]) for match in map(BLOCK.match, tensors) if match is not None}
    if numbers != set(range(layers)):
        raise fields.error(
            f"{fields.prefix}block_count is {layers}, but the file has tensors of "
            f"{len(numbers)} blocks"
        )
    experts = fields.get("expert_count", int, 0)
    if experts and not any("_exps." in name or EXPERT.search(name) for name in tensors):
        raise fields.error(f"{fields.prefix}expert_count is {experts}, but no tensor has experts")
    used = fields.get("expert_used_count", int, 0)
    if used > experts:
        raise fields.error(
            f"{fields.prefix}expert_used_count is {used}, but there are {experts} experts"
        )


def _largest(value: object) -> object:
    return max(value) if isinstance(value, list) and value else value


def _expert_width(settings: Mapping[str, object], hidden: int) -> int:
    """Return the inner width of an expert, for models with experts in every layer."""
    width = settings.get("expert_feed_forward_length", hidden)
    return width if isinstance(width, int) else hidden
