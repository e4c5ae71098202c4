"""A model in stages, run like a `Decoder`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engines.artifact import Artifact, open_stages
from engines.decoder import Output, Pass
from engines.stage import Head, Stage


class Staged:
    """Stages in this folder, in one process. `artifact` is the whole model's."""

    def __init__(self, folder: Path, artifact: Artifact, **options: Any) -> None:
        self.artifact = artifact
        self.stages = [Stage(stage, **options) for stage in open_stages(folder)]
        self.head = Head(self.stages[0].artifact, provider=options.get("provider", "auto"))
        self.slots = self.stages[0].slots
        self.context = self.stages[0].context
        self.vocab_size = self.head.vocab_size

    def forward(self, passes: Sequence[Pass]) -> list[Output]:
        states = None
        for stage in self.stages:
            states = stage.forward(passes, states)
        assert states is not None
        logits, answers, end = self.head.logits(states), [], 0
        for item in passes:
            start, end = end, end + item.wanted
            answers.append(Output(logits[start:end], states[start:end]))
        assert end == len(states)
        return answers

    def prefill(self, slot: int, tokens: Any, *, rows: int = 1) -> Output:
        return self.forward([Pass(slot, np.asarray(tokens, np.int64), rows)])[0]

    def length(self, slot: int) -> int:
        lengths = {stage.length(slot) for stage in self.stages}
        assert len(lengths) == 1
        return lengths.pop()

    def rollback(self, slot: int, length: int) -> None:
        for stage in self.stages:
            stage.rollback(slot, length)

    def keep(self, slot: int, path: Sequence[int]) -> None:
        for stage in self.stages:
            stage.keep(slot, path)
