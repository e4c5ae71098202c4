"""A drafter with a mask token: many tokens of a chain from one pass, and what the masks leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.engines.passes import Pass
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.logits_options import LogitsOptions, LogitsProcessor
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, SamplingParams, truncated
from tests.support.pass_counter import PassCounter
from tests.support.tiny import tiny_artifact

VOCAB, MASK, CONTEXT = 64, 64, 48  # the mask is a padding row of the embedding
COMMITTED = np.array([3, 1, 4, 1, 5, 9], dtype=np.uint32)
COLD = SamplingParams(sampling=Sampling(), seed=1)
WARM = SamplingParams(sampling=Sampling(temperature=1.5), seed=1)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    path = tmp_path_factory.mktemp("masked") / "a"
    sizes: dict[str, Any] = {"vocab": VOCAB, "padded_vocab": VOCAB + 8, "context": CONTEXT}
    return Artifact.open(tiny_artifact(path, seed=5, mask_token=MASK, **sizes).path)


def fresh(artifact: Artifact) -> ModelDrafter:
    return ModelDrafter.open(artifact, provider="cpu", threads=1, context=None)


def counter_of(drafter: ModelDrafter) -> PassCounter:
    return PassCounter(drafter._shared_model.engine.model)


def rows_after(artifact: Artifact, text: np.ndarray, count: int) -> np.ndarray:
    """The predictions of the next tokens, by one pass over text and masks."""
    tokens = np.concatenate([text.astype(np.int64), np.full(count - 1, MASK)])
    return Decoder(artifact.path, threads=1).forward([Pass(0, tokens, count)])[0].logits.copy()


def window(drafter: ModelDrafter, length: int, params: SamplingParams = COLD, **more: Any) -> Any:
    exchange = PROTOCOL_REGISTRY["dsd" if params is WARM else "greedy"]
    return drafter.draft(COMMITTED, (1,) * length, exchange, params, ends=(), **more)


@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_a_window_is_one_pass_over_text_and_masks(artifact: Artifact, length: int) -> None:
    drafter = fresh(artifact)
    assert drafter.drafts_per_pass == 8
    counter = counter_of(drafter)
    draft = window(drafter, length)
    assert counter.counts == [len(COMMITTED) + length - 1]
    wanted = rows_after(artifact, COMMITTED, length)
    assert draft.ids.tolist() == wanted.argmax(axis=1).tolist()


def test_a_longer_window_reads_its_drafts_in_the_next_pass(artifact: Artifact) -> None:
    drafter = fresh(artifact)
    counter = counter_of(drafter)
    draft = window(drafter, 12)
    assert counter.counts == [len(COMMITTED) + 7, 8 + 3]
    text = np.concatenate([COMMITTED, draft.ids[:8]])
    wanted = rows_after(artifact, text, 4).argmax(axis=1).tolist()
    assert draft.ids[8:].tolist() == wanted


def test_q_of_each_draft_is_its_rows(artifact: Artifact) -> None:
    draft = window(fresh(artifact), 5, WARM)
    scores = rows_after(artifact, COMMITTED, 5).astype(np.float64) / 1.5
    q = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    sent = [draft.row(at).weights for at in range(5)]
    np.testing.assert_allclose(sent, q, rtol=1e-3, atol=1e-4)  # rounded to fp16


@pytest.mark.parametrize("accepted", [0, 1, 3, 5])
def test_masks_are_never_part_of_the_text(artifact: Artifact, accepted: int) -> None:
    """After every verdict the next logits are those of the committed text alone."""
    drafter = fresh(artifact)
    draft = window(drafter, 5)
    text = np.concatenate([COMMITTED, draft.ids[:accepted], [7]]).astype(np.uint32)
    counter = counter_of(drafter)
    logits = drafter.logits(text).copy()
    assert counter.take() == accepted + 1  # what was read before the masks is not read again
    np.testing.assert_allclose(logits, fresh(artifact).logits(text), atol=1e-4)


def test_a_mask_token_in_the_text_is_a_token_like_any_other(tmp_path: Any) -> None:
    path = tiny_artifact(tmp_path / "a", vocab=VOCAB, seed=5, mask_token=MASK - 4).path
    artifact = Artifact.open(path)
    drafter = fresh(artifact)
    window(drafter, 8)
    text = np.concatenate([COMMITTED, [MASK - 4, MASK - 4, 2]]).astype(np.uint32)
    logits = drafter.logits(text).copy()
    np.testing.assert_allclose(logits, fresh(artifact).logits(text), atol=1e-4)


@pytest.mark.parametrize("room", [1, 2, 5, 9])
def test_masks_stay_within_the_context(artifact: Artifact, room: int) -> None:
    drafter = fresh(artifact)
    text = np.resize(COMMITTED, CONTEXT - room)
    draft = drafter.draft(text, (1,) * 12, PROTOCOL_REGISTRY["greedy"], COLD, ends=())
    assert len(draft.ids) == room
    level = drafter.predict_next(text, np.empty(0, np.uint32), 12)
    assert len(level.logits) == min(8, room + 1)


def test_predictions_ahead_are_the_rows_of_a_pass(artifact: Artifact) -> None:
    drafter, drafts = fresh(artifact), np.array([7, 8], np.uint32)
    text = np.concatenate([COMMITTED, drafts])
    for most, count in ((1, 1), (3, 3), (30, 8)):
        assert not drafter.catch_up(COMMITTED, drafts)
        rows = drafter.predict_next(COMMITTED, drafts, most).logits
        np.testing.assert_allclose(rows, rows_after(artifact, text, count), atol=1e-4)
    assert len(drafter.predict_next(COMMITTED, drafts).logits) == 1


class Ascending:
    """A grammar: each token is larger than the one before, and 9 is followed by 20."""

    def forbid(self, logits: Any, answer: Any, paths: Any) -> tuple[int, ...]:
        for row, path in zip(logits, paths, strict=True):
            row[: 1 + [*COMMITTED, *path][-1]] = -np.inf
        return ()

    def forced(self, answer: Any, path: Any) -> tuple[int, ...]:
        return () if path else (20,)


def test_each_row_is_shaped_by_the_drafts_before_it(artifact: Artifact) -> None:
    """A forced token takes no row: the next one is that of its place."""
    drafter = fresh(artifact)
    counter = counter_of(drafter)
    processor = LogitsProcessor(LogitsOptions(), len(COMMITTED), Ascending())
    draft = window(drafter, 6, logits_processor=processor)
    assert draft.ids[0] == 20
    text = np.append(COMMITTED, 20)
    assert counter.counts == [len(text) + 4]
    expected = [20]
    for row in rows_after(artifact, text, 5):
        expected.append(int(row[expected[-1] + 1 :].argmax()) + expected[-1] + 1)
        if expected[-1] == VOCAB - 1:
            break
    assert draft.ids.tolist() == expected[: len(draft.ids)]
    assert len(draft.ids) >= 3


def tree_of(drafter: ModelDrafter, expansion: tuple[int, ...]) -> tuple[Any, list[np.ndarray]]:
    """A drafted tree, and the logits [nodes, V] after the nodes of each level."""
    levels: list[np.ndarray] = []
    predict = drafter._level

    def recorded(tree: Any, *, unread: bool) -> Any:
        level = predict(tree, unread=unread)
        levels.append(level.logits.copy())
        return level

    drafter._level = recorded
    draft = drafter.draft(COMMITTED, expansion, PROTOCOL_REGISTRY["tree"], WARM, ends=())
    return draft, levels


@pytest.mark.parametrize("expansion", [(2, 2), (1, 3, 2), (3, 1, 1, 1)])
def test_all_levels_of_a_tree_are_one_pass(artifact: Artifact, expansion: tuple[int, ...]) -> None:
    """The nodes of a level have the prediction of this level's mask."""
    drafter = fresh(artifact)
    counter = counter_of(drafter)
    _, levels = tree_of(drafter, expansion)
    assert counter.counts == [len(COMMITTED) + len(expansion) - 1]
    wanted = rows_after(artifact, COMMITTED, len(expansion))
    assert len(levels) == len(wanted)
    for logits, row in zip(levels, wanted, strict=True):
        np.testing.assert_allclose(logits, np.tile(row, (len(logits), 1)), atol=1e-4)


def test_a_tree_deeper_than_a_pass_is_read_from_there_on(artifact: Artifact) -> None:
    drafter = fresh(artifact)
    drafter.drafts_per_pass = 2
    counter = counter_of(drafter)
    draft, levels = tree_of(drafter, (2, 2, 2, 1))
    paths = [draft.path(node) for node in range(1, 1 + len(draft.ids))]
    depths = [len(path) for path in paths]
    assert counter.counts == [
        len(COMMITTED) + 1, depths.count(1) + depths.count(2), depths.count(3),
    ]  # fmt: skip
    for depth in (2, 3):
        inner = [path for path in paths if len(path) == depth]
        assert len(inner) == len(levels[depth]) > 1
        for logits, path in zip(levels[depth], inner, strict=True):
            text = np.concatenate([COMMITTED, [draft.ids[node - 1] for node in path]])
            wanted = rows_after(artifact, text, 1)[0]
            np.testing.assert_allclose(logits, wanted, atol=1e-4)


@pytest.mark.parametrize("length", [1, 3, 10])
def test_hidden_states_are_read_in_one_more_pass(artifact: Artifact, length: int) -> None:
    """They are those of the drafts, each after the drafts before it, and not of masks."""
    drafter = fresh(artifact)
    counter = counter_of(drafter)
    exchange = PROTOCOL_REGISTRY["wisv-full"]
    draft = drafter.draft(COMMITTED, (1,) * length, exchange, COLD, ends=())
    over_masks = [len(COMMITTED) + min(length, 8) - 1, *[8 + length - 9] * (length > 8)]
    assert counter.counts[:-1] == over_masks
    text = np.concatenate([COMMITTED, draft.ids]).astype(np.int64)
    output = Decoder(artifact.path, threads=1).forward([Pass(0, text, length)])[0]
    np.testing.assert_allclose(drafter.hidden_states(np.arange(length)), output.hidden, atol=1e-4)
    assert len(counter.counts) == len(over_masks) + 1
    logits = drafter.logits(np.append(COMMITTED, 7).astype(np.uint32)).copy()
    np.testing.assert_allclose(
        logits, fresh(artifact).logits(np.append(COMMITTED, 7).astype(np.uint32)), atol=1e-4
    )


def test_local_generates_a_token_per_pass(artifact: Artifact) -> None:
    """Nothing verifies these tokens."""
    drafter = fresh(artifact)
    counter = counter_of(drafter)
    for length in (6, 7):
        drafter.logits(np.resize(COMMITTED, length))
    assert counter.counts == [6, 1]


def test_an_ordinary_drafter_predicts_one_token(tmp_path: Any) -> None:
    artifact = Artifact.open(tiny_artifact(tmp_path / "a", vocab=VOCAB, seed=5).path)
    drafter = fresh(artifact)
    assert drafter.drafts_per_pass == 1
    assert {*drafter.pass_times} == {1, 2, 4}
    assert len(drafter.predict_next(COMMITTED, COMMITTED[:0], 8).logits) == 1


@pytest.mark.parametrize("single", [1, 3, 12])
def test_the_first_drafts_may_have_a_pass_each(artifact: Artifact, single: int) -> None:
    drafter = fresh(artifact)
    counter = counter_of(drafter)
    draft = window(drafter, 6, single=single)
    single = min(single, 6)
    rest = 6 - single
    assert counter.counts == [len(COMMITTED), *[1] * (single - 1), *[rest] * (rest > 0)]
    expected: list[int] = []
    for count in [*[1] * single, *[rest] * (rest > 0)]:
        text = np.concatenate([COMMITTED, np.array(expected, np.uint32)])
        expected += rows_after(artifact, text, count).argmax(axis=1).tolist()
    assert draft.ids.tolist() == expected
    places = [*[0] * single, *range(rest)]
    assert drafter.places == dict(enumerate(places))


def test_whatever_was_drafted_the_slot_holds_the_text_alone(artifact: Artifact) -> None:
    """Two lanes take turns; after each step the next logits are those of a drafter that is new."""
    rng = np.random.default_rng(0)
    first = ModelDrafter.open(artifact, provider="cpu", threads=1, context=None, lanes=2)
    lanes, other = (first, first.fork()), fresh(artifact)
    texts = [COMMITTED, COMMITTED[::-1].copy()]
    for _ in range(120):
        at = int(rng.integers(2))
        drafter, text = lanes[at], texts[at]
        kind = rng.integers(4)
        length = int(rng.integers(1, 14))
        if kind == 0:
            sampled = PROTOCOL_REGISTRY["dsd"]
            options = {"single": int(rng.integers(4)), "auto": bool(rng.integers(2))}
            ids = drafter.draft(text, (1,) * length, sampled, WARM, ends=(), **options).ids
        elif kind == 1:
            tree = PROTOCOL_REGISTRY["tree"]
            draft = drafter.draft(text, (2, 1, 2)[: 1 + length % 3], tree, WARM, ends=())
            ids = np.array([draft.ids[node - 1] for node in draft.path(len(draft.ids))])
        elif kind == 2:
            judged = PROTOCOL_REGISTRY["wisv-full"]
            ids = drafter.draft(text, (1,) * length, judged, COLD, ends=()).ids
        else:
            drafter.predict_next(text, COMMITTED[:2], length)
            ids = COMMITTED[:2]
        part = ids[: int(rng.integers(0, len(ids) + 1))]
        text = np.concatenate([text, part, rng.integers(0, VOCAB, 1)]).astype(np.uint32)
        texts[at] = text if len(text) < CONTEXT - 4 else text[: int(rng.integers(1, 20))]
        logits = drafter.logits(texts[at]).copy()
        other.reset()
        np.testing.assert_allclose(logits, other.logits(texts[at]), atol=1e-4)


def test_a_token_that_no_message_holds_is_no_draft_to_learn_from(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would count as rejected whenever all tokens that were sent are accepted."""
    monkeypatch.setattr(truncated, "MAX_TOKENS", 3 * VOCAB)
    drafter = fresh(artifact)
    draft = drafter.draft(COMMITTED, (1,) * 6, PROTOCOL_REGISTRY["tslt"], WARM, ends=())
    assert len(draft.ids) == 3
    assert drafter.places == {0: 0, 1: 1, 2: 2}
