"""Measure the cost of an artifact's precision on a built-in text: KL(p ‖ q) and α.

At each position of the text, p is the next-token distribution from the source's weights in float32
(`export.reference`), and q the artifact's, both at temperature 1. KL is in nats per token. α = Σ
min(p, q) is the probability that a target with p accepts a draft from q.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import Work, open_engine
from pilotfish.engines.manifest import PrecisionCost
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.reference import Reference, largest_part
from pilotfish.export.sources import Progress, WeightSource
from pilotfish.speculation.theory import beta

log = logging.getLogger("pilotfish.export")
ROWS = 32  # number of positions that are compared at a time
LONGEST = 512  # maximum number of tokens of the text, for vocabularies of bytes
MEMORY = Path("/proc/meminfo")
GIB = float(1 << 30)


def measure_cost(
    source: WeightSource, config: ModelConfig, path: Path, progress: Progress | None = None
) -> PrecisionCost | None:
    """Compare the artifact at `path` with its source; log a warning and return None on failure.

    Args:
        source: the artifact's source.
        config: the model's shape, with the artifact's context.
        path: the artifact's folder; temporary graphs, one per layer, are written there.
        progress: called as progress(label, done, total).
    """
    artifact = Artifact.open(path)
    reason = _shortage(artifact, config)
    if not reason:
        try:
            return _measure(source, config, artifact, progress)
        except Exception as error:  # runtimes raise many error classes
            reason = str(error).strip() or type(error).__name__
    log.warning("%s: the cost of the precision was not measured: %s", config.name, reason)
    return None


def _shortage(artifact: Artifact, config: ModelConfig) -> str:
    """Describe a lack of disk space or memory; return "" if both are sufficient.

    The measurement needs one layer's graph on disk, and memory for twice this graph plus twice the
    artifact.
    """
    part = largest_part(config)
    if shutil.disk_usage(artifact.path).free < part:
        return f"the measurement needs {part / GIB:.1f} GiB of free disk space"
    size = sum((artifact.path / name).stat().st_size for name in artifact.manifest.files)
    needed, free = 2 * part + 2 * size, _free_memory()
    if free is not None and free < needed:
        return (
            f"the measurement needs {needed / GIB:.1f} GiB of memory, but only "
            f"{free / GIB:.1f} GiB are free"
        )
    return ""


def _free_memory() -> int | None:
    """Return the available memory, bytes; None if the system does not report it."""
    try:
        lines = MEMORY.read_text().splitlines()
    except OSError:
        return None
    available = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(available[0]) * 1024 if available else None


def _measure(
    source: WeightSource, config: ModelConfig, artifact: Artifact, progress: Progress | None
) -> PrecisionCost:
    tokenizer = Tokenizer(artifact.tokenizer_path)
    ids = [*tokenizer.beginning, *tokenizer.encode(TEXT)][: min(config.context, LONGEST)]
    tokens = np.array(ids, np.int64)
    reference = Reference(source, config, artifact.path)
    chunks = range(0, len(tokens), ROWS)
    total, finished = reference.parts + len(chunks), 0

    def advance() -> None:
        nonlocal finished
        finished += 1
        if progress:
            progress("check", finished, total)

    states = reference.states(tokens, advance)
    comparisons: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
    engine = open_engine(artifact, context=len(tokens), provider="cpu", drafts=True)
    with reference.head(states) as head:
        for start in chunks:
            end = min(start + ROWS, len(tokens))
            [out] = engine.run([Work(0, tokens[:end], end - start)])
            exact = head(start, end)[:, : out.logits.shape[1]]
            comparisons.append(_compare(exact, out.logits))
            advance()
    divergence, acceptance = (np.concatenate(parts) for parts in zip(*comparisons, strict=True))
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
    divergence: NDArray[np.float64] = (p * (log_p - log_q)).sum(axis=1)
    return divergence, beta(p, np.exp(log_q))


def _log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


# The text on which source and artifact are compared: prose, a dialogue, code and numbers.
TEXT = '''\
The harbour had been quiet since the ferries stopped running, and the old lamp at the end of the \
pier was only lit on Sundays. Anna walked out to it all the same, most evenings, with the dog \
ahead of her and the wind behind. She liked to count the boats. There were eleven in spring, nine \
in June, and by the end of the summer, when the nets were hung up to dry along the wall, only six \
of them went out at all.

"You could sell yours," her brother said. "Before it is worth nothing."

"It is worth nothing now," she answered, "so there is no hurry."

Water boils at 100 degrees Celsius at sea level, but at lower temperatures in the mountains, \
because the pressure of the air falls as one climbs: by about one degree for every 300 metres. \
That is why potatoes take longer to cook in La Paz than in Lisbon.

def median(values):
    """Return the middle one of some numbers, or the mean of the two in the middle."""
    if not values:
        raise ValueError("there is no median of nothing")
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2

The function first sorts the list, which takes most of the time, and then looks at its length. If \
the number of values is odd, the one in the middle is the answer. For example, the median of 3, 1 \
and 2 is 2, while the median of 4, 1, 3 and 2 is 2.5.

To install the program, unpack the archive, open a terminal in the new folder, and run the setup \
script. It asks for two things: where the files should go, and whether it may start with the \
computer. Both can be changed later in the settings.
'''
