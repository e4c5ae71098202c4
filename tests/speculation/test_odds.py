"""The odds of drafts: hopeful at first, learnt within an answer, calibrated, and able to change.

`margins.npz` was recorded with SmolLM2-135M as drafter, over questions of GSM8K: six answers of 64
tokens of each pair, at temperature 0 or, "sampled", 1. The target was the same model in fp32, the
drafter of int8, of int4, rounded twice, or without its last three layers; or it was another model,
Qwen2.5-Coder-1.5B ("trained_apart").
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.speculation.acceptance import AcceptanceEstimator
from tests.support.examples import examples

RECORDED = np.load(Path(__file__).parents[1] / "data" / "margins.npz")
PAIRS = sorted({name.split(".")[0] for name in RECORDED.files})
FAR = [pair for pair in PAIRS if not pair.startswith("int")]
LAG = 6  # tokens on their way

Answer = list[tuple[float, bool]]


def answers(pair: str) -> list[Answer]:
    margins = RECORDED[f"{pair}.margins"].astype(float)
    agreed = np.unpackbits(RECORDED[f"{pair}.agreed"], axis=1).astype(bool)
    return [list(zip(*both, strict=True)) for both in zip(margins, agreed, strict=True)]


def foretold(odds: AcceptanceEstimator, answer: Answer) -> list[float]:
    """The odds of each token, all of whose predecessors have been learnt from."""
    lines = []
    for margin, agreed in answer:
        lines.append(odds.estimate(margin))
        odds.update(margin, agreed)
    return lines


def surprise(items: list[float], answer: Answer) -> float:
    hits = np.array([agreed for _, agreed in answer])
    return float(-np.log(np.where(hits, items, 1.0 - np.array(items))).mean())


def surprises(pair: str, learnt: int) -> float:
    """Of an answer, after so many others of this pair; the mean over the answers."""
    recorded = answers(pair)
    results = []
    for at, answer in enumerate(recorded):
        odds = AcceptanceEstimator()
        for other in range(learnt):
            foretold(odds, recorded[(at + 1 + other) % len(recorded)])
        results.append(surprise(foretold(odds, answer), answer))
    return float(np.mean(results))


@pytest.mark.parametrize("pair", sorted({*PAIRS} - {*FAR}))
def test_a_good_drafter_is_not_stopped_at_the_beginning(pair):
    paths = []
    for answer in answers(pair):
        odds = AcceptanceEstimator()
        for at in range(64 - 15):
            paths.append(math.prod(odds.estimate(margin) for margin, _ in answer[at : at + 15]))
            if at >= LAG:
                odds.update(*answer[at - LAG])
    assert np.median(paths) > 0.3
    assert np.mean(np.array(paths) >= 0.1) > 0.85


@pytest.mark.parametrize("pair", FAR)
def test_a_pair_is_learnt_within_an_answer(pair):
    beginner, second, sixth = (surprises(pair, learnt) for learnt in (0, 1, 5))
    assert second < 1.05 * sixth
    # the test can fail: there was something to learn
    odds = AcceptanceEstimator()
    unlearning = [
        surprise([odds.estimate(m) for m, _ in answer], answer) for answer in answers(pair)
    ]
    assert np.mean(unlearning) > 1.2 * second
    # and most of it in the first answer itself
    assert beginner < 1.15 * sixth


def test_odds_are_what_happens():
    """Reliability, by what was said; of all pairs, from their second answers on."""
    reply, happened = [], []
    for pair in PAIRS:
        odds = AcceptanceEstimator()
        for at, answer in enumerate(answers(pair)):
            now = foretold(odds, answer)
            if at:
                reply += now
                happened += [agreed for _, agreed in answer]
    kind = np.digitize(reply, [0.4, 0.6, 0.8, 0.9, 0.97])
    for group in range(6):
        group_said = np.array(reply)[kind == group]
        group_happened = np.array(happened)[kind == group]
        assert len(group_said) > 100
        assert abs(group_said.mean() - group_happened.mean()) < 0.06


def test_it_follows_a_text_that_changes_its_kind():
    good, bad = answers("int8"), answers("layers_left_out")
    odds = AcceptanceEstimator()
    for answer in bad:
        foretold(odds, answer)
    assert odds.estimate(1.0) < 0.6
    for answer in good[:3]:
        foretold(odds, answer)
    assert odds.estimate(1.0) > 0.75
    for answer in bad[:1]:
        foretold(odds, answer)
    assert odds.estimate(1.0) < 0.6


def test_a_drafter_that_is_always_wrong_is_soon_not_believed():
    odds = AcceptanceEstimator()
    for margin, _ in answers("rounded_twice")[0]:
        odds.update(margin, agreed=False)
    assert odds.estimate(math.inf) < 0.25


margins = st.one_of(st.floats(0.0, 40.0), st.just(math.inf), st.just(math.nan), st.just(0.0))


@given(st.lists(st.tuples(margins, st.booleans()), max_size=60), st.lists(margins, max_size=10))
@examples(200)
def test_odds_are_probabilities_that_rise_with_the_margin(learnt, requests):
    odds = AcceptanceEstimator()
    for margin, agreed in learnt:
        odds.update(margin, agreed)
    ordered = sorted(requests, key=lambda margin: max(0.0, margin))
    reply = [odds.estimate(margin) for margin in ordered]
    assert odds.estimate_each(ordered) == pytest.approx(reply)
    assert all(0.0 < value < 1.0 for value in reply)
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(reply))
