"""Tests of the tests: bridges with one small mistake each, which must be seen.

A bridge may draft what it likes as long as q is what was drawn from, and was there before the draw
(`test_law.py`). Which q that is has to follow from the committed text alone, or else an answer
would depend on how its rounds happened to go: on what was drafted and discarded.
"""

from functools import cache

import numpy as np
import pytest

from pilotfish.bridge.bridge import SharedTokensBridge
from pilotfish.bridge.shared import SharedTokens
from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.speculation.candidates import choose
from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.projection import Projection
from pilotfish.speculation.rows import Row
from pilotfish.speculation.truncation import truncate
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, SamplingParams
from tests.support.bridged import END, WORDS, ids, pair_of
from tests.support.enumeration import Ended, draw
from tests.support.rounds import ONE, PROMPT
from tests.support.tiny import tiny_artifact
from tests.wire.test_mutants import SEEN, VOCAB, ended, worst

# Tokens 0 and 1 are shared. The drafter's 2 is 1 in another spelling, its 3 is not the target's.
SHARED = SharedTokens(
    draft_ids=np.array([0, 1]),
    target=np.array([0, 1]),
    specials={},
    draft_size=VOCAB,
    target_size=VOCAB,
)
SAME_BYTES = [0, 1, 1]
TOP_2 = Sampling(temperature=1.0, top_k=2)


def projected(drafter, context=(), sampling=ONE):
    """q over the target's tokens, after the drafter's own."""
    logits = Projection(SHARED.to_target_ids(), SHARED.target_size)(drafter.logits(context)[None])
    return Row(probabilities(logits, sampling)[0])


def of_its_own(drafter):
    """q over the drafter's tokens."""
    return Row(probabilities(drafter.logits(())[None], ONE)[0])


def play_projected(drafter, p, chance):
    q = projected(drafter)
    drawn = draw(q, 1, chance)
    return ended(choose(drawn, q, p(()), chance.coin), drawn, p)


def play_with_two_spellings(drafter, p, chance):
    # the mutant: whichever spelling is drawn, with the probability of the canonical one
    spellings = Row(of_its_own(drafter).weights[: len(SAME_BYTES)])
    drawn = [SAME_BYTES[token] for token in draw(spellings, 1, chance)]
    return ended(choose(drawn, projected(drafter), p(()), chance.coin), drawn, p)


def play_without_renormalising(drafter, p, chance):
    (token,) = draw(projected(drafter), 1, chance)
    # the mutant: verified against the drafter's own probabilities, which do not sum to 1
    q = np.zeros(VOCAB)
    q[:2] = of_its_own(drafter).probabilities()[:2]
    if chance.coin(min(1.0, p(())[token] / q[token])):
        return Ended((token,), p((token,)))
    return Ended((), np.maximum(p(()) - q, 0.0))


def play_with_substitutes(drafter, p, chance):
    q = projected(drafter)
    # the mutant: what the target lacks is replaced by the likeliest of what it has
    drawn = [
        token if token < 2 else int(q.weights.argmax())
        for token in draw(of_its_own(drafter), 1, chance)
    ]
    return ended(choose(drawn, q, p(()), chance.coin), drawn, p)


def play_withholding(drafter, p, chance):
    q = projected(drafter)
    drawn = draw(q, 1, chance)
    # the mutant: a token that the drafter would merge with the text is not sent
    if drawn == [1]:
        return Ended((), p(()))
    return ended(choose(drawn, q, p(()), chance.coin), drawn, p)


def play_retold(drafter, p, chance):
    drawn = draw(projected(drafter), 1, chance)
    # the mutant: q is read once more, after the text in the tokens that the draw has made of it
    return ended(choose(drawn, projected(drafter, (1,)), p(()), chance.coin), drawn, p)


def play_truncated_too_soon(drafter, p, chance):
    # the mutant: drawn from the drafter's own top 2, as far as shared; sent, the top 2 of those
    to_draft_ids = truncate(drafter.logits(()), TOP_2).row(0)
    selection = to_draft_ids.ids < 2
    if not selection.any():
        return Ended((), p(()))
    drawn = draw(Row(to_draft_ids.weights[selection], to_draft_ids.ids[selection]), 1, chance)
    q = projected(drafter, sampling=TOP_2)
    return ended(choose(drawn, q, p(()), chance.coin), drawn, p)


def test_the_real_projection_is_exact():
    assert worst(play_projected) < 1e-12


@pytest.mark.parametrize(
    "mutant",
    [
        play_with_two_spellings,
        play_without_renormalising,
        play_with_substitutes,
        play_withholding,
        play_retold,
        play_truncated_too_soon,
    ],
)
def test_what_is_drawn_is_not_what_is_sent(mutant):
    assert worst(mutant) > SEEN


# What q follows from

LAW = SamplingParams(sampling=ONE, seed=3)
ROUNDS = 10


class KeepsWhatWasDiscarded(ModelDrafter):
    """It goes by how much was read, not by what."""

    def _run(self, ids, rows=1, **others):
        # the mutant: what was read is not compared
        read = self._shared_model.engine.contents.chain(self._slot)[: len(ids) - 1]
        return super()._run(np.concatenate([read, ids[len(read) :]]), rows, **others)


class NeverReencodes(SharedTokensBridge):
    """The drafter's tokens are never told anew."""

    def start(self, prompt):
        super().start(prompt)
        self._note_generation, self._known = list(prompt.draft_ids), len(prompt.ids)

    def context(self, committed):
        # the mutant: only what is new is encoded, by itself
        new, self._known = committed[self._known :], len(committed)
        self._translator.restart()
        self._note_generation += self._translator.translate(new).tolist()
        return np.array(self._note_generation)


class RemembersDrafts(SharedTokensBridge):
    """What was drafted stays in the drafter's context."""

    def start(self, prompt):
        super().start(prompt)
        self._drafted = []

    def to_draft_ids(self, drafted):
        result = super().to_draft_ids(drafted)
        self._drafted += result.tolist()
        return result

    def context(self, committed):
        # the mutant: behind what is committed stands what was drafted before
        return np.concatenate([super().context(committed), self._drafted]).astype(np.int64)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    return cache(
        lambda words: tiny_artifact(folder / words, tokens=WORDS[words][0], eos=END, seed=5)
    )


def furthest_off(words, artifact, expansion, drafter=ModelDrafter, bridge=None):
    """How far the logits after committed tokens are from those of a drafter that has read these
    alone, at most, in rounds that are accepted in part.
    """
    pair, exchange = pair_of(words), PROTOCOL_REGISTRY["tree"]
    opened = drafter.open(artifact, provider="cpu", threads=1, context=None)
    opened.set_bridge(pair.bridge() if bridge is None else bridge(pair.shared, pair._translator()))
    opened.start(pair.prompt(PROMPT))
    alone, rng = Decoder(artifact, threads=1), np.random.default_rng(1)
    committed, most = PROMPT, 0.0
    for _ in range(ROUNDS):
        draft = opened.draft(ids(committed), expansion, exchange, LAW, ends=())
        path = draft.path(int(rng.integers(len(draft.ids) + 1)))
        info = [int(draft.ids[node - 1]) for node in path]
        committed = (*committed, *info, int(rng.integers(pair.target.vocab_size)))
        wanted = read_alone(alone, pair, committed)[pair.shared.target]
        result = opened.logits(ids(committed))[pair.shared.target]
        most = max(most, float(np.abs(result - wanted).max()))
    return most


def read_alone(decoder, pair, committed):
    """Logits after the prompt and the answer's text, read at once by an empty decoder."""
    bridge = pair.bridge()
    bridge.start(pair.prompt(PROMPT))
    to_draft_ids = bridge.context(ids(committed))
    decoder.rollback(0, 0)
    logits = decoder.forward([Pass(slot=0, tokens=to_draft_ids, rows=1)])[0].logits
    return bridge.project(logits)[0]


@pytest.mark.parametrize("expansion", [(1, 1, 1), (2, 2), (1, 1, 2)])
@pytest.mark.parametrize("words", WORDS)
def test_q_follows_from_the_committed_text_alone(words, expansion, artifacts):
    assert furthest_off(words, artifacts(words), expansion) < 1e-3


@pytest.mark.parametrize(
    "mutant",
    [
        {"drafter": KeepsWhatWasDiscarded},
        {"bridge": NeverReencodes},
        {"bridge": RemembersDrafts},
    ],
    ids=lambda mutant: next(iter(mutant.values())).__name__,
)
def test_a_q_that_the_rounds_before_steer_is_seen(mutant, artifacts):
    assert furthest_off("partial", artifacts("partial"), (1, 1, 1), **mutant) > 0.1
