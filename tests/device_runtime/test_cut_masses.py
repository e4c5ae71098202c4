"""Which rounds measure σ(K), the mass that truncation cuts off the drafter's distribution."""

from __future__ import annotations

from typing import Any

import pytest

from pilotfish import Device, Grammar


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({}, True),
        ({"grammar": Grammar("regex", "[0-9a-f ]{3,40}")}, False),
        ({"presence_penalty": 0.5}, False),
        ({"logit_bias": {7: 1.0}}, False),
    ],
    ids=["free text", "a grammar", "a penalty", "a bias"],
)
def test_rounds_with_changed_logits_tell_nothing_of_free_text(
    device: Device, changes: dict[str, Any], measured: bool
) -> None:
    """A grammar leaves few tokens, so K cuts off less than it does of free text.

    Of free text only some rounds measure: those that verified the position.
    """
    wish = {"protocol": "tslt", "temperature": 1.0, "max_tokens": 24, "seed": 1, **changes}
    answer = device.generate([3, 1, 4], **wish)
    rounds = [round_ for round_ in answer.rounds if round_.window]
    assert rounds
    assert any(round_.cut_masses for round_ in rounds) == measured
