"""Decision heads for tests: random ones, or with given decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.edge_runtime.head_file import HeadCard, LinkScale, ModelIdentity, Training
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.manifest import Manifest
from pilotfish.speculation.channel import FEATURES
from pilotfish.wire import messages as m


def end_of(manifest: Manifest | ModelIdentity) -> ModelIdentity:
    if isinstance(manifest, ModelIdentity):
        return manifest
    return ModelIdentity(
        model=manifest.model,
        origin=manifest.origin,
        hidden=manifest.dimensions.hidden,
        precision=manifest.precision,
    )


def random_head(
    drafter: Manifest | ModelIdentity,
    target: Manifest | ModelIdentity,
    *,
    seed: int = 0,
    width: int = 8,
    **card: Any,
) -> DecisionHead:
    """Make a head for this pair that rejects about at random, but by its inputs alone."""
    random = np.random.default_rng(seed)
    ends = {"drafter": end_of(drafter), "target": end_of(target)}
    states = sum(end.hidden for end in ends.values())
    inputs = states + (0 if "link" in card and card["link"] is None else len(FEATURES))
    tensors = {
        "mean": np.zeros(states, np.float32),
        "std": np.ones(states, np.float32),
        "w1": (random.standard_normal((width, inputs)) / np.sqrt(states)).astype(np.float32),
        "b1": random.standard_normal(width).astype(np.float32),
        "w2": random.standard_normal(width).astype(np.float32),
        "b2": np.zeros(1, np.float32),
    }
    options = {
        "name": "random",
        **ends,
        "link": LinkScale(mean=[7.5, 7.5, 0.05, -1.5], std=[0.8, 0.8, 0.03, 0.6], clip=3.0),
        "threshold": 0.5,
        "training": Training(questions=0, examples=0, task="random", seed=seed),
    }
    return DecisionHead(HeadCard(**{**options, **card}), tensors)


def conditions_of(pair: tuple[Path, Path], **info: Any) -> m.DecisionConditions:
    """Make the conditions that a device with this pair's drafter sends with `begin`."""
    drafter = Artifact.open(pair[0]).manifest
    known = {"drafter": drafter.origin, "hidden_size": drafter.dimensions.hidden}
    return m.DecisionConditions(**{**known, **info})


def saved(head: DecisionHead, folder: Path) -> str:
    """Save a head; returns its path, for ``--head``."""
    return str(head.save(folder))
