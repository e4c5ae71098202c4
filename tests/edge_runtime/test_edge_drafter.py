"""The drafter beside the target: what it drafts, when it rests, and that it lets go."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pilotfish.drafting.model import SharedModel
from pilotfish.edge_runtime.draft_cost import DraftCost as PassPrice
from pilotfish.edge_runtime.edge_config import EdgeConfig, EdgeLimits
from pilotfish.edge_runtime.edge_daemon import _start_drafter
from pilotfish.edge_runtime.edge_drafter import EdgeDrafter
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.generation_start import GenerationStarter
from pilotfish.edge_runtime.sessions import Sessions
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.contents import Held, SlotContents
from pilotfish.engines.engine import Engine
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.speculation.randomness import Purpose
from pilotfish.wire.protocols import SamplingParams, choose
from tests.conftest import VOCAB, Pair
from tests.support.edge_drafting import (
    FAR,
    GREEDY,
    PROMPT,
    SAMPLED,
    Price,
    drafted,
    drafting,
    is_read,
)
from tests.support.examples import examples
from tests.support.pass_counter import PassCounter
from tests.support.prefill import prefill
from tests.support.serving import eventually


@pytest.fixture(scope="module")
def alone(pair: Pair) -> Callable[[np.ndarray, SamplingParams, int], list[int]]:
    """What the drafter says after a text, a token at a time, by itself."""
    decoder = Decoder(pair.draft, threads=1)

    def say(text: np.ndarray, law: SamplingParams, count: int) -> list[int]:
        decoder.rollback(0, 0)
        lines: list[int] = []
        row = prefill(decoder, 0, text).logits[0]
        while True:
            lines.append(choose(row, law, len(text) + len(lines), Purpose.TARGET))
            if len(lines) == count:
                return lines
            row = prefill(decoder, 0, lines[-1:]).logits[0]

    return say


@pytest.mark.parametrize("law", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_it_drafts_what_the_drafter_says(pair: Pair, alone, law: SamplingParams) -> None:
    expected = alone(PROMPT, law, 60)
    with drafting(pair.draft) as neighbour:
        trail = neighbour.follow(b"a", 0, PROMPT, law)
        trail.set_requested_end(FAR)
        for at in range(0, 60, 4):
            assert drafted(trail, 3) == expected[at : at + 3]
            trail.record_tokens(expected[at : at + 4])


def test_it_follows_the_text_where_it_goes(pair: Pair, alone) -> None:
    rng = np.random.default_rng(0)
    text = PROMPT
    with drafting(pair.draft) as neighbour:
        trail = neighbour.follow(b"a", 1, text, GREEDY)
        trail.set_requested_end(FAR)
        for _ in range(12):
            assert drafted(trail, 1) == alone(text, GREEDY, 1)
            more = rng.integers(1, VOCAB, rng.integers(1, 4)).astype(np.uint32)
            text = np.concatenate([text, more])
            trail.record_tokens(more.tolist())


def test_sessions_share_passes_and_none_waits_for_a_long_prompt(pair: Pair, alone) -> None:
    long = np.resize(PROMPT, 200)
    with drafting(pair.draft) as neighbour:
        trails = [neighbour.follow(bytes([at]), at, PROMPT[at:], GREEDY) for at in range(3)]
        trails.append(neighbour.follow(b"long", 3, long, GREEDY))
        for trail in trails:
            trail.set_requested_end(FAR)
        for at, trail in enumerate(trails[:3]):
            assert drafted(trail, 2) == alone(PROMPT[at:], GREEDY, 2)
        assert drafted(trails[3], 2) == alone(long, GREEDY, 2)
        for _ in range(10):
            for trail in trails[:3]:
                trail.record_tokens(drafted(trail, 1))
        assert (
            neighbour._metrics.drafter_tokens > neighbour._metrics.drafter_passes
        )  # of several at once


def test_it_drafts_no_more_than_is_asked_for(pair: Pair) -> None:
    with drafting(pair.draft) as neighbour:
        trail = neighbour.follow(b"a", 0, PROMPT, GREEDY)
        eventually(lambda: is_read(trail))  # the prompt
        assert neighbour.model.engine.model.length(0) == len(PROMPT) - 1
        time.sleep(0.05)
        assert not trail.propose(FAR).ids
        trail.set_requested_end(len(PROMPT) + 4)
        assert len(drafted(trail, 3)) == 3
        time.sleep(0.05)
        assert len(trail.propose(FAR).ids) == 3  # the fourth is the target's, whatever is drafted
        trail.set_requested_end(0)
        trail.record_tokens([int(trail.propose(1).ids[0]) + 1])
        time.sleep(0.05)
        assert not trail.propose(FAR).ids


def test_it_stops_at_an_end_token_and_behind_it(pair: Pair, alone) -> None:
    reply = alone(PROMPT, GREEDY, 8)
    end = next(token for at, token in enumerate(reply) if at >= 2 and token not in reply[:at])
    count = reply.index(end) + 1
    with drafting(pair.draft, ends=(end,)) as neighbour:
        trail = neighbour.follow(b"a", 0, PROMPT, GREEDY)
        trail.set_requested_end(FAR)
        assert drafted(trail, count) == reply[:count]
        time.sleep(0.05)
        assert len(trail.propose(FAR).ids) == count
        trail.record_tokens(reply[:count])
        time.sleep(0.05)
        assert not trail.propose(FAR).ids


def test_a_full_edge_has_the_cores_for_itself(pair: Pair) -> None:
    price = Price()
    price.now = 1.0
    with drafting(pair.draft, price) as neighbour:
        trail = neighbour.follow(b"a", 0, PROMPT, GREEDY)
        trail.set_requested_end(FAR)
        time.sleep(0.1)
        assert neighbour._metrics.drafter_passes == 0
        price.now = 0.01
        trail.record_tokens([1])  # as the next pass lands
        assert drafted(trail, 1)


def test_drafts_that_never_come_true_become_few(pair: Pair) -> None:
    with drafting(pair.draft) as neighbour:
        trail = neighbour.follow(b"a", 0, PROMPT, GREEDY)
        trail.set_requested_end(FAR)
        for _ in range(60):
            trail.record_tokens([(drafted(trail, 1)[0] + 1) % VOCAB])
        drafted(trail, 1)
        time.sleep(0.1)
        offer = trail.propose(FAR)
        assert len(offer.ids) <= 4
        assert offer.acceptance[0] < 0.3


def test_a_generation_that_nobody_holds_is_let_go_of(pair: Pair) -> None:
    with drafting(pair.draft, slots=2) as neighbour:
        for at in range(60):
            trail = neighbour.follow(bytes([at]), at % 2, PROMPT, GREEDY)
            trail.set_requested_end(FAR)
            drafted(trail, 1)
        del trail
        gc.collect()
        eventually(lambda: not len(neighbour._trails))
        spent = neighbour._metrics.drafter_passes
        time.sleep(0.05)
        assert neighbour._metrics.drafter_passes == spent


def test_the_next_turn_of_a_session_is_not_read_again(pair: Pair, alone) -> None:
    with drafting(pair.draft) as neighbour:
        first = neighbour.follow(b"a", 0, PROMPT, GREEDY)
        first.set_requested_end(FAR)
        text = np.concatenate([PROMPT, np.array(drafted(first, 4), np.uint32), PROMPT[:3]])
        first.set_requested_end(0)
        eventually(lambda: is_read(first))
        counter = PassCounter(neighbour.model.engine.model)
        second = neighbour.follow(b"a", 0, text, GREEDY)
        eventually(lambda: is_read(second))
        assert counter.take() < len(text) - len(PROMPT)
        # but nothing of another session's text counts as held
        third = neighbour.follow(b"b", 0, text, GREEDY)
        eventually(lambda: is_read(third))
        assert counter.take() == len(text) - 1
        third.set_requested_end(FAR)
        assert drafted(third, 3) == alone(text, GREEDY, 3)


def test_a_text_beyond_the_drafters_context_is_left_alone(pair: Pair) -> None:
    with drafting(pair.draft) as neighbour:
        long = neighbour.follow(b"a", 0, np.resize(PROMPT, 257), GREEDY)
        almost = neighbour.follow(b"b", 1, np.resize(PROMPT, 254), GREEDY)
        long.set_requested_end(FAR)
        almost.set_requested_end(FAR)
        eventually(lambda: len(almost.propose(FAR).ids) == 3)  # of which the last is not read
        time.sleep(0.05)
        assert len(almost.propose(FAR).ids) == 3
        assert not long.propose(FAR).ids


def test_a_pass_that_fails_ends_the_drafts_of_its_sessions_only(pair: Pair, monkeypatch) -> None:
    forward = Decoder.forward
    broken = threading.Event()

    def failing(self, passes):
        if broken.is_set():
            broken.clear()
            raise RuntimeError("the machine is on fire")
        return forward(self, passes)

    monkeypatch.setattr(Decoder, "forward", failing)
    with drafting(pair.draft) as neighbour:
        first = neighbour.follow(b"a", 0, PROMPT, GREEDY)
        first.set_requested_end(FAR)
        drafted(first, 1)
        time.sleep(0.05)
        broken.set()
        first.record_tokens([0, 0])
        eventually(lambda: not broken.is_set())
        second = neighbour.follow(b"b", 1, PROMPT, GREEDY)
        second.set_requested_end(FAR)
        assert drafted(second, 1)
        assert not first.propose(FAR).ids


def test_what_cannot_be_told_ends_the_drafts_so_far_and_not_the_drafter(pair: Pair, caplog) -> None:
    class Unsure(Price):
        def __call__(self) -> float:
            if self.now < 0.0:
                raise RuntimeError("no price")
            return super().__call__()

    price = Unsure()
    with drafting(pair.draft, price) as neighbour:
        first = neighbour.follow(b"a", 0, PROMPT, GREEDY)
        first.set_requested_end(FAR)
        drafted(first, 1)
        price.now = -1.0
        first.record_tokens([0, 0])
        eventually(lambda: "no price" in caplog.text)
        time.sleep(0.05)
        assert caplog.text.count("Traceback") == 1  # it waits for news
        price.now = 0.0
        second = neighbour.follow(b"b", 1, PROMPT, GREEDY)
        second.set_requested_end(FAR)
        assert drafted(second, 1)
        assert not first.propose(FAR).ids


def test_lessons_that_nobody_takes_do_not_pile_up(pair: Pair) -> None:
    neighbour = EdgeDrafter(SharedModel(Engine(_decoder(pair))), Price(), ())  # never runs
    trail = neighbour.follow(b"a", 0, PROMPT, GREEDY)
    for _ in range(3000):
        trail.draft_ahead.append(1, 0.5, 1.0)
        trail.record_tokens([1])
    assert 0 < len(neighbour.comparisons) < 2000


def test_texts_are_not_looked_through_again_and_again(pair: Pair, monkeypatch) -> None:
    looked: list[tuple[int, bool]] = []  # slot, and whether the serving thread could be waiting
    find = SlotContents.find

    def counting(self: SlotContents, slot: int, *others: Any) -> Held:
        looked.append((slot, neighbour.changed._is_owned()))
        return find(self, slot, *others)

    with drafting(pair.draft) as neighbour:
        monkeypatch.setattr(SlotContents, "find", counting)
        trails = [neighbour.follow(bytes([at]), at, PROMPT, GREEDY) for at in range(4)]
        for trail in trails:
            eventually(lambda trail=trail: is_read(trail))
        looked.clear()
        for at in range(3):  # further turns of the same sessions, of which one is asked for tokens
            trails[at] = neighbour.follow(bytes([at]), at, PROMPT, GREEDY)
        trails[0].set_requested_end(FAR)
        for at in range(20):
            trails[0].record_tokens([drafted(trails[0], 1)[0] ^ (at % 2)])
        slots = Counter(slot for slot, _ in looked)
        assert slots[0] <= 2 * neighbour._metrics.drafter_passes  # to choose a pass, and to run it
        assert (slots[1], slots[2], slots[3]) == (1, 1, 0)  # once a trail that wants no draft
        assert not any(locked for _, locked in looked)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 6), st.booleans()),
        min_size=1,
        max_size=25,
    )
)
@examples(40)
def test_texts_may_change_at_any_time(
    pair: Pair, alone, steps: list[tuple[int, int, int, bool]]
) -> None:
    # driven by hand: texts also change between the choice of a pass and the pass
    neighbour = EdgeDrafter(SharedModel(Engine(_decoder(pair))), Price(), ())
    trail = neighbour.follow(b"a", 0, PROMPT, GREEDY)
    trail.requested_end = FAR
    for passes, right, wrong, under_way in steps:
        for _ in range(passes):
            if planned := neighbour._plan_pass(neighbour._next_tasks()):
                neighbour._forward(planned)
        planned = neighbour._plan_pass(neighbour._next_tasks())
        if planned and not under_way:
            neighbour._forward(planned)
        ids = [*trail.propose(right).ids, *range(wrong)]
        if ids:
            trail.record_tokens(ids)
        if planned and under_way:
            neighbour._forward(planned)
        ahead = trail.draft_ahead
        if drafts := ahead.drafts.tolist():
            assert drafts == alone(ahead.text.ids[: ahead.committed], GREEDY, len(drafts))
    text = trail.draft_ahead.text.ids
    held = neighbour.model.engine.cached(0, text)
    assert min(len(text) - 1, neighbour.model.engine.model.length(0)) >= held >= len(PROMPT) - 1


@functools.cache
def _decoder(pair: Pair) -> Decoder:
    return Decoder(pair.draft, slots=1, threads=1)


def test_the_drafter_does_not_keep_the_interpreter(pair: Pair) -> None:
    manifest = Artifact.open(pair.target).manifest
    config = EdgeConfig(target=pair.target, limits=EdgeLimits(sessions=2))
    usual_s = sys.getswitchinterval()
    with ExitStack() as stack:
        assert _start_drafter(stack, config, manifest, PassPrice({1: 0.01}), EdgeMetrics()) is None
        assert sys.getswitchinterval() == usual_s
        with_drafter = replace(config, draft=pair.draft)
        assert _start_drafter(stack, with_drafter, manifest, PassPrice({1: 0.01}), EdgeMetrics())
        assert sys.getswitchinterval() <= 1e-3
    assert sys.getswitchinterval() == usual_s


def test_sessions_of_two_owners_have_different_keys_even_with_one_id() -> None:
    """Otherwise the second owner could time what the drafter has read of the first one's text."""
    keys = []
    starter: Any = object.__new__(GenerationStarter)
    starter._edge_drafter = SimpleNamespace(follow=lambda key, *rest: keys.append(key))
    starter._logits_processors = SimpleNamespace(create=lambda *rest: None)
    sessions = Sessions(EdgeLimits(sessions=2), lambda job: None)
    spec: Any = SimpleNamespace(begin=None, sampling_params=GREEDY)
    for owner in (b"a", b"b", b"a"):
        session = sessions.open(bytes(16), owner)
        starter._trail_factory(session, spec, None)()
        sessions.close(session)
    assert keys[0] == keys[2] != keys[1]
