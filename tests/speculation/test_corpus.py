"""Earlier texts: places as a naive search finds them, bounded, and never changed under a reader."""

from __future__ import annotations

import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.speculation import corpus as module
from pilotfish.speculation.corpus import BREAK, MOST_TOKENS, Corpus, CorpusSnapshot
from tests.support.examples import examples

texts = st.lists(st.integers(0, 3), max_size=30)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.uint32)


def naive(earlier: CorpusSnapshot, pair: list[int], most: int) -> list[int]:
    known = earlier.ids.tolist()
    return [at for at in range(2, len(known)) if known[at - 2 : at] == pair][-most:]


@given(st.lists(texts, max_size=40), st.integers(40, 200), st.integers(2, 40), st.integers(1, 9))
@examples(200)
def test_places_are_those_of_a_naive_search(added, most, unsorted, latest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_UNSORTED", unsorted)
        corpus = Corpus(most)
        everything: list[int] = []
        seen = []
        for text in added:
            corpus.add(ids(*text))
            everything += [*text[-(most // 2) :], int(BREAK)]
            earlier = corpus.snapshot()
            held = earlier.ids.tolist()
            assert len(held) <= most
            assert held == everything[len(everything) - len(held) :]  # the oldest went
            seen.append((earlier, held, earlier.keys.copy(), earlier.order.copy()))
            for first in range(4):
                for last in range(4):
                    places = earlier.find_places(ids(9, first, last), latest)
                    assert places.tolist() == naive(earlier, [first, last], latest)
        for earlier, held, keys, order in seen:  # as they were when they were looked at
            assert earlier.ids.tolist() == held
            np.testing.assert_array_equal(earlier.keys, keys)
            np.testing.assert_array_equal(earlier.order, order)


@given(st.lists(texts, max_size=9), st.integers(20, 400))
@examples(100)
def test_what_there_was_already_is_searched_like_what_is_added(begun, most):
    whole = [token for text in begun for token in (*text, int(BREAK))]
    corpus = Corpus(most, ids(*whole))
    assert corpus.snapshot().ids.tolist() == whole[-most:]
    corpus.add(ids(1, 2, 3))
    earlier = corpus.snapshot()
    for first in range(4):
        for last in range(4):
            places = earlier.find_places(ids(first, last), 9)
            assert places.tolist() == naive(earlier, [first, last], 9)


def test_a_quarter_goes_at_once():
    corpus = Corpus(1000)
    for at in range(100):
        corpus.add(ids(*[at] * 9))
    assert len(corpus.snapshot().ids) == 1000
    corpus.add(ids(*[100] * 9))
    assert corpus.snapshot().ids.tolist()[:10] == [25] * 9 + [int(BREAK)]
    assert len(corpus.snapshot().ids) == 760


def test_of_a_very_long_text_the_end_is_kept():
    corpus = Corpus(100)
    corpus.add(np.arange(1000, dtype=np.uint32))
    assert corpus.snapshot().ids.tolist() == [*range(950, 1000), int(BREAK)]


def test_fewer_than_two_tokens_stand_nowhere():
    corpus = Corpus()
    assert corpus.snapshot().find_places(ids(1, 2), 9).tolist() == []
    corpus.add(ids(1, 2, 3))
    assert corpus.snapshot().find_places(ids(2), 9).tolist() == []
    assert corpus.snapshot().find_places(ids(), 9).tolist() == []


def test_many_may_add_and_look_at_once(monkeypatch):
    monkeypatch.setattr(module, "_UNSORTED", 64)
    corpus = Corpus(3000)
    wrong: list[object] = []
    done: list[int] = []

    def work(lane: int) -> None:
        rng = np.random.default_rng(lane)
        for _ in range(150):
            corpus.add(np.full(rng.integers(1, 20), lane, np.uint32))
            held = corpus.snapshot()
            parts = np.split(held.ids, np.flatnonzero(held.ids == BREAK) + 1)
            wrong.extend(text for text in parts if len({*text[:-1].tolist()}) > 1)  # of two lanes
            if held.find_places(ids(lane, lane), 5).max(initial=0) >= len(held.ids):
                wrong.append(held)
        done.append(lane)

    lanes = [threading.Thread(target=work, args=(lane,)) for lane in range(4)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    assert not wrong
    assert len(done) == 4


def test_the_most_tokens_take_no_more_than_64_mib():
    """For a moment, while places are sorted; and half of it afterwards."""
    tracemalloc.start()
    try:
        corpus = Corpus()
        text = (np.random.default_rng(0).zipf(1.2, 60_000) % 49_152).astype(np.uint32)
        for _ in range(18):
            corpus.add(text)
        assert MOST_TOKENS * 0.7 < len(corpus.snapshot().ids) <= MOST_TOKENS
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20
    assert now < 32 << 20
