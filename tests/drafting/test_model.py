"""The model of all drafters: what a slot lacks of a text, and the work that reads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pilotfish.drafting.model import SharedModel
from pilotfish.engines.engine import Work
from pilotfish.engines.language_model import Output
from tests.support.pass_counter import PassCounter
from tests.support.tiny import tiny_artifact

VOCAB = 64
TEXT = np.arange(1, 51, dtype=np.uint32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SharedModel:
    path: Path = tmp_path_factory.mktemp("model") / "a"
    artifact = tiny_artifact(path, vocab=VOCAB, seed=5)
    return SharedModel.open(artifact.path, slots=3, provider="cpu", threads=1, context=None)


def rows(outputs: list[Output]) -> list[np.ndarray]:
    return [output.logits.copy() for output in outputs]


def alone(model: SharedModel, text: np.ndarray) -> np.ndarray:
    model.clear(2)
    return model.run([Work(2, text)], rows)[0]


@pytest.mark.parametrize("chunk", [1, 7, 25, 50, 51, None])
def test_a_text_is_read_in_chunks_to_its_prediction(model: SharedModel, chunk: int | None) -> None:
    model.clear(0)
    wanted, lacking = alone(model, TEXT), len(TEXT)
    counter = PassCounter(model.engine.model)
    while True:
        unread, work = model.next_work(0, TEXT, chunk)
        assert unread == lacking
        size = min(unread, chunk or unread)
        assert work.rows == (size == unread)
        (logits,) = model.run([work], rows)
        assert counter.take() == size
        lacking -= size
        if not lacking:
            break
    np.testing.assert_allclose(logits, wanted, atol=1e-4)
    assert work.tokens is TEXT  # so that the engine compares it with the slot only once
    unread, _ = model.next_work(0, TEXT, chunk)
    assert unread == 1  # the prediction itself is not kept


def test_without_a_prediction_all_but_the_last_token_is_read(model: SharedModel) -> None:
    model.clear(0)
    sizes = []
    while (pair := model.next_work(0, TEXT, 20, predicts=False))[0] > 0:
        assert not pair[1].rows
        sizes.append(pair[0])
        model.run([pair[1]], rows)
    assert sizes == [49, 29, 9]
    assert model.engine.contents.length(0) == 49


def test_a_text_that_parts_from_the_slot_lacks_what_follows_the_parting(model: SharedModel) -> None:
    model.clear(0)
    model.run([model.next_work(0, TEXT)[1]], rows)
    other = TEXT.copy()
    other[30] = 0
    unread, work = model.next_work(0, other)
    assert unread == 20
    (logits,) = model.run([work], rows)
    np.testing.assert_allclose(logits, alone(model, other), atol=1e-4)


def test_the_works_of_several_slots_are_one_pass(model: SharedModel) -> None:
    texts = [TEXT[:30], TEXT[5:45]]
    passes = []
    for slot, text in enumerate(texts):
        model.clear(slot)
        model.run([model.next_work(slot, text, predicts=False)[1]], rows)
    pairs = [model.next_work(slot, text) for slot, text in enumerate(texts)]
    assert [unread for unread, _ in pairs] == [1, 1]
    outputs = model.run([work for _, work in pairs], rows, lambda: passes.append(1))
    assert len(passes) == 1
    for text, logits in zip(texts, outputs, strict=True):
        np.testing.assert_allclose(logits, alone(model, text), atol=1e-4)
