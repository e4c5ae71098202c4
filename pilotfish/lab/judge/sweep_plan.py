"""Make the header of a sweep: which pair, heads and settings it is about.

In:  an opened pair, heads, a task, settings. Out: a `SweepHeader`, after a check that the heads are
     for this pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pilotfish.base.errors import PairMismatchError
from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.lab.judge.question_reader import model_card
from pilotfish.lab.judge.sweep_file import LinkProfile, SweepHeader, SweepSetting
from pilotfish.lab.judge.tasks import Task
from pilotfish.lab.pairs import OpenPair


def plan_sweep(
    opened: OpenPair,
    heads: Mapping[str, DecisionHead],
    task: Task,
    settings: Sequence[SweepSetting],
    *,
    most: int,
    whole: int,
    links: Sequence[LinkProfile] = (),
    sampling: dict[str, Any] | None = None,
) -> SweepHeader:
    """Return the header of a sweep; most, whole, links, sampling: see `SweepHeader`.

    heads: by name. Raises `PairMismatchError` for a head of another pair.
    """
    drafter, target = opened.drafter, opened.target
    for name, head in heads.items():
        head.check_target(target)
        if not head.supports(drafter.origin, drafter.dimensions.hidden):
            raise PairMismatchError(
                f"The decision head {name} was made for the drafter {head.card.drafter.model}, "
                f"not for {drafter.model}."
            )
    ends = (
        msgspec.to_builtins(model_card(model)) | {"vocabulary": model.vocab_size}
        for model in (drafter, target)
    )
    return SweepHeader(
        task=task.name,
        instruction=task.instruction,
        most=most,
        whole=whole,
        drafter=next(ends),
        target=next(ends),
        heads={
            name: {
                "sha256": head.card.sha256,
                "form": head.card.hidden,
                "recommended": head.card.threshold,
            }
            for name, head in heads.items()
        },
        settings=[*settings],
        links=[*links],
        sampling=sampling,
    )
