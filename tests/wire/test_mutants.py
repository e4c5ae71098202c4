"""Tests of the tests: rules with one small mistake each, which the exactness tests must see.

Each mutant is the real function but for the line below its comment. Where chance is told, the
enumeration measures how far the output law is off; where the keyed draws are wrong, χ² does.
"""

from functools import cache, partial

import numpy as np
import pytest

from pilotfish.speculation.candidates import CandidateOutcome, choose, residual
from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.randomness import Purpose, noise, sample, uniforms
from pilotfish.speculation.rows import Row
from pilotfish.speculation.split import systematic
from pilotfish.speculation.tree import Walk, chain, verify
from pilotfish.speculation.truncation import truncate
from pilotfish.wire.codecs.counts import decode_counts
from pilotfish.wire.protocols import Decision, DrawKey
from pilotfish.wire.protocols.adaptive import Adaptive
from pilotfish.wire.protocols.draws import coins, sample_candidates, sample_next
from pilotfish.wire.protocols.dsd import Dsd
from pilotfish.wire.protocols.dssd import P_BITS, Dssd
from pilotfish.wire.protocols.tree import TokenTree
from pilotfish.wire.protocols.tslt import Tslt
from tests.support.enumeration import (
    Ended,
    Model,
    distribution_of,
    draw,
    law_of,
    output_law,
    p_value,
    pick_interval,
    play_split_round,
    target_law,
    tv,
)
from tests.support.rounds import EXACT, SAMPLED, Setting, exact_law, frequencies

SEEN = 0.005  # total variation of two tokens, where the real rules stay below 1e-12
VOCAB = 4
SEEDS = 1500
PAIRS = [(Model(VOCAB, seed, 0), Model(VOCAB, seed, 1)) for seed in (0, 27, 28, 39)]
ONE = Sampling(temperature=1.0)


def worst(play):
    """The TV of what ``play(drafter, p, chance)`` puts out, on the pair where it is largest."""
    results = []
    for target, drafter in PAIRS:
        p = law_of(target, ONE)
        law = output_law(partial(play, drafter, p), p, 2)
        results.append(tv(law, target_law(p, 2)))
    return max(results)


def dense(drafter):
    return Row(law_of(drafter, ONE)(()))


def only_the_likeliest(drafter):
    return truncate(drafter.logits(()), Sampling(temperature=1.0, top_k=1)).row(0)


def ended(choice, drawn, p):
    """What follows one position."""
    if choice.accepted is None:
        return Ended((), choice.residual)
    token = drawn[choice.accepted]
    return Ended((token,), p((token,)))


# One position, k candidates


def play_position(k, drafter, p, chance, *, rule=choose, order=list):
    """The real one, unless another rule or order is given."""
    q = dense(drafter)
    drawn = order(draw(q, k, chance))
    return ended(rule(drawn, q, p(()), chance.coin), drawn, p)


def choose_inverted(candidates, q, p, coin):
    rest = p / p.sum(dtype=np.float64)
    for index, token in enumerate(candidates):
        # the mutant: q/p, as tslt's Algorithm 3 prints it
        if coin(q.probability(token) / max(q.probability(token), float(rest[token]))):
            return CandidateOutcome(index, None)
        rest = residual(rest, q)
    return CandidateOutcome(None, rest)


def choose_without_renormalising(candidates, q, p, coin):
    rest = p / p.sum(dtype=np.float64)
    for index, token in enumerate(candidates):
        if coin(min(1.0, float(rest[token]) / q.probability(token))):
            return CandidateOutcome(index, None)
        # the mutant: max(0, p − q) of the next candidate is left as it is
        rest = np.maximum(rest - distribution_of(q, len(rest)), 0.0)
    return CandidateOutcome(None, rest if rest.any() else p)


def choose_always_against_p(candidates, q, p, coin):
    first = rest = p / p.sum(dtype=np.float64)
    for index, token in enumerate(candidates):
        # the mutant: each candidate meets p, not what the rejections before it have left
        if coin(min(1.0, float(first[token]) / q.probability(token))):
            return CandidateOutcome(index, None)
        rest = residual(rest, q)
    return CandidateOutcome(None, rest)


def resample_p(candidates, q, p, coin):
    choice = choose(candidates, q, p, coin)
    # the mutant: p after a rejection, not the residual
    return choice if choice.residual is None else CandidateOutcome(None, p)


def distinct(drawn):
    return list(dict.fromkeys(drawn))


def choose_by_one_draw(candidates, q, p, coin):
    passed = 0.0  # the largest ratio that the one uniform was not below

    def toss_again(probability):
        nonlocal passed
        # the mutant: no fresh draw for a further candidate
        below = coin(max(0.0, (probability - passed) / (1.0 - passed)))
        passed = max(passed, probability)
        return below

    return choose(candidates, q, p, toss_again)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_real_rule_is_exact(k):
    assert worst(partial(play_position, k)) < 1e-12


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("rule", [choose_inverted, resample_p])
def test_wrong_at_any_number_of_candidates(rule, k):
    assert worst(partial(play_position, k, rule=rule)) > SEEN


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize(
    "rule", [choose_without_renormalising, choose_always_against_p, choose_by_one_draw]
)
def test_wrong_between_candidates(rule, k):
    assert worst(partial(play_position, 1, rule=rule)) < 1e-12  # not a mistake with one
    assert worst(partial(play_position, k, rule=rule)) > SEEN


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("order", [sorted, partial(sorted, reverse=True), distinct])
def test_candidates_sorted_or_deduplicated(order, k):
    assert worst(partial(play_position, k, order=order)) > SEEN


# Windows


def play_truncated_after_sampling(drafter, p, chance):
    drawn = draw(dense(drafter), 1, chance)
    # the mutant: drawn from q, verified against q̂; what q̂ does not have is rejected
    q = only_the_likeliest(drafter)
    if not q.probability(drawn[0]):
        return Ended((), residual(p(()) / p(()).sum(dtype=np.float64), q))
    return ended(choose(drawn, q, p(()), chance.coin), drawn, p)


def play_dropped_after_sampling(drafter, p, chance):
    q = dense(drafter)
    drawn = draw(q, 1, chance)
    # the mutant: an unlikely token is not sent, and the window ends before it
    if q.probability(drawn[0]) < 0.2:
        return Ended((), p(()))
    return ended(choose(drawn, q, p(()), chance.coin), drawn, p)


def test_q_truncated_after_sampling():
    assert worst(play_truncated_after_sampling) > SEEN


def test_a_token_dropped_after_sampling():
    assert worst(play_dropped_after_sampling) > SEEN


# Split verification


def play_split(drafter, p, chance, *, bits=2, offset=None):
    """The real one, unless another offset than an independent uniform is given."""
    return play_split_round(1, cache(lambda _: dense(drafter)), p, chance, bits=bits, offset=offset)


def play_split_with_one_draw(drafter, p, chance, *, bits=2):
    q = dense(drafter)
    (token,) = draw(q, 1, chance)
    low, high = pick_interval([p(())], bits, chance)
    counts = systematic(p(()), bits, (low + high) / 2)
    ratio = counts[token] / 2.0**bits / q.probability(token)
    # the mutant: accepted iff u < ratio, with the u that has rounded p and lies in (low, high)
    if chance.coin(min(1.0, max(0.0, (ratio - low) / (high - low)))):
        return Ended((token,), p((token,)))
    return Ended((), residual(counts * 2.0**-bits, q))


def play_split_against_p(drafter, p, chance, *, bits=2):
    q = dense(drafter)
    drawn = draw(q, 1, chance)
    low, high = pick_interval([p(())], bits, chance)
    counts = systematic(p(()), bits, (low + high) / 2)
    # the mutant: accepted against p, while P̃ is shipped
    if choose(drawn, q, p(()), chance.coin).accepted is not None:
        return Ended((drawn[0],), p((drawn[0],)))
    return Ended((), residual(counts * 2.0**-bits, q))


@pytest.mark.parametrize("bits", [2, 3])
def test_rounding_of_p(bits):
    assert worst(partial(play_split, bits=bits)) < 1e-12
    # the mutant: rounded the same way every time, so that the law is P̃
    plain = partial(play_split, bits=bits, offset=lambda p, bits, chance: 0.5)
    assert worst(plain) > SEEN
    assert worst(partial(play_split_with_one_draw, bits=bits)) > SEEN
    assert worst(partial(play_split_against_p, bits=bits)) > SEEN


# Real protocols with one mistake each: most use one draw twice


class AcceptsByDraftNoise(Dsd):
    def verify(self, draft, logits, law, *, round_start):
        gamma = len(draft.ids)
        # the mutant: Purpose.DRAFT, not ACCEPT
        draws = uniforms(gamma, law.seed, Purpose.DRAFT, round_start, round_start=round_start)
        walk = verify(
            chain(gamma),
            draft.ids,
            lambda node: Row(draft.q[node]),
            lambda node: probabilities(logits[node : node + 1], law.sampling)[0],
            lambda candidate, probability: bool(draws[candidate] < probability),
        )
        return Decision(walk.node, sample_next(walk, law, DrawKey(round_start, walk.node)))


class FollowsByDraftNoise(Dsd):
    """Its last token repeats a race; ``back`` positions before it."""

    def __init__(self, back):
        super().__init__()
        self.back = back

    def verify(self, draft, logits, law, *, round_start):
        gamma = len(draft.ids)
        walk = verify(
            chain(gamma),
            draft.ids,
            lambda node: Row(draft.q[node]),
            lambda node: probabilities(logits[node : node + 1], law.sampling)[0],
            coins(gamma, law, round_start),
        )
        at = round_start + walk.node
        if walk.rejected == (self.back == 0):
            # the mutant: Purpose.DRAFT, not RESIDUAL or BONUS
            words = noise(
                len(walk.weights), law.seed, Purpose.DRAFT, at - self.back, round_start=round_start
            )
            return Decision(walk.node, sample(walk.weights, words))
        return Decision(walk.node, sample_next(walk, law, DrawKey(round_start, walk.node)))


class OneRaceForAllCandidates(TokenTree):
    def draw(self, logits, law, place):
        q = truncate(logits, law.sampling)
        # the mutant: the first candidate's race for all
        drawn = sample_candidates(q.row(0), law, DrawKey(place.round_start, place.depth))
        return drawn * len(place.candidates), q


class SendsMoreThanItDrawsFrom(Tslt):
    def draw(self, logits, law, place):
        # the mutant: drawn from the likeliest token, sent with the whole of q̂
        drawn = sample_candidates(truncate(logits, law.sampling, 1).row(0), law, place)
        return drawn, truncate(logits, law.sampling)


class ResamplesThePart(Dssd):
    def finish_round(self, draft, decision, law, *, round_start, vocab_size):
        if decision.token is not None:
            return decision.token
        rounded = decode_counts(decision.frames[0], vocab_size, P_BITS)
        # the mutant: a sample of P̃, not of the residual
        walk = Walk(decision.accepted, rounded.astype(np.float64), rejected=True)
        return sample_next(walk, law, DrawKey(round_start, decision.accepted))


class ResamplesTheTarget(Adaptive):
    def verify(self, draft, logits, law, *, round_start, hidden=None):
        decision = super().verify(draft, logits, law, round_start=round_start)
        if decision.accepted == len(draft.ids):
            return decision
        # the mutant: a sample of p after a rejection, not of the residual
        p = probabilities(logits[decision.accepted : decision.accepted + 1], law.sampling)[0]
        walk = Walk(decision.accepted, p, rejected=True)
        return decision._replace(token=sample_next(walk, law, DrawKey(round_start, walk.node)))


MUTANTS = {
    "accept by the draft's": (AcceptsByDraftNoise(), Setting("dsd", (1,)), 1),
    "residual by the draft's": (FollowsByDraftNoise(0), Setting("dsd", (1,), seed=14), 1),
    "bonus by the last draft's": (FollowsByDraftNoise(1), Setting("dsd", (1,)), 2),
    "tree": (OneRaceForAllCandidates(), Setting("tree", (2,)), 1),
    "tslt": (SendsMoreThanItDrawsFrom(), Setting("tslt", (1,)), 1),
    "dssd": (ResamplesThePart(), Setting("dssd", (1,)), 1),
    "adaptive": (
        ResamplesTheTarget(EXACT["adaptive"].options), Setting("adaptive", (1,)), 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("mutant", "setting", "length"), MUTANTS.values(), ids=MUTANTS)
def test_one_draw_for_two_purposes(mutant, setting, length):
    wanted = exact_law(setting.models[0], ONE, length) * SEEDS
    assert p_value(frequencies(setting, SEEDS, exchange=mutant, length=length), wanted) < 1e-6


def test_every_protocol_that_samples_has_a_mutant():
    missing = {EXACT[name].name for name in SAMPLED} - {each.name for each, *_ in MUTANTS.values()}
    assert not missing, (
        f"No mutant shows that the tests see a mistake in {', '.join(sorted(missing))}. Add to "
        "MUTANTS in tests/wire/test_mutants.py a subclass of the protocol with one mistake in "
        f"`draw`, `verify` or `finish_round` that changes the law: over {SEEDS} seeds the test "
        "must reject it with p < 1e-6."
    )
