"""Figures by kind, and how a table shows them."""

from __future__ import annotations

import numpy as np
from rich.console import Console

from pilotfish.cli.distill import _table
from pilotfish.distill.answers import TrainingExample
from pilotfish.distill.measuring import ALL, agreement_by_kind
from pilotfish.distill.outcome import Distilled
from pilotfish.distill.prompt_selection import DistillPrompt
from pilotfish.distill.training_rows import TrainingRow, agreement


def answered(kind: str, number: int) -> TrainingExample:
    asked = DistillPrompt(kind, f"prompt {number}")
    row = TrainingRow([1, 2], 1, [0], [2], [[]], [[]])
    return TrainingExample(asked.key, asked, True, [1], [2], "length", row)


def test_a_kind_that_is_called_all_is_counted_once() -> None:
    answers = [answered(kind, number) for number, kind in enumerate([ALL, "chat", ALL])]
    found = agreement_by_kind(answers, {one.key: np.array([one.kind == ALL]) for one in answers})
    assert set(found) == {ALL, "chat"}
    assert found[ALL].positions == 3
    assert found[ALL].alpha == 2 / 3


def test_the_table_shows_a_kind_as_it_is_called() -> None:
    figures = {kind: agreement([np.array([True])]) for kind in ("[/b]", "[red]x", ALL)}
    found = Distilled(
        drafter="[/i]", target="t", artifact="a", learnt=1, held=2, tokens=3, left_out=0,
        kinds=["[/b]"], before=figures, after=figures, step=1, steps=1, curve=[],
    )  # fmt: skip
    console = Console(width=200)
    with console.capture() as shown:
        console.print(_table(found))
    for said in ("[/b]", "[red]x (not learnt)", "[/i] for t"):
        assert said in shown.get()
