"""Run an edge's drafter on its own, and wait for its drafts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pilotfish.drafting.model import SharedModel
from pilotfish.edge_runtime.edge_drafter import EdgeDrafter, Trail
from pilotfish.engines.engine import Engine
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.protocols import SamplingParams

GREEDY = SamplingParams(sampling=Sampling(), seed=0)
SAMPLED = SamplingParams(sampling=Sampling(temperature=0.8), seed=5)
PROMPT = np.arange(1, 40, dtype=np.uint32)
FAR = 10_000


class Price:
    """What drafts cost; may be set at any time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def drafting(
    folder: Path,
    price: Price | None = None,
    slots: int = 4,
    ends: tuple[int, ...] = (),
    target_s: float = 0.0,
) -> Iterator[EdgeDrafter]:
    model = SharedModel(Engine(Decoder(folder, slots=slots, threads=1)))
    neighbour = EdgeDrafter(model, price or Price(), ends, target_s=lambda: target_s)
    neighbour.start()
    try:
        yield neighbour
    finally:
        neighbour.close()
        assert not neighbour.is_alive()


def is_read(trail: Trail) -> bool:
    """Whether the slot holds all of the text but its last token, and no draft is asked for."""
    return trail.read_hash == trail.draft_ahead.text.hash


def drafted(trail: Trail, count: int) -> list[int]:
    """Wait for so many drafts."""
    end_s = time.monotonic() + 30.0
    while len(ids := trail.propose(count).ids) < count:
        assert time.monotonic() < end_s
        time.sleep(0.0005)
    return list(ids)
