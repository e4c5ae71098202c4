"""Small random decision heads, and mismatches to judge."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.edge_runtime.head_file import (
    CurvePoint,
    HeadCard,
    LinkScale,
    ModelIdentity,
    Training,
)
from tests.engines.test_artifact import MANIFEST

D, T, H, BUCKETS = 6, 9, 5, 7  # widths: drafter, target, between the layers; of a one-hot
LINK = LinkScale(mean=[7.5, 8.0, 0.02, -1.7], std=[0.6, 0.5, 0.03, 0.4], clip=3.0)
Arrays = dict[str, NDArray[Any]]
Case = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]


def card(**change: Any) -> HeadCard:
    given_card = HeadCard(
        name="tiny",
        drafter=ModelIdentity(model="small", origin="0" * 16, hidden=D, precision="int4"),
        target=ModelIdentity(model="large", origin=MANIFEST.origin, hidden=T, precision="fp32"),
        link=LINK,
        threshold=0.4,
        curve=[
            CurvePoint(threshold=0, forgiven=0.0, accuracy=0.8, accepted_length=4.5),
            CurvePoint(threshold=0.4, logit=-0.4, forgiven=0.3),
        ],
        training=Training(questions=3, examples=20, task="gsm8k", seed=1, options={"kappa": 8.0}),
    )
    return msgspec.structs.replace(given_card, **change)


def weights(of: HeadCard, seed: int = 0, scale: float = 1.0, dtype: str = "f4") -> Arrays:
    """Make weights; states have the mean 2·N(0, 1) and deviations 0.2 to 3, times the scale."""
    random = np.random.default_rng(seed)
    states = of.drafter.hidden + of.target.hidden if of.features == "states" else 2 * BUCKETS
    results = {
        "w1": random.standard_normal((H, states + of.link_width)),
        "b1": random.standard_normal(H),
        "w2": random.standard_normal(H),
        "b2": random.standard_normal(1),
    }
    if of.features == "states":
        results["mean"] = 2 * scale * random.standard_normal(states)
        results["std"] = scale * random.uniform(0.2, 3.0, states)
    return {name: array.astype(dtype) for name, array in results.items()}


def head(seed: int = 0, dtype: str = "f4", **change: Any) -> DecisionHead:
    return DecisionHead(card(**change), weights(card(**change), seed, dtype=dtype))


def mismatches(count: int, seed: int = 0, scale: float = 1.0) -> Case:
    random = np.random.default_rng([seed, 1])
    return (
        (3 * scale * random.standard_normal((count, D))).astype(np.float32),
        (3 * scale * random.standard_normal((count, T))).astype(np.float32),
        random.integers(0, 150_000, (count, 2)),
    )
