"""Export a model: read a source, write an artifact directory.

The directory is written atomically: files are written to a temporary directory next to it, which is
synced and renamed. Weights are processed one at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact, file_sha256
from pilotfish.engines.engine_errors import ProviderError
from pilotfish.engines.manifest import (
    GENAI,
    GRAPH_NAME,
    HEAD_TOKENS_NAME,
    HEADS,
    LLAMACPP,
    MANIFEST_NAME,
    STORED,
    CachedLayer,
    Dimensions,
    Precision,
    RecurrentStates,
)
from pilotfish.engines.runtime import runtime_version
from pilotfish.engines.states import WINDOW
from pilotfish.export.atomic import replacing
from pilotfish.export.calibration import Calibration
from pilotfish.export.chat_check import check_chat
from pilotfish.export.checked_weights import CheckedWeights
from pilotfish.export.cost import measure_cost
from pilotfish.export.dialects import Dialect, choose_dialect
from pilotfish.export.error_compensation import BITS
from pilotfish.export.export_errors import ExportError
from pilotfish.export.genai_copy import copy_genai
from pilotfish.export.gguf_copy import copy_gguf
from pilotfish.export.graph import GraphWriter
from pilotfish.export.manifest_writer import write_manifest
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.network import write_network
from pilotfish.export.sources import Progress, WeightSource, open_source
from pilotfish.export.sources.cut_head import CutHead
from pilotfish.export.sources.huggingface_tokenizer import IGNORABLE
from pilotfish.export.sources.layer_selection import keep_first_layers, leave_out_layers

log = logging.getLogger("pilotfish.export")
DATA_NAME = "model.onnx.data"
MOST_POSITIONS = 2**22  # maximum context (positions): with it, rotary tables of 64 pairs take 2 GB
NEWEST_RUNTIME = (1, 31)  # version of ONNX Runtime to assume if none is installed
# Dialects that copy their source → name of the source in errors, and function that copies the
# source.
COPIED = {LLAMACPP: ("a GGUF file", copy_gguf), GENAI: ("a folder", copy_genai)}


def export_model(
    source: str | WeightSource,
    out: str | Path,
    *,
    precision: Precision = "fp32",
    dialect: str = "auto",
    first_layers: int | None = None,
    skipped_layers: Collection[int] = (),
    context: int | None = None,
    head_tokens: NDArray[np.int64] | None = None,
    ignore_keys: Collection[str] = (),
    check: bool = False,
    progress: Progress | None = None,
) -> Artifact:
    """Write the artifact of `source` to the directory `out`, replacing an artifact there.

    Args:
        source: "default", a GGUF file, a Hugging Face directory or hub id, or an opened source.
        precision: precision of the weights; "stored" keeps the source's quantised blocks.
        dialect: "opset24", "opset17", "contrib", "tensorrt", or "auto", which chooses by precision
        and installed runtime. "llamacpp" copies a GGUF file, "genai" a folder of ONNX Runtime
        GenAI's model builder; both require the default `precision`.
        first_layers: number of first layers to keep; the final norm and the head are kept, too.
        skipped_layers: indices of layers to leave out; cannot be combined with `first_layers`.
        context: number of positions, which determines the size of the rotary tables; None = the
        model's, or with longrope the context of the short factors.
        head_tokens: i64 [N], ascending, the tokens that the head can predict (see
        `export.head_tokens`); None = all. The model still reads any token. The artifact can only
        draft.
        ignore_keys: unknown keys of the configuration to ignore; the manifest lists them.
            "chat_template" omits the chat templates. No effect if `source` is an opened source.
        check: measure the cost of the precision (`export.cost`) and write it into the manifest,
            unless the precision is fp32. This loads and runs the artifact.
        progress: called as progress(label, done, total).

    Raises:
        ExportError: if the source cannot be read, has an unsupported or unknown setting, or has no
        more than `first_layers` layers; if its configuration and weights contradict each other; if
        a weight is no finite number or too large for the precision; if its chat template does not
        compile or writes an unknown token; or if `out` contains something other than an artifact.
    """
    if dialect in COPIED:
        changes = (first_layers, context, head_tokens)
        plain = precision == "fp32" and not skipped_layers and all(each is None for each in changes)
        return _copy(source, out, dialect, ignore_keys, progress, plain=plain)
    kind = choose_dialect(dialect, precision, _runtime())
    weights = _open_weights(source, ignore_keys, progress)
    weights = select_weights(weights, first_layers, skipped_layers, head_tokens)
    config = _with_context(weights.config, context)
    if precision == STORED:
        _require_blocks(config.name, weights.blocks())
    warnings = check_chat(weights.vocabulary)
    with replacing(Path(out)) as directory:
        digests, calibrated = _write_graph(weights, config, directory, precision, kind, progress)
        if head_tokens is not None:
            digests[HEAD_TOKENS_NAME] = _write_tokens(directory / HEAD_TOKENS_NAME, head_tokens)
        manifest = write_manifest(
            directory,
            weights.vocabulary,
            digests,
            source=weights.description,
            precision=precision,
            head=HEADS.get(precision),
            dialect=kind.name,
            opset=kind.opset,
            kv_dtype="float16" if precision == "fp16" else "float32",
            warnings=warnings,
            calibrated_matrices=calibrated,
            **_described(config),
        )
        if check and precision != "fp32":
            cost = measure_cost(weights, config, directory, progress)
            manifest = msgspec.structs.replace(manifest, cost=cost)
            (directory / MANIFEST_NAME).write_bytes(manifest.encode())
    return Artifact.open(out)


def check_form(
    name: str,
    blocks: Collection[str],
    *,
    dialect: str,
    precision: Precision,
    context: int | None,
    longest: int,
) -> None:
    """Raise the `ExportError` that an export in this form would raise, before any weight is read.

    Args:
        name: the model's name.
        blocks: types of its quantised blocks.
        longest: its largest context, positions.
    """
    choose_dialect(dialect, precision, _runtime())
    if context is not None:
        _require_positions(name, longest, context)
    if precision == STORED:
        _require_blocks(name, blocks)


def _require_positions(name: str, longest: int, wanted: int) -> None:
    if wanted > longest:
        raise ExportError(f"{name} has {longest} positions, not {wanted}")
    if wanted > MOST_POSITIONS:
        raise ExportError(
            f"{name} has {wanted} positions, but the tables of an artifact can have at "
            f"most {MOST_POSITIONS}: choose a smaller context, such as --context 131072"
        )


def _require_blocks(name: str, blocks: Collection[str]) -> None:
    if not blocks:
        raise ExportError(
            f"{name} stores its weights as floats, so there are no blocks to keep: choose "
            "--precision fp32, fp16, int8 or int4"
        )


def _copy(
    source: str | WeightSource,
    out: str | Path,
    dialect: str,
    ignore_keys: Collection[str],
    progress: Progress | None,
    *,
    plain: bool,
) -> Artifact:
    """Write a copy of the source; plain: whether no option would change the model."""
    form, copy = COPIED[dialect]
    if not isinstance(source, str) or not plain or set(ignore_keys) - IGNORABLE:
        raise ExportError(
            f"the dialect {dialect} copies {form} unchanged: omit --precision, --first-layers, "
            "--skip-layers, --context, --keep-tokens, and --ignore-key except for keys of the "
            "tokenizer: " + ", ".join(sorted(IGNORABLE))
        )
    return copy(source, out, ignored=ignore_keys, progress=progress)


def _open_weights(
    source: str | WeightSource, ignore_keys: Collection[str], progress: Progress | None
) -> WeightSource:
    """Open a source that is not open yet, and log the ignored keys of its configuration."""
    if not isinstance(source, str):
        return source
    weights = open_source(source, progress, ignore_keys)
    for key in ignore_keys:
        log.warning("%s: the key %s is ignored by --ignore-key", weights.config.name, key)
    return weights


def select_weights(
    weights: WeightSource,
    first_layers: int | None,
    skipped_layers: Collection[int],
    head_tokens: NDArray[np.int64] | None,
) -> WeightSource:
    """Leave out the layers, and the rows of the head, that are not wanted."""
    if first_layers is not None and skipped_layers:
        raise ExportError("first_layers and skipped_layers cannot be combined: choose one of them")
    if first_layers is not None:
        weights = keep_first_layers(weights, first_layers)
    elif skipped_layers:
        weights = leave_out_layers(weights, skipped_layers)
    return weights if head_tokens is None else CutHead(weights, head_tokens)


def _with_context(config: ModelConfig, context: int | None) -> ModelConfig:
    """Return the configuration with `context` positions, or the default number."""
    wanted = context or config.short_context or config.context
    _require_positions(config.name, config.context, wanted)
    if context is None and wanted < config.context:
        log.warning(
            "%s: exported for the %d positions of its short rotary factors; --context %d would "
            "use the long factors at all positions",
            config.name,
            wanted,
            config.context,
        )
    return msgspec.structs.replace(config, context=wanted)


def _write_graph(
    source: WeightSource,
    config: ModelConfig,
    directory: Path,
    precision: Precision,
    kind: type[Dialect],
    progress: Progress | None,
) -> tuple[dict[str, str], int | None]:
    """Write graph and weights.

    Return file name → SHA-256, and the number of calibrated matrices, None if there are none.
    """
    calibration = None
    with (directory / DATA_NAME).open("wb") as data:
        graph = GraphWriter(data, DATA_NAME)
        net = kind(graph, config, CheckedWeights(source, precision, progress), precision)
        if net.forms.bits == BITS:
            calibration = Calibration(source, config, source.vocabulary, directory, progress)
            net.forms.round_matrix = calibration.round
        write_network(net, config)
        graph.save(directory / GRAPH_NAME, opset=kind.opset)
    digests = {
        GRAPH_NAME: file_sha256(directory / GRAPH_NAME),
        DATA_NAME: graph.data_sha256,
    }
    return digests, calibration.matrices or None if calibration else None


def _described(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of the manifest that follow from the configuration."""
    return {
        "architecture": config.model_type,
        "dimensions": msgspec.convert(config, Dimensions, from_attributes=True),
        "padded_vocab_size": config.vocab_size,
        "window": config.window,
        "states": _states(config),
        "caches": _caches(config),
        "head_tokens": config.head_tokens,
        "mask_token": config.mask_token,
        "drafts_per_pass": config.drafts_per_pass,
    }


def _write_tokens(path: Path, tokens: NDArray[np.int64]) -> str:
    """Write the token id of each row of the head, <u4 [N]; return the file's SHA-256."""
    path.write_bytes(tokens.astype("<u4").tobytes())
    return file_sha256(path)


def _states(config: ModelConfig) -> RecurrentStates | None:
    """Describe the layers' recurrent states for the manifest; None if there are none."""
    recurrence, layers = config.recurrence, config.recurrent
    if not layers and not all(config.layer(i).has_mixer for i in range(config.layers)):
        raise ExportError(
            f"{config.name} has layers with only a feed-forward part, but no layer with a "
            "state, which is not supported: keep more layers, so that one has a state"
        )
    if recurrence is None or not layers:
        return None
    return RecurrentStates(
        layers=layers,
        taps=recurrence.taps,
        width=recurrence.width if recurrence.heads else config.hidden,
        heads=recurrence.heads,
        key_dim=recurrence.key_dim,
        value_dim=recurrence.value_dim,
        window=WINDOW,
    )


def _caches(config: ModelConfig) -> list[CachedLayer] | None:
    """List the layers that store keys and values; None if the dimensions imply the list."""
    if config.plain:
        return None
    return [
        CachedLayer(layer=i, kv_heads=heads.keys, head_dim=heads.dim)
        for i, heads in ((i, config.heads_of(i)) for i in config.cached)
    ]


def _runtime() -> tuple[int, ...]:
    """Return the version of the installed ONNX Runtime, for the dialect "auto"."""
    try:
        return runtime_version()
    except ProviderError:
        return NEWEST_RUNTIME
