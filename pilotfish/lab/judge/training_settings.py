"""Settings of ``pilotfish judge train``."""

from pathlib import Path
from typing import Annotated

import msgspec

from pilotfish.base.settings import setting
from pilotfish.lab.judge.instances import MinedSettings


class TrainingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options with which a head is trained. seed: seed of all draws."""

    width: Annotated[int, setting("width h of the hidden layer", ge=1, le=1024, metavar="H")] = 32
    dropout: Annotated[
        float,
        setting(
            "share of the hidden layer's outputs that dropout sets to 0", ge=0, le=1, metavar="P"
        ),
    ] = 0.1
    weight_decay: Annotated[float, setting("AdamW's weight decay", gt=0, metavar="W")] = 30.0
    learning_rate: Annotated[float, setting("AdamW's learning rate", gt=0, metavar="R")] = 1e-4
    batch: Annotated[
        int, setting("mismatches per training step, each under its K channels", ge=1)
    ] = 64
    epochs: Annotated[int, setting("maximum number of epochs", ge=1)] = 200
    patience: Annotated[
        int, setting("stop after this many epochs without a better validation loss", ge=1)
    ] = 12
    validation: Annotated[
        float,
        setting(
            "share of the questions that is held out for validation", ge=0, le=1, metavar="SHARE"
        ),
    ] = 0.2
    risk: Annotated[
        float,
        setting(
            "maximum share of harmful mismatches that the recommended threshold may forgive; see "
            "below",
            ge=0,
            le=1,
            metavar="SHARE",
        ),
    ] = 0.05
    seed: int = 0
    link: Annotated[
        bool, setting("ablation: train a head that does not read the channel", flag="no-link")
    ] = True
    tokens: Annotated[
        bool, setting("ablation: train a head that reads token ids instead of states")
    ] = False
    buckets: Annotated[
        int,
        setting("with --tokens: number of buckets to which token ids are hashed", ge=1, le=65536),
    ] = 512


class TrainSettings(MinedSettings, frozen=True, kw_only=True):
    """Options of ``pilotfish judge train``."""

    out: Annotated[
        Path, setting("output: path of the head's files, without a suffix", metavar="NAME")
    ]
    training: TrainingOptions = TrainingOptions()
