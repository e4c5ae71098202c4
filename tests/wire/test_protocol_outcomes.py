"""A round of each protocol over all its outcomes, not a sample of them: its law is p to 1e-12.

What runs is what ships: drafting, packing, frames, admission, ruling, settling. Only the source of
chance is another: races and uniforms are told by a script (`tests/enumeration.py`).
"""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pilotfish.drafting.window
from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.engines.artifact import Artifact
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, draws, dssd
from pilotfish.wire.protocols.dssd import Dssd
from tests.support.enumeration import (
    Ended,
    kinds,
    law_of,
    output_law,
    pick_interval,
    samplings,
    target_law,
)
from tests.support.examples import examples
from tests.support.rounds import EXACT, ONE, PROMPT, SAMPLED, VARIANTS, Setting, play_round
from tests.support.tiny import tiny_artifact


class Coin:
    """A uniform variate that is decided when it is compared, and that once."""

    def __init__(self, chance):
        self._chance, self._calls = chance, False

    def __lt__(self, probability):
        assert not self._calls
        self._calls = True
        return self._chance.coin(min(1.0, probability))


class Dither:
    """One that is decided when it is read: an interval in which all of these p round the same."""

    def __init__(self, chance, laws, bits):
        self._draws = chance, laws, bits

    def __float__(self):
        chance, laws, bits = self._draws
        return sum(pick_interval(laws, bits, chance)) / 2


def tell(patch, chance, p, vocab, bits):
    """Have all races and uniforms come from ``chance``, and P̃ have ``bits`` bits."""
    at_depth = [[p(prefix) for prefix in product(range(vocab), repeat=depth)] for depth in range(2)]

    def toss(count, *name, **rest):
        return np.array([Coin(chance) for _ in range(count)], dtype=object)

    def read(count, *name, **rest):
        return np.array([Dither(chance, at_depth[i], bits) for i in range(count)], dtype=object)

    patch.setattr(draws, "sample", lambda w, words: chance.pick(w / w.sum(dtype=np.float64)))
    patch.setattr(draws, "uniforms", toss)
    patch.setattr(dssd, "uniforms", read)
    patch.setattr(dssd, "P_BITS", bits)


@st.composite
def small_settings(draw, name):
    trees = [(2,), (2, 1), (1, 2)] if EXACT[name].allows_trees else []
    longer = [(1, 1, 1)] if name in ("dsd", "tslt") else []  # a sample: these take long
    return Setting(
        name,
        draw(st.sampled_from([(1,), (1, 1), *trees, *longer])),
        draw(samplings),
        draw(samplings),
        enough=draw(st.sampled_from([0.0, 0.5, 0.7])),
        seed=draw(st.integers(0, 2**31)),
        vocab=3,
        kind=draw(kinds),
    )


def test_every_protocol_is_enumerated():
    """A protocol with a decision head has no law to follow."""
    for name, exchange in PROTOCOL_REGISTRY.items():
        if exchange.streams or exchange.requires:
            continue
        assert name in EXACT or any(variant.name == name for variant in VARIANTS.values()), (
            f"The protocol {name} is not lossless, so no test enumerates its law. Add it to "
            "VARIANTS in tests/support/rounds.py, with options under which it must be exact."
        )


def test_every_option_is_enumerated():
    for name, exchange in PROTOCOL_REGISTRY.items():
        if not exchange.Options.__struct_fields__ or exchange.streams or exchange.requires:
            continue
        values = [each.options for each in VARIANTS.values() if each.name == name]
        for option in exchange.Options.__struct_fields__:
            default = getattr(exchange.options, option)
            assert any(getattr(each, option) != default for each in values), (
                f"No test enumerates the law of {name} with another {option} than the default. "
                f"Add {type(exchange).__name__}({type(exchange.options).__name__}({option}=…)) to "
                "VARIANTS in tests/support/rounds.py. Choose a value that matters in windows of 1 "
                "to 3 tokens, with a vocabulary of 3 to 5 tokens."
            )


@pytest.mark.parametrize("name", SAMPLED)
@given(st.data(), st.integers(1, 4))
@examples(40)
def test_a_round_is_exact_over_all_its_outcomes(name, data, bits):
    assert_exact(data.draw(small_settings(name)), bits)


@pytest.mark.parametrize(("name", "ends"), [("dsd", ()), ("dsd", (3,)), ("tree", (3,))])
def test_windows_that_the_drafter_itself_ends_early_are_exact(name, ends, tmp_path, monkeypatch):
    """`Drafter.draft` with ``auto`` and end tokens, on a random model of four tokens."""
    drafter = ModelDrafter.open(
        tiny_artifact(tmp_path, vocab=4, seed=4), provider="cpu", threads=1, context=None
    )
    monkeypatch.setattr(pilotfish.drafting.window, "ENOUGH", 0.7)
    levels = set()

    def window(setting, exchange, law, committed):
        ids = np.array(committed, dtype=np.uint32)
        draft = drafter.draft(ids, setting.expansion, exchange, law, ends, auto=True)
        levels.add(draft.depth)
        return draft

    expansion = (1, 1, 1) if name == "dsd" else (1, 1, 2)
    assert_exact(Setting(name, expansion, vocab=4), 0, window)
    assert levels >= {2, 3}


@pytest.mark.parametrize("name", SAMPLED)
def test_windows_from_one_pass_over_masks_are_exact(name, tmp_path):
    """A random model of four tokens and a mask: q of each draft ignores the drafts before it."""
    path = tiny_artifact(tmp_path, vocab=4, padded_vocab=8, seed=4, mask_token=4).path
    drafter = ModelDrafter.open(Artifact.open(path), provider="cpu", threads=1, context=None)
    assert drafter.drafts_per_pass > 1

    def window(setting, exchange, law, committed):
        ids = np.array(committed, dtype=np.uint32)
        return drafter.draft(ids, setting.expansion, exchange, law, ends=())

    # `dssd` rounds p in many ways
    expansion = (1, 1) if isinstance(EXACT[name], Dssd) else (1, 1, 1)
    for sampling in (ONE, Sampling(temperature=0.7, top_k=3)):
        assert_exact(Setting(name, expansion, ONE, sampling, vocab=4), 1, window)
    if EXACT[name].allows_trees:  # all nodes of a level have the same q
        assert_exact(Setting(name, (2, 2), ONE, ONE, vocab=4), 1, window)


def assert_exact(setting, bits, drafter=None, start=PROMPT, p=None):
    """Of a round after the tokens ``start``; ``drafter`` drafts its window (`play_round`).

    p: the law after a prefix; None: that of the target's logits as they are.
    """
    result, wanted = both_laws(setting, bits, drafter, start, p)
    np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-12)


def both_laws(setting, bits, drafter=None, start=PROMPT, p=None):
    """What comes out, over all outcomes, and what should."""
    law = law_of(setting.models[0], setting.sampling)
    p = p or (lambda prefix: law((*start, *prefix)[-2:]))

    def play(chance):
        with pytest.MonkeyPatch.context() as patch:
            tell(patch, chance, p, setting.vocab, bits)
            shared = EXACT[setting.exchange]
            committed, _ = play_round(setting, shared, 0, start, len(start), drafter)
        tokens = committed[len(start) :]
        return Ended(tokens, p(tokens))

    length = len(setting.expansion) + 2
    return output_law(play, p, length), target_law(p, length)
