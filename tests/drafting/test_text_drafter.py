"""What was said before drafts, alone or before a model: the output law stays the target's.

By enumeration of every outcome of a round, as in `tests/wire/test_protocol_outcomes.py`, with the
real drafters; what is known stands in the text, in earlier ones, or nowhere.
"""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pilotfish.drafting.model_drafter
import pilotfish.drafting.window
from pilotfish.bridge import Pair
from pilotfish.device_runtime.texts.text_memory import TextMemory
from pilotfish.drafting.lookup import Recollection
from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.drafting.text_drafter import TextDrafter
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.logits_options import Grammar, LogitsOptions
from pilotfish.speculation.randomness import Purpose
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, SamplingParams, choose
from tests.support.bridged import END, WORDS, ids, pair_of, vocabulary
from tests.support.examples import examples
from tests.support.rounds import (
    COLD,
    DETERMINISTIC,
    EXACT,
    ONE,
    SAMPLED,
    WARM,
    Setting,
    logits,
    play_round,
    shaper_of,
)
from tests.support.thinned import thinned
from tests.support.tiny import tiny_artifact
from tests.wire.test_protocol_outcomes import assert_exact, both_laws, small_settings
from tests.wire.test_shaped_law import REGEXES, SMALL, grammars, masked_law

GREEDY = Sampling()
START = (1, 2)
AUTO = st.sampled_from([None, 0.3, 0.7])  # what ends a window of "auto"; None: it is fixed

SIZES = {3: ["a", "b"], 4: ["a", "b", "ab"]}
PAIRS = {size: Pair(*[vocabulary(words, "<end>")] * 2) for size, words in SIZES.items()}


def memory_of(earlier):
    memory = TextMemory()
    for text in earlier:
        memory.texts("words", 1000).add(ids(text))
    return memory


def text_drafter(size, earlier, start=START):
    """A text drafter that knows these texts, and has begun to answer."""
    drafter = TextDrafter(Recollection(memory_of(earlier)))
    pair = PAIRS[size]
    drafter.set_bridge(pair.bridge(), "words")
    drafter.start(pair.prompt(list(start)))
    return drafter


def windows_of(drafter, *, auto, ends=(), seen=None):
    """A drafter of windows for `play_round`; seen: counts their depths."""

    def window(setting, exchange, law, committed):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pilotfish.drafting.window, "ENOUGH", auto or 0.3)
            draft = drafter.draft(
                ids(committed),
                setting.expansion,
                exchange,
                law,
                ends,
                logits_processor=shaper_of(setting, law),
                auto=auto is not None,
            )
        if seen is not None:
            seen[draft.depth] += 1
        return draft

    return window


def texts(size):
    return st.lists(st.lists(st.integers(0, size - 1), max_size=12), max_size=3)


# Without a model


@pytest.mark.parametrize("name", SAMPLED)
@given(st.data(), st.integers(1, 4), texts(3), AUTO)
@examples(60)
def test_a_round_is_exact_over_all_its_outcomes(name, data, bits, earlier, auto):
    setting = data.draw(small_settings(name))
    start = (*START, *data.draw(st.lists(st.integers(0, 2), max_size=9)))
    ends = data.draw(st.sampled_from([(), (2,)]))
    drafter = text_drafter(3, earlier)
    assert_exact(setting, bits, windows_of(drafter, auto=auto, ends=ends), start)


@pytest.mark.parametrize("name", SAMPLED)
def test_windows_of_every_length_are_among_them(name):
    """What followed is told apart: once, several, and nothing known behind some of them."""
    expansion = (2, 1) if EXACT[name].allows_trees else (1, 1)
    seen, drafts = Counter(), set()
    for earlier, start in product(
        ([], [[1, 2, 0]], [[0, 1, 2, 0, 1, 1]], [[0, 1, 2], [0, 1, 0], [0, 1, 2, 2]]),
        ((1, 2), (1, 2, 0, 1), (2, 2, 2, 2, 2)),
    ):
        drafter = text_drafter(3, earlier, start)
        setting = Setting(name, expansion, ONE, ONE, vocab=3)
        assert_exact(setting, 2, windows_of(drafter, auto=None, seen=seen), start)
        law = SamplingParams(sampling=ONE, seed=1)
        draft = drafter.draft(ids(start), expansion, EXACT[name], law, ())
        drafts.add(tuple(draft.ids.tolist()))
    assert {*seen} == {0, 1, 2}
    assert len(drafts) > 3


def test_a_biased_window_would_be_seen():
    """The enumeration can fail: here a window ends by what the draft would have been."""
    drafter = text_drafter(3, [[1, 2, 0], [1, 2, 1], [1, 2, 2]])
    window = windows_of(drafter, auto=None)

    def peeked(setting, exchange, law, committed):
        draft = window(setting, exchange, law, committed)
        if draft.ids.tolist() == [0]:  # the mutant
            return window(replace(setting, expansion=()), exchange, law, committed)
        return draft

    setting = Setting("dsd", (1,), ONE, ONE, vocab=3)
    result, wanted = both_laws(setting, 0, peeked, START)
    assert np.abs(result - wanted).sum() > 0.01


@pytest.mark.parametrize("name", SAMPLED)
@given(st.data(), st.integers(1, 4), st.sampled_from(REGEXES), texts(SMALL), AUTO)
@examples(40)
def test_a_round_under_a_grammar_is_exact(name, data, bits, regex, earlier, auto):
    setting = data.draw(small_settings(name))
    grammar = LogitsOptions(
        grammar=Grammar("regex", regex),
        frequency_penalty=data.draw(st.sampled_from([0.0, 1.0])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 0.5])),
    )
    setting = replace(
        setting,
        expansion=setting.expansion[:2],
        vocab=SMALL,
        shaping=grammar,
        grammars=grammars(),
    )
    earlier = [[*START, *text] for text in earlier]  # so that something is known
    drafter = text_drafter(SMALL, earlier)
    window = windows_of(drafter, auto=auto, ends=(SMALL - 1,))
    assert_exact(setting, bits, window, START, p=masked_law(setting))


def own_tokens(setting, seed, length, start=START):
    """The target's own, one by one."""
    law, known = SamplingParams(sampling=setting.sampling, seed=seed), start
    while len(known) < len(start) + length:
        row = logits(setting.models[0], known)
        known = (*known, choose(row, law, len(known), Purpose.TARGET))
    return known


@pytest.mark.parametrize("auto", [None, 0.3])
@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        *((name, GREEDY) for name in COLD),
        *(
            (name, sampling)
            for name in DETERMINISTIC
            for sampling in (ONE, Sampling(temperature=1.3, top_k=2))
        ),
    ],
)
def test_what_is_determined_is_the_targets_own(name, sampling, auto):
    accepted = 0
    for seed, window in product(range(4), (0, 1, 3)):
        setting = Setting(name, (1,) * window, sampling, sampling, seed=seed, vocab=4)
        wanted = own_tokens(setting, seed, 40)
        for earlier in ([], [wanted], [wanted[:20], wanted[:1:-1]]):
            drafter = text_drafter(4, earlier)
            committed, at_edge, rounds = START, len(START), 0
            while len(committed) < len(wanted):
                committed, at_edge = play_round(
                    setting,
                    EXACT[name],
                    seed,
                    committed,
                    at_edge,
                    windows_of(drafter, auto=auto),
                )
                rounds += 1
            assert committed[: len(wanted)] == wanted
            accepted += len(wanted) - len(START) - rounds
    assert accepted > 200


def test_a_window_ends_with_an_end_token():
    drafter = text_drafter(4, [[0, 1, 2, 0, 3, 1, 2]])
    law = SamplingParams(sampling=GREEDY, seed=1)
    for name in ("greedy", "tree"):
        for ends, wanted in ((), [2, 0, 3, 1, 2]), ((3,), [2, 0, 3]), ((2,), [2]):
            draft = drafter.draft(ids([0, 1]), (1,) * 5, PROTOCOL_REGISTRY[name], law, ends)
            assert draft.ids.tolist() == wanted


@pytest.mark.parametrize("name", sorted(EXACT))
def test_where_nothing_is_known_a_window_is_empty(name):
    drafter = text_drafter(4, [[3, 3, 3]])
    law = SamplingParams(sampling=ONE if name in WARM else GREEDY, seed=1)
    for auto in (False, True):
        draft = drafter.draft(ids([0, 1]), (1, 1), EXACT[name], law, (), auto=auto)
        assert len(draft.ids) == draft.depth == 0


def test_a_tree_is_no_larger_than_what_the_wire_takes():
    drafter = text_drafter(4, [[0, 1, at, other] for at in range(4) for other in range(4)])
    law = SamplingParams(sampling=ONE, seed=1)
    draft = drafter.draft(ids([0, 1]), (4, 4, 4, 4, 4), PROTOCOL_REGISTRY["tree"], law, ())
    assert 4 < len(draft.ids) <= 64


# Before a model


def model_drafter(folder, pair, tokens, earlier, seed=3):
    artifact = tiny_artifact(folder, tokens=tokens, eos=END, seed=seed)
    drafter = ModelDrafter.open(
        artifact,
        provider="cpu",
        threads=1,
        context=None,
        text=Recollection(memory_of(earlier)),
    )
    drafter.set_bridge(pair.bridge(), "words")
    drafter.start(pair.prompt(list(START)))
    return drafter


EARLIER = [[1, 2, 0, 1, 0], [1, 2, 0, 0], [2, 0, 1], [0, 1, 1, 2, 0]]


@pytest.mark.parametrize("sure", [0.3, 0.8])
@pytest.mark.parametrize(("name", "expansion"), [("dsd", (1, 1)), ("tslt", (1, 1)), ("dssd", (1,))])
@pytest.mark.parametrize("words", ["the same", "partial", "the drafter has more"])
def test_a_model_whose_chains_the_text_may_draft_is_exact(
    words, name, expansion, sure, tmp_path, monkeypatch
):
    exactly(words, name, expansion, sure, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("words", "expansion"),
    thinned(
        [*product(("the same", "partial", "the drafter has more"), ((2,), (1, 2), (2, 1)))],
        [("the same", (1, 2)), ("partial", (2,)), ("the drafter has more", (2,))],
    ),
)
def test_a_model_with_which_the_text_grows_a_tree_is_exact(words, expansion, tmp_path, monkeypatch):
    exactly(words, "tree", expansion, 0.8, tmp_path, monkeypatch)


def exactly(words, name, expansion, sure, folder, monkeypatch):
    """A round is exact, with fixed windows and "auto", by the model or by the text."""
    monkeypatch.setattr(pilotfish.drafting.model_drafter, "_MIN_ACCEPTANCE", sure)
    if words == "the same":
        pair, tokens = Pair(*[vocabulary(["a", "b", "ab"], END)] * 2), ["a", "b", "ab"]
    else:
        pair, tokens = pair_of(words), WORDS[words][0]
    drafter = model_drafter(folder, pair, tokens, EARLIER)
    counter = Counter()
    real = drafter._look_up_text

    def output_of(path):
        level = real(path)
        counter[level is not None] += 1
        return level

    monkeypatch.setattr(drafter, "_look_up_text", output_of)
    setting = Setting(name, expansion, vocab=pair.target.vocab_size)
    ends = pair.target.eos_ids
    for auto, answer in product((None, 0.7), ((), (0,), (0, 1, 0, 1, 1))):
        window = windows_of(drafter, auto=auto, ends=ends)
        result, wanted = both_laws(setting, 2, window, (*START, *answer))
        # what was read in other passes is rounded otherwise, in 1e-7 of the drafter's
        np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-6)
    if {*expansion} == {1}:
        assert counter[sure < 0.8] > 0


@pytest.mark.parametrize(("name", "expansion"), [("greedy", (1,) * 4), ("coupled", (1,) * 4)])
@pytest.mark.parametrize("words", ["partial", "the drafter has more"])
def test_a_model_with_text_says_the_targets_own(words, name, expansion, tmp_path):
    pair = pair_of(words)
    sampling = GREEDY if name == "greedy" else ONE
    setting = Setting(name, expansion, sampling, sampling, vocab=pair.target.vocab_size)
    wanted = own_tokens(setting, 1, 50)
    drafter = model_drafter(tmp_path, pair, WORDS[words][0], [wanted])
    for auto in (None, 0.3):
        committed, at_edge = START, len(START)
        while len(committed) < len(wanted):
            committed, at_edge = play_round(
                setting,
                PROTOCOL_REGISTRY[name],
                1,
                committed,
                at_edge,
                windows_of(drafter, auto=auto),
            )
        assert committed[: len(wanted)] == wanted
