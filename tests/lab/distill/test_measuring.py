"""Figures by kind, and how a table shows them."""

from __future__ import annotations

import numpy as np
from rich.console import Console

from pilotfish.cli.distill import _table
from pilotfish.lab.distill.answers import TrainingExample
from pilotfish.lab.distill.measuring import ALL, agreement_by_kind
from pilotfish.lab.distill.outcome import Distilled
from pilotfish.lab.distill.prompt_selection import DistillPrompt
from pilotfish.lab.distill.training_rows import TrainingRow, agreement


def answered(kind: str, number: int) -> TrainingExample:
    distill_prompt = DistillPrompt(kind, f"prompt {number}")
    row = TrainingRow([1, 2], 1, [0], [2], [[]], [[]])
    return TrainingExample(distill_prompt.key, distill_prompt, True, [1], [2], "length", row)


def test_a_kind_that_is_called_all_is_counted_once() -> None:
    answers = [answered(kind, number) for number, kind in enumerate([ALL, "chat", ALL])]
    result = agreement_by_kind(
        answers, {answer.key: np.array([answer.kind == ALL]) for answer in answers}
    )
    assert set(result) == {ALL, "chat"}
    assert result[ALL].positions == 3
    assert result[ALL].alpha == 2 / 3


def test_the_table_shows_a_kind_as_it_is_called() -> None:
    figures = {kind: agreement([np.array([True])]) for kind in ("[/b]", "[red]x", ALL)}
    distilled = Distilled(
        drafter="[/i]", target="t", artifact="a", learnt=1, held=2, tokens=3, left_out=0,
        kinds=["[/b]"], before=figures, after=figures, step=1, steps=1, curve=[],
    )  # fmt: skip
    console = Console(width=200)
    with console.capture() as display:
        console.print(_table(distilled))
    for name in ("[/b]", "[red]x (not learnt)", "[/i] for t"):
        assert name in display.get()
