"""Rotary scalings beside the formulas of their papers, written out pair by pair."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pilotfish.export.sources.fields import Fields
from pilotfish.export.sources.rotary import RopeBase, read_table

DIM = 16  # 8 pairs


def yarn(theta: float, original: int, factor: float, truncate: bool) -> list[float]:
    """YaRN's angles per position (arXiv 2309.00071 §3.2, with the bounds of its authors' code)."""

    def pair(turns: float) -> float:
        return DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(32.0), pair(1.0)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, DIM - 1)
    results = []
    for at in range(DIM // 2):
        slowed = min(max((at - low) / (high - low), 0.0), 1.0)
        angle = theta ** (-2 * at / DIM)
        results.append(slowed * angle / factor + (1 - slowed) * angle)
    return results


# Where `high` lies: below the last pair, beyond it (all pairs turn in the original context, so even
# the slowest is not slowed wholly), and beyond the bound of the authors' code.
BOUNDS = {"within": (1e4, 4096, 6.0), "beyond": (1e2, 4096, 12.0), "cut": (10.0, 4096, 15.0)}


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("bound", BOUNDS)
def test_yarn_slows_the_pairs_that_it_should(bound: str, truncate: bool) -> None:
    theta, original, high = BOUNDS[bound]
    exact = DIM * math.log(original / (2 * math.pi)) / (2 * math.log(theta))
    assert min(math.ceil(exact), DIM - 1) == high
    table: dict[str, Any] = {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original,
        "truncate": truncate,
    }  # fmt: skip
    rope = read_table(Fields(table, "a test"), RopeBase(theta, DIM, 4 * original, None))
    assert rope.frequencies == pytest.approx(yarn(theta, original, 4.0, truncate), rel=1e-12)
    assert rope.scale == pytest.approx(0.1 * math.log(4.0) + 1.0)
