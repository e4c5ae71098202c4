"""Synthetic episodes of mismatches with labels that can be learnt from states or tokens."""

from __future__ import annotations

import numpy as np

from pilotfish.lab.judge.episodes import Episode, MiningRecord

D, T = 24, 40  # widths: drafter, target
MINED = MiningRecord(
    task="exact",
    instruction="",
    most=1000,
    slack=4,
    right_only=False,
    drafter={"model": "small", "origin": "0" * 16, "precision": "int4", "hidden": D},
    target={"model": "large", "origin": "1" * 16, "precision": "fp32", "hidden": T},
)


def episode(
    key: int, count: int = 20, noise: float = 0.5, width: int = D, stalling: float = 0.0
) -> Episode:
    """Make an episode. A third of the mismatches is critical: states on one side of a fixed plane.

    Drafted tokens of critical mismatches are odd. The share ``stalling`` of these is labelled as
    stalling instead.
    """
    random, shared = np.random.default_rng([7, key]), np.random.default_rng(1)
    drafter = random.standard_normal((count, width)).astype(np.float32)
    target = random.standard_normal((count, T)).astype(np.float32)
    planes = [shared.standard_normal(side) / side**0.5 for side in (width, T)]
    score = drafter @ planes[0] + target @ planes[1] + noise * random.standard_normal(count)
    critical = score > 0.6
    tokens = 2 * random.integers(0, 20, (count, 2))
    tokens[:, 0] += critical
    stalls = critical & (random.random(count) < stalling)
    return Episode(
        key=f"q-{key}",
        at=np.cumsum(random.integers(1, 9, count)),
        tokens=tokens,
        drafter=3 * drafter + 1,
        target=5 * target,
        critical=critical & ~stalls,
        stalling=stalls,
        answer=[3, 4, 5],
        outcome="5",
        right=True,
    )


def episodes(count: int, **settings: float) -> list[Episode]:
    return [episode(key, **settings) for key in range(count)]
