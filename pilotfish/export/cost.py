"""Measure the cost of an artifact's precision on a built-in text: KL(p ‖ q) and α.

At each position of the text, p is the next-token distribution from the source's weights in float32
(`export.reference`), and q the artifact's, both at temperature 1. KL is in nats per token. α = Σ
min(p, q) is the probability that a target with p accepts a draft from q.
"""

from __future__ import annotations

import logging
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.memory import reported_bytes
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.manifest import PrecisionCost
from pilotfish.engines.passes import Pass
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.parts_decoder import PartsDecoder
from pilotfish.export.reference import Reference, largest_layer
from pilotfish.export.sources import Progress, WeightSource

log = logging.getLogger("pilotfish.export")
ROWS = 32  # number of positions that are compared at a time
# The text on which source and artifact are compared: prose, a dialogue, code and numbers.
TEXT = (resources.files("pilotfish.export") / "texts" / "cost.txt").read_text("utf-8")
LONGEST = 512  # maximum number of tokens of the text, for vocabularies of bytes
MACHINE = Path("/")  # the folder that holds /proc
GIB = float(1 << 30)


def measure_cost(
    source: WeightSource, config: ModelConfig, path: Path, progress: Progress | None = None
) -> PrecisionCost | None:
    """Compare the artifact at `path` with its source; log a warning and return None on failure.

    Args:
        source: the artifact's source.
        config: the model's shape, with the artifact's context.
        path: the artifact's folder; temporary graphs without weights are written there.
        progress: called as progress(label, done, total).
    """
    artifact = Artifact.open(path)
    try:
        tokenizer = Tokenizer(artifact.tokenizer_path)
        ids = [*tokenizer.beginning, *tokenizer.encode(TEXT)][: min(config.context, LONGEST)]
        decoder = PartsDecoder(artifact, context=len(ids), provider="cpu")
        reason = _shortage(config, len(ids), decoder.part_bytes)
        if not reason:
            return _measure(source, config, decoder, np.array(ids, np.int64), progress)
    except Exception as error:  # runtimes raise many error classes
        reason = str(error).strip() or type(error).__name__
    log.warning("%s: the cost of the precision was not measured: %s", config.name, reason)
    return None


def _shortage(config: ModelConfig, tokens: int, part_bytes: int) -> str:
    """Describe a lack of memory; return "" if it is sufficient.

    The measurement needs memory for twice a layer in float32, and then for three times the logits
    of half of the text and twice a part of the artifact.
    """
    logits = 4 * (tokens // 2) * config.vocab_size
    needed = max(2 * largest_layer(config), 3 * logits + 2 * part_bytes)
    free = reported_bytes(MACHINE, "MemAvailable")
    if free is not None and free < needed:
        return (
            f"the measurement needs {needed / GIB:.1f} GiB of memory, but only "
            f"{free / GIB:.1f} GiB are free"
        )
    return ""


def _measure(
    source: WeightSource,
    config: ModelConfig,
    decoder: PartsDecoder,
    tokens: NDArray[np.int64],
    progress: Progress | None,
) -> PrecisionCost:
    artifact = decoder.artifact
    reference = Reference(source, config, artifact.path)
    halves = np.array_split(np.arange(len(tokens)), 2)
    total, finished = reference.parts + 2 * len(halves), 0

    def advance() -> None:
        nonlocal finished
        finished += 1
        if progress:
            progress("check", finished, total)

    states = reference.states(tokens, advance)
    width = config.head_tokens or artifact.manifest.vocab_size
    comparisons: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
    for half in halves:  # the second reads the first one's keys and values
        exact = reference.logits(states[half], width)
        advance()
        [out] = decoder.forward([Pass(0, tokens[half], len(half))])
        for first in range(0, len(half), ROWS):
            rows = slice(first, first + ROWS)
            comparisons.append(_compare(exact[rows], out.logits[rows]))
        del exact
        advance()
    divergence, acceptance = (np.concatenate(parts) for parts in zip(*comparisons, strict=True))
    if not np.isfinite(divergence).all():
        raise ExportError(
            "logits are NaN or infinite: the checkpoint is damaged, or its values are too large "
            "for this precision"
        )
    return PrecisionCost(
        kl=max(float(divergence.mean()), 0.0),
        acceptance=min(float(acceptance.mean()), 1.0),
        tokens=len(tokens),
    )


def _compare(
    exact: NDArray[np.float32], rounded: NDArray[np.float32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return KL(p ‖ q) in nats and Σ min(p, q), f64 [n] each, for logits [n, V]."""
    log_p, log_q = _log_probabilities(exact), _log_probabilities(rounded)
    p = np.exp(log_p)
    divergence: NDArray[np.float64] = (p * (log_p - log_q)).sum(axis=1, dtype=np.float64)
    return divergence, np.minimum(p, np.exp(log_q)).sum(axis=1, dtype=np.float64)


def _log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted: NDArray[np.float32] = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, dtype=np.float64, keepdims=True)
    shifted -= np.log(total).astype(np.float32)
    return shifted
