"""Under bias, penalties and min-p every protocol's law is still that of the target alone.

All outcomes of a round, as in `test_protocol_outcomes.py`; the reference shapes the target's logits
token by token (`tests.support.shaped`). Rows shaped by another path than their own must be seen.
"""

import re
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.logits_options import Grammar, LogitsOptions, LogitsProcessor
from pilotfish.speculation.randomness import Purpose
from pilotfish.wire.protocols import SamplingParams, choose
from tests.support import rounds
from tests.support.bridged import vocabulary
from tests.support.enumeration import tv
from tests.support.examples import examples
from tests.support.rounds import LOSSLESS, ONE, PROMPT, SAMPLED, Setting, generate
from tests.support.shaped import shaped, shaped_law, shapings
from tests.wire.test_protocol_outcomes import assert_exact, both_laws, small_settings

SEEN = 0.005  # total variation of a round, where the real rules stay below 1e-12
CUT = st.sampled_from([0.0, 0.0, 0.2, 0.7])


START = (1, 2)  # as long as `PROMPT`, which has a token that small models lack


def law_of_setting(setting):
    return shaped_law(setting.models[0], setting.sampling, setting.shaping, START)


@st.composite
def shaped_settings(draw, name):
    setting = draw(small_settings(name))
    return replace(
        setting,
        sampling=replace(setting.sampling, min_p=draw(CUT)),
        drafting=replace(setting.drafting, min_p=draw(CUT)),
        shaping=draw(shapings(setting.vocab)),
    )


@pytest.mark.parametrize("name", SAMPLED)
@given(st.data(), st.integers(1, 4))
@examples(40)
def test_a_round_is_exact_over_all_its_outcomes(name, data, bits):
    setting = data.draw(shaped_settings(name))
    assert_exact(setting, bits, start=START, p=law_of_setting(setting))


HEAVY = LogitsOptions(
    logit_bias={2: 1.0}, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.9
)


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("window", [0, 1, 3])
def test_what_follows_from_the_seed_is_the_targets_own(name, window):
    """Temperature 0 for all, and any temperature for `coupled`: `ahead` shares both its halves."""
    cut = Sampling(temperature=1.2, min_p=0.1) if name == "coupled" else Sampling()
    setting = Setting(name, (1,) * window, cut, cut, shaping=HEAVY)
    for seed in range(5):
        law, reply = SamplingParams(sampling=cut, seed=seed), []
        for _ in range(12):
            text = (*PROMPT, *reply)
            row = shaped(setting.models[0].logits(text[-2:]), PROMPT, reply, HEAVY)
            reply.append(choose(row, law, len(text), Purpose.TARGET))
        assert list(generate(setting, seed, length=12)) == reply


# A grammar

WORDS = ["a", "b", "ab"]
SMALL = 4  # tokens, with the end
REGEXES = ["(a|b|ab)b?a*", "a*", "(ab|b)a?", "b*a", "(a|b)*"]
LONGEST = 9


@cache
def beginnings(regex):
    """All texts of the language up to some length, and what they begin with."""
    texts = {
        text
        for size in range(LONGEST + 1)
        for text in map("".join, product("ab", repeat=size))
        if re.fullmatch(regex, text)
    }
    return texts, {text[:end] for text in texts for end in range(min(6, len(text)) + 1)}


def masked_law(setting):
    """The law after a prefix, by brute force: what does not continue the regex is left out."""
    texts, begun = beginnings(setting.shaping.grammar.text)
    target = setting.models[0]

    def p(prefix):
        row = shaped(target.logits((*START, *prefix)[-2:]), START, prefix, setting.shaping)
        words = WORDS[: setting.vocab - 1]
        reply = "".join((*words, "$")[token] for token in prefix)
        if reply in begun:
            allowed = [reply + word in begun for word in words]
            row[~np.array([*allowed, reply in texts])] = -np.inf
        return probabilities(row[None], setting.sampling)[0]

    return cache(p)


@cache
def grammars(vocab=SMALL):
    return vocabulary(WORDS[: vocab - 1], "<end>").grammars


@pytest.mark.parametrize("name", SAMPLED)
@given(st.data(), st.integers(1, 4), st.sampled_from(REGEXES))
@examples(30)
def test_a_round_under_a_grammar_is_exact_over_all_its_outcomes(name, data, bits, regex):
    setting = data.draw(shaped_settings(name))
    assume(len(setting.expansion) < 3)
    info = replace(setting.shaping, logit_bias={}, grammar=Grammar("regex", regex))
    setting = replace(setting, vocab=SMALL, shaping=info, grammars=grammars())
    assert_exact(setting, bits, start=START, p=masked_law(setting))


class MaskAfterSampling(SamplingParams):
    def logits_processor(self, since, constraint=None):
        # the mutant: rows are not masked; what is not allowed would be refused later
        return super().logits_processor(since)


class MaskOfTheRoot(SamplingParams):
    def logits_processor(self, since, constraint=None):
        class Rooted:
            def forbid(self, logits, answer, paths):
                # the mutant: all rows by the root's own state
                constraint.forbid(logits, answer, [()] * len(paths))

        return super().logits_processor(since, Rooted())


class NotRenormalised(SamplingParams):
    def logits_processor(self, since, constraint=None):
        class Kept:
            def forbid(self, logits, answer, paths):
                # the mutant: what is forbidden gives its mass to the likeliest token
                whole = np.exp(logits - logits.max(1, keepdims=True))
                constraint.forbid(logits, answer, paths)
                left = np.isfinite(logits)
                best = logits.argmax(1)
                for row, keep, at, mass in zip(logits, left, best, whole, strict=True):
                    row[at] = np.log(mass[at] + mass[~keep].sum()) + row.max() - np.log(mass[at])

        return super().logits_processor(since, Kept())


class OnlyTheDevicesMask(SamplingParams):
    """The edge takes the device's word for it: rows are masked by what was drafted."""

    def logits_processor(self, since, constraint=None):
        class Drafted:
            def forbid(self, logits, answer, paths):
                # the mutant: a row that has a draft behind it is not masked
                constraint.forbid(logits[-1:], answer, paths[-1:])

        return super().logits_processor(since, Drafted())


MASKS = [MaskAfterSampling, MaskOfTheRoot, NotRenormalised, OnlyTheDevicesMask]


@pytest.mark.parametrize("mutant", MASKS)
@pytest.mark.parametrize("name", ["dsd", "tree"])
def test_rows_masked_otherwise_are_seen(name, mutant, monkeypatch):
    expansion = (2, 1) if name == "tree" else (1, 1)
    logits_options = LogitsOptions(grammar=Grammar("regex", REGEXES[0]))
    hot = replace(ONE, temperature=1.7)
    setting = Setting(
        name, expansion, hot, hot, vocab=3, shaping=logits_options, grammars=grammars(3)
    )
    p = masked_law(setting)
    assert tv(*both_laws(setting, 0, start=START, p=p)) < 1e-12
    monkeypatch.setattr(rounds, "SamplingParams", mutant)
    assert tv(*both_laws(setting, 0, start=START, p=p)) > SEEN


# Mutants


class ByTheRoot(LogitsProcessor):
    def process(self, logits, text, paths):
        # the mutant: what the window says itself is not counted
        super().process(logits, text, [()] * len(paths))


class ByTheWholeWindow(LogitsProcessor):
    def process(self, logits, text, paths):
        # the mutant: tokens count before they are said
        super().process(logits, text, [max(paths, key=len)] * len(paths))


class PromptCounts(LogitsProcessor):
    def __init__(self, shaping, since):
        # the mutant: the prompt is counted as if it were the answer's
        super().__init__(shaping, 0)


class BiasAtTheRootOnly(LogitsProcessor):
    def process(self, logits, text, paths):
        # the mutant: one row is shaped
        super().process(logits[:1], text, paths[:1])


class AfterTemperature(LogitsProcessor):
    def process(self, logits, text, paths):
        # the mutant: shaped as if the logits were divided by the temperature before
        logits /= np.float32(1.7)
        super().process(logits, text, paths)
        logits *= np.float32(1.7)


MUTANTS = [ByTheRoot, ByTheWholeWindow, PromptCounts, BiasAtTheRootOnly, AfterTemperature]


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("name", ["dsd", "tree"])
def test_rows_shaped_otherwise_are_seen(name, mutant, monkeypatch):
    expansion = (2, 1) if name == "tree" else (1, 1)
    setting = Setting(name, expansion, replace(ONE, temperature=1.7), vocab=3, shaping=HEAVY)
    p = law_of_setting(setting)
    assert tv(*both_laws(setting, 0, start=START, p=p)) < 1e-12

    class Mutated(SamplingParams):
        def logits_processor(self, since, constraint=None):
            return mutant(self.logits_options, since)

    monkeypatch.setattr(rounds, "SamplingParams", Mutated)
    assert tv(*both_laws(setting, 0, start=START, p=p)) > SEEN
