"""At which positions of windows the cut masses are measured."""

from __future__ import annotations

import numpy as np
import pytest

from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, SamplingParams
from tests.support.flat_drafter import FlatDrafter

VOCAB = 4096
NO_TEXT = np.empty(0, np.uint32)


def drafted(drafter, protocol, expansion, temperature=1.0):
    params = SamplingParams(sampling=Sampling(temperature=temperature, top_k=64), seed=1)
    return drafter.draft(NO_TEXT, expansion, PROTOCOL_REGISTRY[protocol], params, ())


@pytest.mark.parametrize(
    ("protocol", "expansion"), [("tslt", (1,) * 4), ("tree", (2, 2, 1)), ("adaptive", (1,))]
)
def test_windows_measure_each_depth_in_turn_and_only_verified_positions_count(protocol, expansion):
    drafter = FlatDrafter(VOCAB)
    for at in range(3 * len(expansion)):
        draft = drafted(drafter, protocol, expansion)
        depth = at % len(expansion)
        # from the root down along first candidates, whose distribution each window measures
        path = [0]
        while len(path) < len(expansion):
            parents = np.arange(len(draft.ids)) if draft.parents is None else draft.parents + 1
            path.append(1 + int(np.flatnonzero(parents == path[-1])[0]))
        for accepted in range(len(expansion)):
            masses = drafter.verified_cut_masses(draft.path(path[accepted]))
            assert bool(masses) == (accepted >= depth), (at, accepted)


def test_at_temperature_0_and_in_empty_windows_nothing_is_measured():
    drafter = FlatDrafter(VOCAB)
    drafted(drafter, "tslt", (1, 1), temperature=0.0)
    assert drafter.verified_cut_masses(range(1, 3)) == ()
    drafted(drafter, "tslt", ())
    assert drafter.verified_cut_masses(()) == ()
