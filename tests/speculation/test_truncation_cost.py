"""What the levels of q̂ cost: acceptance, and bytes of a frame."""

from __future__ import annotations

import numpy as np

from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.theory import beta
from pilotfish.speculation.truncation import SparseRows, truncate
from pilotfish.wire.codecs import encode_sparse

VOCAB, TOP_K, ROWS = 49_152, 64, 8
PAPER_BYTES = TOP_K * (16 + 16) / 8  # FP16, and an index of ⌈log₂ V⌉ bits


def test_levels_cost_little_acceptance_and_few_bytes() -> None:
    """On pairs as sharp and as alike as those of language models, which agree on 0.84 and 0.93."""
    rng = np.random.default_rng(0)
    popularity = -1.2 * np.log(np.arange(VOCAB) + 300.0)
    lost, sizes = [], []
    for sharpness in (1.5, 2.0):
        for _ in range(3):
            rows = []
            for _ in range(ROWS):
                target = sharpness * (rng.normal(0.0, 2.5, VOCAB) + popularity)
                drafter = target + rng.normal(0.0, 0.2, VOCAB)
                p, q = (
                    probabilities(logits[None], Sampling(temperature=1.0))[0]
                    for logits in (target, drafter)
                )
                shipped = truncate(drafter, Sampling(temperature=1.0, top_k=TOP_K))
                rows.append(shipped)
                exact, q = q[shipped.ids] / q[shipped.ids].sum(), shipped.row(0).probabilities()
                lost.append(float(beta(p[shipped.ids], exact) - beta(p[shipped.ids], q)))
            sizes.append(len(encode_sparse(SparseRows.join(rows), VOCAB)) / ROWS)
    assert np.mean(lost) <= 0.002
    assert np.mean(sizes) <= 0.45 * PAPER_BYTES
