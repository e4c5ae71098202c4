"""A model in stages, run like a `Decoder`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from pilotfish.engines import backends
from pilotfish.engines.artifact import Artifact, open_stages
from pilotfish.engines.backends import Backend
from pilotfish.engines.onnx_decoder import Output, Pass
from pilotfish.engines.stage import Head, Stage
from pilotfish.export.dialects import DIALECTS
from pilotfish.export.split import split_artifact
from tests.support import cudart_double
from tests.support.runnable import runnable
from tests.support.thinned import thinned
from tests.support.tiny import FAMILIES, tiny_artifact

TEXT = np.random.default_rng(0).integers(0, 100, 60)
STANDARD = [name for name in runnable() if not DIALECTS[name].contrib]
_KINDS = [
    (dialect, precision, family)
    for dialect in DIALECTS
    if not DIALECTS[dialect].contrib
    for precision in DIALECTS[dialect].precisions
    for family in FAMILIES
]
# `make test` covers each family in each dialect, and each precision with tied and untied heads.
of_every_kind = pytest.mark.parametrize(
    ("dialect", "precision", "family"),
    thinned(_KINDS, [kind for kind in _KINDS if "fp32" in kind or kind[2] in ("llama", "qwen3")]),
)


class Staged:
    """Runs the stages in a folder in one process. `artifact` is the whole model's."""

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
            start, end = end, end + item.row_count
            answers.append(Output(logits[start:end], states[start:end]))
        assert end == len(states)
        return answers

    def check(self, passes: Sequence[Pass]) -> None:
        for stage in self.stages:
            stage.check(passes)

    def length(self, slot: int) -> int:
        lengths = {stage.length(slot) for stage in self.stages}
        assert len(lengths) == 1
        return lengths.pop()

    def rollback(self, slot: int, length: int) -> None:
        for stage in self.stages:
            stage.rollback(slot, length)

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        for stage in self.stages:
            stage.keep_path(slot, path)


@contextmanager
def providers(**kinds: type[Backend]) -> Iterator[None]:
    """Register backends of these names, over a double of CUDA, while a stage is opened."""
    with pytest.MonkeyPatch.context() as patch:
        cudart_double.install(patch, cudart_double.Gpu())
        for name, kind in kinds.items():
            patch.setitem(backends.PROVIDERS, name, f"{kind.__module__}:{kind.__name__}")
        patch.setattr(
            "pilotfish.engines.stage.PROVIDERS", dict.fromkeys(kinds, "CPUExecutionProvider")
        )
        yield


class Both(NamedTuple):
    """A whole model, and its stages in a folder."""

    whole: Artifact
    folder: Path


def both_in(folder: Path) -> Both:
    """Make a model of three layers with a padded vocabulary, and its three stages."""
    whole = tiny_artifact(folder / "whole", layers=3, vocab=100, padded_vocab=128, context=48)
    split_artifact(whole.path, folder / "stages", stages=3)
    return Both(whole, folder / "stages")
