"""The options of training. This module does not import torch, so that `--help` is fast."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pilotfish.base.settings import setting


class TrainingChoices(msgspec.Struct, frozen=True, kw_only=True):
    """The options of training. The defaults suit models of a few hundred million weights."""

    rate: Annotated[float, setting("highest learning rate (of AdamW)", gt=0.0, le=1.0)] = 2e-4
    batch: Annotated[int, setting("number of answers per step", ge=1, le=1024)] = 4
    epochs: Annotated[float, setting("number of passes over all answers", gt=0.0, le=1000.0)] = 3.0
    minutes: Annotated[
        float | None,
        setting(
            "maximum time of the training; the training may then end before the last epoch "
            "(default: no limit)",
            gt=0.0,
            metavar="M",
        ),
    ] = None
    hard: Annotated[
        float,
        setting(
            "share λ of the loss on the target's token; the rest of the loss is on the "
            "target's likeliest tokens",
            ge=0.0,
            le=1.0,
        ),
    ] = 0.5
    frozen: Annotated[int, setting("number of first layers that are not trained", ge=0)] = 0
    decay: Annotated[float, setting("AdamW's weight decay", ge=0.0, le=1.0)] = 0.01
    every: Annotated[
        int, setting("number of steps between two evaluations on held-out prompts", ge=1)
    ] = 20
    patience: Annotated[
        int, setting("stop after this number of evaluations without an improvement; 0: never", ge=0)
    ] = 4
    checkpoint_s: Annotated[
        float, setting("seconds between two checkpoints", ge=0.0, flag="checkpoint-every")
    ] = 180.0
