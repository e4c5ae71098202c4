"""What a drafter is trained for, by families: transformers' own logits, and no chance in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pilotfish.lab.distill.answers import TrainingExample
from pilotfish.lab.distill.prompt_selection import DistillPrompt
from pilotfish.lab.distill.run_folder import RunFolder
from pilotfish.lab.distill.training_choices import TrainingChoices
from pilotfish.lab.distill.training_rows import NOWHERE, TrainingRow
from tests.reference.parity import TEXT, Library
from tests.support.small_checkpoints import VOCAB

pytestmark = pytest.mark.reference
ALL = np.arange(VOCAB)
IDS = [int(id) for id in TEXT[:40]]
ROW = TrainingRow(IDS, 1, list(range(39)), IDS[1:], [[]] * 39, [[]] * 39)
# heads with a scale, a divisor, a multiplier, a cap; a family with dropout, whose layers are "h"
FAMILIES = ("cohere", "granite", "falcon-h1", "gemma2", "gpt2")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_is_of_the_models_own_logits(library: Library, name: str) -> None:
    import torch

    from pilotfish.lab.distill.objective import Objective

    model = library.reference(name).loaded.model.train()
    objective = Objective(model, ALL, 1.0)
    losses = [objective.loss([ROW])[0].item() for _ in range(2)]
    with torch.no_grad():
        logits = model(torch.tensor([IDS]), use_cache=False).logits[0, :-1]
    wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(IDS[1:])).item()
    assert losses == pytest.approx([wanted] * 2, rel=1e-5)
    assert losses[0] == losses[1]
    [choices] = objective.choices([ROW])
    assert choices.tolist() == logits.argmax(1).tolist()


def test_only_shared_tokens_are_said_and_nothing_where_nothing_is_asked(library: Library) -> None:
    from pilotfish.lab.distill.objective import Objective

    shared = np.arange(3, 200, 4)
    row = TrainingRow(IDS, 1, [NOWHERE, 5, 6], [3, 7, 11], [[]] * 3, [[]] * 3)
    empty = TrainingRow(IDS[:4], 4, [], [], [], [])
    model = library.reference("gpt2").loaded.model
    first, second = Objective(model, shared, 1.0).choices([row, empty])
    assert first[0] == NOWHERE
    assert set(first[1:].tolist()) <= set(shared.tolist())
    assert len(second) == 0


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_frozen_layers_are_left_as_they_are(library: Library, tmp_path: Path, name: str) -> None:
    from pilotfish.lab.distill.objective import Objective
    from pilotfish.lab.distill.training import Trainer

    wanted = [DistillPrompt("kind", f"prompt {number}") for number in range(2)]
    lessons = [
        TrainingExample(item.key, item, held, [1], IDS[1:], "length", ROW)
        for item, held in zip(wanted, (True, False), strict=True)
    ]
    model = library.reference(name).loaded.model
    with RunFolder.open(tmp_path / "run") as folder:
        Trainer(Objective(model, ALL, 1.0), folder, lessons, TrainingChoices(frozen=1), seed=0)
    frozen = [name for name, item in model.named_parameters() if not item.requires_grad]
    assert frozen
    assert all(".0." in name for name in frozen)
