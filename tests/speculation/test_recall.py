"""What may follow, by the text alone: as a naive search finds it, whatever was drafted before."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.speculation.corpus import Corpus, CorpusSnapshot
from pilotfish.speculation.recall import Echo, Recall
from tests.support.examples import examples

DEEP, ALONE = 16, 8  # tokens of a match that are compared; places where only one token matches

few = st.integers(0, 2)  # so few tokens that nearly all stood before
some = st.integers(0, 9)
texts = st.one_of(
    st.lists(few, max_size=50),
    st.lists(some, max_size=50),
    st.builds(lambda loop, times: loop * times, st.lists(some, max_size=9), st.integers(1, 5)),
)
earlier_texts = st.lists(
    st.one_of(st.lists(few, max_size=20), st.lists(some, max_size=20)), max_size=3
)


def ids(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.uint32)


def corpus_of(earlier: list[list[int]]) -> CorpusSnapshot:
    corpus = Corpus()
    for text in earlier:
        corpus.add(ids(text))
    return corpus.snapshot()


def match(text: list[int], before: list[int]) -> int:
    """Count the last tokens that both have, to 16."""
    length = 0
    while length < min(len(text), len(before), DEEP) and text[-1 - length] == before[-1 - length]:
        length += 1
    return length


def naive(text: list[int], earlier: list[list[int]]) -> tuple[int, dict[int, float]] | None:
    """Length and weights, by trying every place; earlier texts need two tokens in common."""
    reply = [(match(text, old[:at]), old[at]) for old in earlier for at in range(len(old))]
    here = [(match(text, text[:at]), text[at]) for at in range(len(text))]
    result = [each for each in reply + here if each[0] >= 2]
    result = result or [each for each in here if each[0] == 1][-ALONE:]
    if not result:
        return None
    length = max(each for each, _ in result)
    following = [token for each, token in result if each == length]
    weights: dict[int, float] = dict(Counter(following))
    weights[following[-1]] += 0.5
    return length, shares(weights)


def shares(weights: dict[int, float]) -> dict[int, float]:
    whole = sum(weights.values())
    return {token: weight / whole for token, weight in weights.items()}


def output_of(echo: Echo | None) -> tuple[int, dict[int, float]] | None:
    """The same of an echo."""
    if echo is None:
        return None
    weights = dict(zip(echo.tokens.tolist(), echo.weights.tolist(), strict=True))
    assert max(weights.values()) == weights[echo.likeliest]
    assert len(weights) == len(echo.tokens)
    return echo.length, shares(weights)


def fresh(text: list[int], earlier: CorpusSnapshot) -> Echo | None:
    """Search, and nothing followed: the prompt came at once."""
    recall = Recall()
    recall.update(ids(text))
    recall.set_corpus(earlier)
    return recall.predict([])


@given(texts, earlier_texts)
@examples(500)
def test_an_echo_is_what_a_naive_search_finds(text, earlier):
    assert output_of(fresh(text, corpus_of(earlier))) == naive(text, earlier)


def test_a_longer_text_that_ended_hides_no_shorter_match():
    """A conversation is kept turn by turn: the next turn stands behind two tokens of this one."""
    turns = [[1, 2, 3, 4], [3, 4, 5, 6]]
    echo = fresh([1, 2, 3, 4], corpus_of(turns))
    assert output_of(echo) == (2, {5: 1.0})


def test_the_latest_counts_half_a_time_more():
    assert output_of(fresh([1, 2, 8, 1, 2, 9, 1, 2], corpus_of([]))) == (2, {8: 0.4, 9: 0.6})
    # what is said here is later than any earlier text
    assert output_of(fresh([1, 2, 8, 1, 2], corpus_of([[1, 2, 9]]))) == (2, {8: 0.6, 9: 0.4})


def test_one_token_at_the_very_beginning_is_no_match_of_two():
    assert output_of(fresh([5, 1, 5, 2, 5, 5], corpus_of([]))) == naive([5, 1, 5, 2, 5, 5], [])


@given(texts, texts, earlier_texts)
@examples(300)
def test_what_is_followed_is_what_a_search_finds(text, path, earlier):
    """Token by token, committed or drafted; but that a match longer than 16 may be told apart."""
    known, recall = corpus_of(earlier), Recall()
    recall.set_corpus(known)
    recall.update(ids(text))
    for end in range(min(len(path), 12) + 1):
        previous = [*text, *path[:end]]
        anew, drafted = fresh(previous, known), recall.predict(path[:end])
        committed = Recall()
        committed.set_corpus(known)
        for at in range(len(previous) + 1):
            committed.update(ids(previous[:at]))
        for echo in (drafted, committed.predict([])):
            if anew is None or anew.length < DEEP:
                assert output_of(echo) == output_of(anew)
            else:
                assert echo is not None
                assert echo.length >= DEEP
                assert {*echo.here.tolist()} <= {*anew.here.tolist()}
                assert {*echo.earlier.tolist()} <= {*anew.earlier.tolist()}


@given(texts, st.lists(texts, max_size=4), earlier_texts, st.data())
@examples(300)
def test_drafts_change_nothing(prompt, more, earlier, data):
    """Echoes and odds are those of the same committed tokens without any drafts."""
    known = corpus_of(earlier)
    drafting, plain = Recall(), Recall()
    text = prompt
    for recall in (drafting, plain):
        recall.set_corpus(known)
        recall.update(ids(text))
    for piece in more:
        right = data.draw(st.integers(0, len(piece)))
        for path in ([], piece[:right], data.draw(texts), [*piece[:right], *data.draw(texts)]):
            drafting.predict(path[:9])
        # an answer may be cut, too
        text = text[: len(text) - data.draw(st.integers(0, 2))] + piece
        for recall in (drafting, plain):
            recall.update(ids(text))
        for path in ([], data.draw(texts)[:5]):
            item, other = drafting.predict(path), plain.predict(path)
            assert output_of(item) == output_of(other)
            if item is not None and other is not None:
                assert drafting.acceptance(item) == plain.acceptance(other)
                assert 0.0 < drafting.acceptance(item) < 1.0


def test_odds_are_learnt_from_what_is_committed():
    loop, noise = [1, 2, 3, 4, 5] * 40, np.random.default_rng(1).integers(0, 9, 200).tolist()
    odds = []
    for text in (loop, noise):
        recall = Recall()
        for at in range(len(text) + 1):
            recall.update(ids(text[:at]))
        echo = recall.predict([])
        assert echo is not None
        odds.append(recall.acceptance(echo))
    assert odds[0] > 0.85
    assert odds[1] < 0.4


def test_a_whole_window_and_the_token_after_it_are_learnt_from():
    """64 drafts that are all right teach as much as the same tokens one by one."""
    text = [1, 2, 3, 4, 5] * 40
    at_once, each = Recall(), Recall()
    for recall, step in ((at_once, 65), (each, 1)):
        recall.update(ids(text[:70]))
        for end in range(70, 201, step):
            recall.update(ids(text[:end]))
    item, other = at_once.predict([]), each.predict([])
    assert item is not None
    assert other is not None
    assert at_once.acceptance(item) == each.acceptance(other)


def test_nothing_is_known_of_what_was_never_said():
    recall = Recall()
    assert recall.predict([]) is None
    assert recall.predict([3]) is None
    recall.update(ids([1, 2, 3]))
    assert recall.predict([]) is None
    assert recall.predict([1]) is not None
    assert recall.predict([4]) is None


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["words", "copied"])
def test_a_draft_takes_some_microseconds_however_long_the_history_is(kind):
    """Windows of four behind 100,000 tokens of this text, and 100,000 of earlier ones."""
    rng = np.random.default_rng(0)
    words = (rng.zipf(1.2, 102_000) % 49_152).astype(np.uint32)
    if kind == "copied":  # pieces of 40 tokens of what was said
        for at in range(100_000, len(words) - 40, 40):
            begin = rng.integers(0, 90_000)
            words[at : at + 40] = words[begin : begin + 40]
    corpus, recall = Corpus(), Recall()
    for text in np.split((rng.zipf(1.2, 100_000) % 49_152).astype(np.uint32), 100):
        corpus.add(text)
    recall.set_corpus(corpus.snapshot())
    recall.update(words[:100_000])
    taken = []
    for end in range(100_001, len(words), 3):
        recall.update(words[:end])
        path: list[int] = []
        for _ in range(4):
            begun = time.perf_counter()
            echo = recall.predict(path)
            if echo is not None:
                recall.acceptance(echo)
            taken.append(time.perf_counter() - begun)
            if echo is None:
                break
            path.append(echo.likeliest)
    parts = np.array_split(taken, 5)  # others may be at work in some of them
    assert min(np.median(part) for part in parts) < 50e-6
