"""The edge's drafter with a mask token: several drafts of a pass, and when it stops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pilotfish.drafting.model import SharedModel
from pilotfish.edge_runtime.edge_drafter import EdgeDrafter
from pilotfish.engines.engine import Engine
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.engines.passes import Pass
from pilotfish.speculation.logits_options import LogitsOptions, LogitsProcessor
from tests.support.edge_drafting import FAR, GREEDY, PROMPT, SAMPLED, drafted
from tests.support.edge_drafting import drafting as drafting_alike
from tests.support.pass_counter import PassCounter
from tests.support.ring import MASK, ring_pair
from tests.support.tiny import tiny_artifact

ROWS = 8
FLAT = {1: 1.0, ROWS: 1.0}  # times of passes: all drafts of a pass are worth their time
TARGET_S = 0.5  # seconds of a target pass; the drafter has time for few passes


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ring_pair(tmp_path_factory.mktemp("ring"))[0]


@contextmanager
def drafting(folder: Path, target_s: float = TARGET_S) -> Iterator[EdgeDrafter]:
    """An edge's drafter whose passes take the same time, whatever they read."""
    with drafting_alike(folder, target_s=target_s) as drafter:
        drafter.model.pass_times = FLAT
        yield drafter


def after(folder: Path, text: np.ndarray, count: int) -> list[int]:
    """The likeliest next tokens, by one pass over text and masks."""
    tokens = np.concatenate([text.astype(np.int64), np.full(count - 1, MASK)])
    return Decoder(folder, threads=1).forward([Pass(0, tokens, count)])[0].logits.argmax(1).tolist()


def test_a_pass_reads_masks_and_adds_all_its_drafts(draft: Path) -> None:
    with drafting(draft) as drafter:
        counter = PassCounter(drafter.model.engine.model)
        trail = drafter.follow(b"a", 0, PROMPT, GREEDY)
        trail.set_requested_end(FAR)
        got = drafted(trail, 12)
    first = after(draft, PROMPT, ROWS)
    text = np.concatenate([PROMPT, np.array(first, np.uint32)])
    assert got == first + after(draft, text, ROWS)[:4]
    assert counter.counts[:2] == [len(PROMPT) + ROWS - 1, 2 * ROWS - 1]


def test_it_follows_the_text_where_it_goes(draft: Path) -> None:
    rng = np.random.default_rng(0)
    text = PROMPT
    with drafting(draft) as drafter:
        trail = drafter.follow(b"a", 1, text, GREEDY)
        trail.set_requested_end(FAR)
        for _ in range(8):
            assert drafted(trail, 3) == after(draft, text, 3)
            more = rng.integers(1, 60, rng.integers(1, 4)).astype(np.uint32)
            text = np.concatenate([text, more])
            trail.record_tokens(more.tolist())
    contents = drafter.model.engine.contents
    assert contents.length(1) <= len(text) + 2 * ROWS


@pytest.mark.parametrize("room", [1, 3, 20])
def test_it_drafts_no_further_than_requested_or_than_the_context(draft: Path, room: int) -> None:
    with drafting(draft) as drafter:
        trail = drafter.follow(b"a", 0, PROMPT, GREEDY)
        trail.set_requested_end(len(PROMPT) + room + 1)
        assert len(drafted(trail, room)) == room
        context = drafter.model.engine.model.context
        full = np.resize(PROMPT, context - room + 1)
        other = drafter.follow(b"b", 1, full, GREEDY)
        other.set_requested_end(FAR)
        assert len(drafted(other, room)) == room
    assert len(trail.propose(50).ids) == room
    assert len(other.propose(50).ids) == room


class Even:
    """A grammar of even numbers."""

    def forbid(self, logits: np.ndarray, answer: object, paths: object) -> tuple[int, ...]:
        logits[:, 1::2] = -np.inf
        return ()

    def forced(self, answer: object, path: object) -> tuple[int, ...]:
        return ()


def test_each_draft_of_a_pass_follows_the_grammar(draft: Path) -> None:
    with drafting(draft) as drafter:
        processor = LogitsProcessor(LogitsOptions(), len(PROMPT), Even())
        trail = drafter.follow(b"a", 0, PROMPT, SAMPLED, processor)
        trail.set_requested_end(FAR)
        assert not any(token % 2 for token in drafted(trail, 6))


def test_later_drafts_of_a_pass_are_learnt_apart(draft: Path) -> None:
    """Where the third draft of each pass is wrong, passes soon make no third draft."""
    with drafting(draft, target_s=2.0) as drafter:
        trail = drafter.follow(b"a", 0, PROMPT, GREEDY)
        text = PROMPT
        for _ in range(60):
            trail.set_requested_end(FAR)
            drafts = drafted(trail, 3)
            with drafter.changed:
                places = list(trail.draft_ahead._places)
            right = places.index(2) if 2 in places[:3] else 3
            more = [*drafts[:right], *[(drafts[2] + 1) % 60] * (right < 3)]
            text = np.concatenate([text, np.array(more, np.uint32)])
            trail.record_tokens(more)
        drafted(trail, 3)
        with drafter.changed:
            places = list(trail.draft_ahead._places)
    means = drafter._acceptance.of(GREEDY).means(3)
    assert min(means[:2]) > 0.9
    assert means[2] < means[1] - 0.1
    assert 2 not in places


def test_a_pass_makes_fewer_drafts_where_they_cost_more(draft: Path) -> None:
    with drafting(draft) as drafter:
        drafter.model.pass_times = {1: 1.0, ROWS: float(ROWS)}
        counter = PassCounter(drafter.model.engine.model)
        trail = drafter.follow(b"a", 0, PROMPT, GREEDY)
        trail.set_requested_end(FAR)
        assert drafted(trail, 3) == after(draft, PROMPT, 3)
        assert counter.counts[:3] == [len(PROMPT), 1, 1]


def test_a_slow_target_gets_drafts_of_passes_of_their_own(draft: Path) -> None:
    """Where later drafts are worse and the target is slow, a pass makes one draft."""
    with drafting_alike(draft, target_s=20.0) as drafter:
        drafter.model.pass_times = FLAT
        acceptance = drafter._acceptance.of(GREEDY)
        for _ in range(200):
            acceptance.count(1, agreed=False)
        trail = drafter.follow(b"a", 0, PROMPT, GREEDY)
        trail.set_requested_end(FAR)
        assert drafted(trail, 3)[:1] == after(draft, PROMPT, 1)
        text = np.append(PROMPT, after(draft, PROMPT, 1))
        assert drafted(trail, 3)[1:2] == after(draft, text, 1)


@pytest.mark.parametrize("right", [0, 1, 3, 8, 9])
def test_tokens_that_come_during_a_pass_drop_only_what_they_contradict(
    draft: Path, right: int
) -> None:
    model = SharedModel(Engine(Decoder(draft, slots=2, threads=1)))
    drafter = EdgeDrafter(model, lambda: 0.0, (), target_s=lambda: TARGET_S)  # never runs
    model.pass_times = FLAT
    trail = drafter.follow(b"a", 0, PROMPT, GREEDY)
    trail.set_requested_end(FAR)
    (task,) = drafter._next_tasks()
    planned = drafter._plan_pass([task])
    expected = after(draft, PROMPT, ROWS)
    committed = (expected + [1] * ROWS)[:right]
    for token in committed:
        trail.record_tokens([token])
    drafter._forward(planned)
    assert trail.propose(50).ids == expected[right:]
    trail.record_tokens([(expected[-1] + 5) % 60])
    assert trail.propose(50).ids == []
    assert trail.draft_ahead.text.ids.tolist()[len(PROMPT) :][:right] == committed


def test_a_token_that_contradicts_a_pass_under_way_drops_its_drafts(draft: Path) -> None:
    model = SharedModel(Engine(Decoder(draft, slots=2, threads=1)))
    drafter = EdgeDrafter(model, lambda: 0.0, (), target_s=lambda: TARGET_S)  # never runs
    model.pass_times = FLAT
    trail = drafter.follow(b"a", 0, PROMPT, GREEDY)
    trail.set_requested_end(FAR)
    planned = drafter._plan_pass(drafter._next_tasks())
    first, second = after(draft, PROMPT, 2)
    trail.record_tokens([first, (second + 1) % 60])
    drafter._forward(planned)
    assert trail.propose(50).ids == []


def test_devices_are_told_the_time_of_a_draft(draft: Path, tmp_path: Path) -> None:
    masked = SharedModel(Engine(Decoder(draft, threads=1)))
    assert {*masked.pass_times} == {1, 2, 4, ROWS, 2 * ROWS - 1}
    assert masked.draft_times == {1: masked.pass_times[ROWS] / ROWS}
    plain = SharedModel(Engine(Decoder(tiny_artifact(tmp_path / "a").path, threads=1)))
    assert plain.draft_times == plain.pass_times
    assert EdgeDrafter(plain, lambda: 0.0, ()).model is plain
