"""Across a bridge the output law is the target's, whatever the drafter's vocabulary is.

By enumeration of every outcome, as in `tests/wire/test_protocol_outcomes.py`; and that nothing but
shared tokens is drawn and sent, however few they are.
"""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pilotfish.drafting.window
from pilotfish.bridge.shared import SharedTokens
from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.speculation.acceptance import predicted_acceptance
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.projection import Projection
from pilotfish.speculation.randomness import Purpose
from pilotfish.speculation.tree import Tree
from pilotfish.speculation.truncation import SparseRows
from pilotfish.wire.protocols import DrawKey, SamplingParams, choose
from pilotfish.wire.protocols.dsd import DenseDraft
from pilotfish.wire.protocols.dssd import Dssd, SplitDraft
from tests.support.bridged import END, WORDS, drafter_of, drafting_across, ids, pair_of
from tests.support.enumeration import kinds, samplings
from tests.support.examples import examples
from tests.support.rounds import (
    COLD,
    DETERMINISTIC,
    EXACT,
    ONE,
    PROMPT,
    SAMPLED,
    WARM,
    Setting,
    logits,
    play_round,
)
from tests.support.tiny import tiny_artifact
from tests.wire.test_protocol_outcomes import assert_exact

LAWFUL = [name for name in SAMPLED if EXACT[name].lossless]
HOT = Sampling(temperature=1.3, top_k=4, top_p=0.95)
GREEDY = Sampling()


@pytest.mark.parametrize(
    ("words", "shared"),
    [
        ("partial", [0, 1, 4]),
        ("one text token", [1, 3]),
        ("nothing else", [1]),
        ("the target has more", [0, 1, 4]),
        ("the drafter has more", [0, 1, 2, 3]),
    ],
)
def test_the_pairs_overlap_as_they_say(words, shared):
    pair = pair_of(words)
    assert pair.shared.target.tolist() == shared
    assert not pair.trivial


# The law of a round


@st.composite
def settings_across(draw, name):
    """A setting, how its window is drafted across a bridge, and the tokens before that."""
    words, kind = draw(st.sampled_from(sorted(WORDS))), draw(kinds)
    pair = pair_of(words)
    size = pair.target.vocab_size
    trees = [(2,), (2, 1), (1, 2)] if EXACT[name].allows_trees else []
    # `dssd` rounds p in many ways
    chains = [(1,)] if isinstance(EXACT[name], Dssd) and size > 4 else [(1,), (1, 1)]
    more_than_are_shared = st.just(Sampling(temperature=1.0, top_k=64))
    setting = Setting(
        name,
        draw(st.sampled_from([*chains, *trees])),
        draw(samplings),
        draw(samplings | more_than_are_shared),
        enough=draw(st.sampled_from([0.0, 0.5, 0.7])),
        seed=draw(st.integers(0, 2**31)),
        vocab=size,
        kind=kind,
    )
    drafter = drafter_of(pair, setting.seed, kind)
    window = drafting_across(pair, drafter, away=draw(st.sampled_from([0.0, 12.0])))
    answer = draw(st.lists(st.integers(0, size - 1), max_size=3))
    return setting, window, (*PROMPT, *answer)


@pytest.mark.parametrize("name", LAWFUL)
@given(st.data(), st.integers(1, 4))
@examples(40)
def test_a_round_across_a_bridge_is_exact_over_all_its_outcomes(name, data, bits):
    setting, window, start = data.draw(settings_across(name))
    assert_exact(setting, bits, window, start)


@pytest.mark.parametrize("name", LAWFUL)
@pytest.mark.parametrize("words", WORDS)
def test_every_protocol_meets_every_pair(name, words):
    pair = pair_of(words)
    drafter = drafter_of(pair, 5)
    expansion = (1,) if isinstance(EXACT[name], Dssd) else (1, 1)  # see above
    for drafting in ({"top_k": 64}, {"top_k": 2}, {"top_k": 1}, {"top_p": 0.8}, {}):
        sampling = Sampling(temperature=1.0, **drafting)
        setting = Setting(name, expansion, ONE, sampling, vocab=pair.target.vocab_size)
        assert_exact(setting, 2, drafting_across(pair, drafter, away=8.0), (*PROMPT, 1, 0))


@pytest.mark.parametrize(("name", "expansion"), [("dsd", (1, 1)), ("tree", (1, 2))])
@pytest.mark.parametrize("words", ["partial", "the drafter has more"])
def test_windows_of_the_real_drafter_across_a_bridge_are_exact(
    name, expansion, words, tmp_path, monkeypatch
):
    """`Drafter.draft` with ``auto`` and the target's end token, on a random model."""
    pair = pair_of(words)
    artifact = tiny_artifact(tmp_path, tokens=WORDS[words][0], eos=END, seed=3)
    drafter = ModelDrafter.open(artifact, provider="cpu", threads=1, context=None)
    drafter.set_bridge(pair.bridge())
    drafter.start(pair.prompt(PROMPT))
    monkeypatch.setattr(pilotfish.drafting.window, "ENOUGH", 0.7)
    depths = set()

    def window(setting, exchange, law, committed):
        ends = pair.target.eos_ids
        draft = drafter.draft(ids(committed), setting.expansion, exchange, law, ends, auto=True)
        depths.add(draft.depth)
        return draft

    setting = Setting(name, expansion, vocab=pair.target.vocab_size)
    for answer in ((), (1, 0), (0, 1, 0)):
        assert_exact(setting, 0, window, (*PROMPT, *answer))
    assert depths == {1, 2}


@pytest.mark.parametrize("words", ["partial", "the drafter has more"])
def test_windows_from_one_pass_over_masks_are_exact_across_a_bridge(words, tmp_path):
    """The masks follow in the drafter's own ids."""
    pair = pair_of(words)
    mask = len(WORDS[words][0]) + 1
    padded = {"padded_vocab": mask + 3, "mask_token": mask}
    artifact = tiny_artifact(tmp_path, tokens=WORDS[words][0], eos=END, seed=3, **padded)
    drafter = ModelDrafter.open(artifact, provider="cpu", threads=1, context=None)
    drafter.set_bridge(pair.bridge())
    drafter.start(pair.prompt(PROMPT))
    lengths = []
    run = drafter._shared_model.engine.model.forward
    drafter._shared_model.engine.model.forward = lambda passes: (
        lengths.append(passes[0].tokens.tolist().count(mask)) or run(passes)
    )

    def window(setting, exchange, law, committed):
        return drafter.draft(ids(committed), setting.expansion, exchange, law, ())

    setting = Setting("dsd", (1, 1), vocab=pair.target.vocab_size)
    for answer in ((), (1, 0)):
        assert_exact(setting, 0, window, (*PROMPT, *answer))
    assert {*lengths} == {1}  # each pass had a mask


# Token for token


def tokens(setting, pair, seed, length):
    """The first tokens after the prompt, by as many rounds across a bridge as it takes."""
    exchange = EXACT[setting.exchange]
    window = drafting_across(pair, drafter_of(pair, setting.seed))
    committed, at_edge = PROMPT, len(PROMPT)
    while len(committed) < len(PROMPT) + length:
        committed, at_edge = play_round(setting, exchange, seed, committed, at_edge, window)
    return committed[len(PROMPT) : len(PROMPT) + length]


def own_tokens(setting, seed, length):
    """The target's own, one by one."""
    law, known = SamplingParams(sampling=setting.sampling, seed=seed), PROMPT
    while len(known) < len(PROMPT) + length:
        row = logits(setting.models[0], known)
        known = (*known, choose(row, law, len(known), Purpose.TARGET))
    return known[len(PROMPT) :]


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        *((name, GREEDY) for name in COLD),
        *((name, sampling) for name in DETERMINISTIC for sampling in (ONE, HOT)),
    ],
)
def test_what_is_determined_is_the_targets_own(words, name, sampling):
    pair = pair_of(words)
    for window, seed in product((0, 1, 3), range(5)):
        drafting = sampling if name not in WARM or seed % 2 else ONE
        setting = Setting(
            name, (1,) * window, sampling, drafting, seed=seed, vocab=pair.target.vocab_size
        )
        assert tokens(setting, pair, seed, 12) == own_tokens(setting, seed, 12)


# What is drawn and sent

SHAPES = [
    GREEDY,
    ONE,
    Sampling(temperature=100.0),
    Sampling(temperature=1e-6),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=2),
    Sampling(temperature=1.0, top_k=64),
    Sampling(temperature=1.0, top_p=1e-9),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.0, top_p=1 - 2**-53),
    Sampling(temperature=0.7, top_k=50, top_p=0.9),
]


@pytest.mark.parametrize("name", LAWFUL)
@pytest.mark.parametrize(
    "size", [3, 200, 3000, pytest.param(20_000, marks=pytest.mark.slow)]
)  # a row has up to 2,048 tokens
@pytest.mark.parametrize("count", [1, 3, 64, 65])
def test_nothing_but_shared_tokens_is_drawn_and_sent(name, size, count):
    rng = np.random.default_rng([size, count])
    count = min(count, size)
    shared = SharedTokens(
        draft_ids=rng.permutation(300)[:count],
        target=np.sort(rng.permutation(size)[:count]),
        specials={},
        draft_size=300,
        target_size=size,
    )
    project = Projection(shared.to_target_ids(), shared.target_size)
    exchange = EXACT[name]
    for spread, away, sampling in product((0.0, 2.0, 1e4), (0.0, 1e4), SHAPES):
        law, tree, rows = SamplingParams(sampling=sampling, seed=7), Tree(), []
        with np.errstate(all="raise", under="ignore"):
            for depth, candidates in enumerate((2, 2) if exchange.allows_trees else (1, 1)):
                drawn = []
                for at, _ in enumerate(tree.level):
                    ours = (spread * rng.standard_normal(300)).astype(np.float32)
                    ours[shared.draft_ids] -= np.float32(away)
                    row = project(ours[None])[0]
                    place = DrawKey(4, depth, range(at * candidates, (at + 1) * candidates))
                    result, q = exchange.draw(row, law, place)
                    drawn.append(result)
                    rows.append(q)
                    assert 0.5 <= predicted_acceptance(row) <= 1.0
                tree.grow(drawn)
            draft = exchange.make_draft(tree, rows)
            frames = [bytes(part) for part in exchange.encode_draft(draft, ids([]), size)]
            admitted = exchange.decode_draft(frames, size)
        assert np.isin(admitted.ids, shared.target).all()
        assert np.isin(support(admitted, draft), shared.target).all()


def support(admitted, draft):
    """All tokens that a q gives a weight to: what was sent, under `dssd` what the device keeps."""
    if isinstance(admitted, SplitDraft):
        assert admitted.weights.min() >= 1
        return np.flatnonzero(np.any(draft.rows, axis=0))
    if isinstance(admitted, DenseDraft):
        return np.flatnonzero(np.any(admitted.q, axis=0))
    assert isinstance(getattr(admitted, "q", None), SparseRows), (
        f"No line here reads the distributions of a {type(admitted).__name__}: add one that "
        "returns the tokens to which they give a weight."
    )
    for at in range(len(admitted.q)):
        assert admitted.q.row(at).weights.min() >= 1.0
    return admitted.q.ids


def test_q_is_the_drafters_own_over_the_shared_tokens():
    pair = pair_of("partial")
    row = drafter_of(pair, 1).logits((2,))
    projected = pair.bridge().project(row[None])[0]
    _, q = EXACT["dsd fp32"].draw(projected, SamplingParams(sampling=ONE, seed=1), DrawKey(2, 0))
    weights = np.exp(row.astype(np.float64))[pair.shared.draft_ids]
    np.testing.assert_allclose(q[pair.shared.target], weights / weights.sum(), rtol=1e-6)
    assert q.sum() == pytest.approx(1.0, abs=1e-6)
