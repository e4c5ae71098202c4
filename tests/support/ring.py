"""A hand-made drafter of many tokens per pass, and its target: a random walk on a ring of tokens.

The target's next token is the last one plus about 1. A token is a point on circles; one step turns
it, and the logits are its similarity to each token's point. The drafter has a head of attention for
each depth: head i looks exactly i tokens back and turns what is there by i + 1 steps. At the text's
last token that is the target's own rule. At mask token number i the text's last token is i back, so
the prediction is the token i places later. The target has walked on meanwhile, so it agrees less
with later drafts.

`ring_pair(folder)` writes both artifacts in a fraction of a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact
from pilotfish.export.model import export_model
from pilotfish.export.model_config import Layer, ModelConfig
from pilotfish.export.parts import Rope
from tests.support.tiny import RandomSource, tiny_config

RING = 63  # tokens 0 … 62; the end token follows, then the mask token
VOCAB = RING + 1
MASK = VOCAB
PADDED_VOCAB = 72
CIRCLES = 8
CODE = 2 * CIRCLES
HEADS = 8  # one for each draft of a pass
HIDDEN = 64
CONSTANT, NORM, OUT = CODE, CODE + 1, 32  # dimensions of the residual stream
# Chosen so that no two distances up to 256 look alike to a head.
FREQUENCIES = (2.9, 2.33, 1.81, 1.37, 0.97, 0.61, 0.29, 0.11)
FOCUS = 12.0  # scale of the attention scores: all weight goes to one token
STEEPNESS = 0.6  # scale of the logits


def points(tokens: NDArray[np.integer[Any]], steps: float = 0.0) -> NDArray[np.float64]:
    """Return the codes f64 [n, CODE] of tokens [n], turned by a number of steps."""
    angles = 2 * np.pi / RING * np.multiply.outer(tokens + steps, np.arange(1, CIRCLES + 1))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def turn(steps: float) -> NDArray[np.float64]:
    """Return the matrix [CODE, CODE] that turns a code by a number of steps."""
    angles = 2 * np.pi / RING * steps * np.arange(1, CIRCLES + 1)
    cos, sin = np.diag(np.cos(angles)), np.diag(np.sin(angles))
    return np.block([[cos, -sin], [sin, cos]])


class RingSource(RandomSource):
    """The weights. fades: the weight of each head, f64 [HEADS]."""

    def __init__(self, config: ModelConfig, fades: NDArray[np.float64]) -> None:
        super().__init__(config, 0, vocab=VOCAB)
        self._fades = fades

    def tensor(self, name: str) -> NDArray[np.float32]:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return np.ones(shape, np.float32)
        part = name.split(".")[-2]
        weight = np.zeros(shape, np.float64)
        if part == "embed_tokens":
            weight[:RING, :CODE] = points(np.arange(RING))
            weight[:, CONSTANT] = 1.0
            weight[RING:, NORM] = CIRCLES**0.5  # all tokens have the same norm
        elif part in {"q_proj", "k_proj"}:
            for head in range(HEADS):
                angles = -np.array(FREQUENCIES) * (head if part == "q_proj" else 0)
                rows = np.concatenate([np.cos(angles), np.sin(angles)])
                weight[head * CODE : (head + 1) * CODE, CONSTANT] = FOCUS / HIDDEN**0.5 * rows
        elif part == "v_proj":
            for head in range(HEADS):
                turned = self._fades[head] * turn(head + 1)
                weight[head * CODE : (head + 1) * CODE, :CODE] = turned
        elif part == "o_proj":
            for head in range(HEADS):
                weight[OUT : OUT + CODE, head * CODE : (head + 1) * CODE] = np.eye(CODE)
        elif part == "lm_head":
            weight[:RING, OUT : OUT + CODE] = STEEPNESS * points(np.arange(RING))
            weight[RING:, OUT:] = 0.0
        return weight.astype(np.float32)


def ring_artifact(path: Path, fades: NDArray[np.float64], **changes: Any) -> Artifact:
    config = tiny_config(
        layers=1,
        hidden=HIDDEN,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=CODE,
        tied=False,
        vocab_size=PADDED_VOCAB,
        pattern=(Layer(Rope(FREQUENCIES)),),
        **changes,
    )
    return export_model(RingSource(config, fades), path)


def ring_pair(folder: Path) -> tuple[Path, Path]:
    """Write a drafter with a mask token and its target; return their folders."""
    alone = np.array([4.0, *[0.0] * (HEADS - 1)])
    ring_artifact(folder / "target", alone)
    # each mask sees the earlier tokens, too; a lower weight keeps them quiet
    ring_artifact(folder / "draft", 4.0 * 0.5 ** np.arange(HEADS), mask_token=MASK)
    return folder / "draft", folder / "target"
