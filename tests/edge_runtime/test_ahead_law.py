"""The text of `ahead` is the target's own, token for token, whatever hints do and whenever.

`tests.support.ahead_ends` plays both halves as they ship. The schedule is hypothesis's: which end
goes on, which hint arrives, twice, late or never, which is forged. The reference chooses token by
token from the target's logits.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.edge_runtime import streams
from pilotfish.engines.artifact import Artifact
from pilotfish.speculation.agreement import count_agreed
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.randomness import Purpose
from pilotfish.wire.protocols import Decision, SamplingParams, choose
from pilotfish.wire.protocols.ahead import HintChain
from tests.support.ahead_ends import CONTEXT, END, ME, MOVES, VOCAB, moves, own_text, play
from tests.support.enumeration import Model, kinds, samplings
from tests.support.examples import examples
from tests.support.tiny import tiny_artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Artifact:
    return tiny_artifact(tmp_path_factory.mktemp("law") / "target", vocab=VOCAB, context=CONTEXT)


@given(
    kinds,
    st.integers(0, 9),
    samplings,
    st.integers(0, 99),
    st.lists(st.integers(0, END), min_size=1, max_size=4),
    st.integers(1, 50),
    st.lists(moves, max_size=80),
    st.sampled_from([(0.03, 0.0), (0.03, 0.001), (0.0, 0.0), (0.001, 0.01)]),
)
@examples(120)
def test_any_schedule_gives_the_targets_own_text(
    artifact, kind, seed, sampling, draws, prompt, requests, schedule, pace
):
    models = tuple(Model(VOCAB, seed, side, kind) for side in (0, 1))
    law = SamplingParams(sampling=sampling, seed=draws)
    play(artifact, models, law, prompt, requests, schedule, pace)


@given(
    kinds,
    st.integers(0, 9),
    samplings,
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, END)), max_size=6),
    st.lists(moves, max_size=20),
    st.sampled_from([(0.03, 0.0), (0.001, 0.01)]),
)
@examples(60)
def test_any_prediction_gives_the_targets_own_text(
    artifact, kind, seed, sampling, requests, changes, schedule, pace
):
    """The prediction is the text itself with some changes: drafts of it are right and wrong."""
    models = tuple(Model(VOCAB, seed, side, kind) for side in (0, 1))
    law = SamplingParams(sampling=sampling, seed=seed)
    predicted = own_text(models[0], law, [1, 2], requests)
    for at, token in changes:
        predicted[at : at + token % 2] = [token]  # one token replaced, or inserted
    play(artifact, models, law, [1, 2], requests, schedule, pace, predicted[:CONTEXT])


def test_a_right_prediction_takes_few_passes(artifact):
    model = Model(VOCAB, 3, 0, "random")
    laws = [SamplingParams(sampling=Sampling(temperature=1.0), seed=seed) for seed in range(99)]
    law = max(laws, key=lambda law: len(own_text(model, law, [1, 2], 30)))
    predicted = own_text(model, law, [1, 2], 30)
    assert len(predicted) > 20
    passes = [
        len(play(artifact, (model, model), law, [1, 2], 30, [], (0.03, 0.001), text).sent[ME])
        for text in ([], predicted)
    ]
    assert passes[1] < len(predicted) / 3 < passes[0]


def random_games(number: int) -> Iterator[dict]:
    """Make games in which hints mostly arrive, and many of them come true."""
    for seed in range(number):
        rng = random.Random(seed)
        schedule = []
        for _ in range(30):
            drafts = [("draft", 0, [])] * rng.choice([1, 2, 5, 12])
            schedule += [*drafts, ("tell", 0, []), ("arrive", 0, [])]
            schedule += [(rng.choice(MOVES), rng.randrange(8), [rng.randrange(VOCAB)] * 3)]
            schedule += [("pass", 0, []), ("receive", 0, [])] * rng.choice([1, 1, 2])
        yield {
            "models": (
                Model(VOCAB, seed % 7, 0, kind := rng.choice(["equal", "random"])),
                Model(VOCAB, seed % 7, 1, kind),
            ),
            "law": SamplingParams(sampling=Sampling(temperature=rng.choice([0.0, 1.0])), seed=seed),
            "prompt": [1, 3],
            "requests": rng.choice([3, 7, 16, 30]),
            "schedule": schedule,
        }


def test_a_game_leaves_no_descriptor_open(artifact):
    """A pipe that the garbage collector closes is a warning in whatever test runs by then."""
    gc.collect()
    gc.disable()
    try:
        before = open_descriptors()
        play(artifact, **next(random_games(1)))
        assert open_descriptors() == before
    finally:
        gc.enable()


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def play_all(artifact: Artifact, games: Iterator[dict]) -> None:
    for game in games:
        play(artifact, **game)


def test_these_games_have_long_runs_of_drafts_that_come_true(artifact):
    """Else the mutants below would be none; ends and limits fall within runs, too."""
    drafted = accepted = within = 0
    for game in random_games(40):
        edge = play(artifact, **game)
        for reply, ids in edge.sent[ME]:
            drafted, accepted = drafted + reply.drafted, accepted + reply.accepted
            within += 0 < reply.accepted == len(ids)  # no token after the drafts
    assert drafted > 300
    assert 0.3 < accepted / drafted < 0.95
    assert within > 3


def right(generation, position, drafts, processor, logits, hidden):
    """The rule itself, in the form of the mutants."""
    law = generation.sampling_params

    def chosen(at):
        return choose(logits[at], law, position + at, Purpose.TARGET)

    return Decision(*count_agreed(drafts, chosen))


def accepts_one_unchecked(generation, position, drafts, processor, logits, hidden):
    law = generation.sampling_params
    if drafts:
        accepted, token = count_agreed(
            drafts[1:], lambda at: choose(logits[at + 1], law, position + at + 1, Purpose.TARGET)
        )
        return Decision(accepted + 1, token)
    return Decision(0, choose(logits[0], law, position, Purpose.TARGET))


def noise_off_by_one(generation, position, drafts, processor, logits, hidden):
    law = generation.sampling_params

    def chosen(at):
        return choose(logits[at], law, position + at + (at > 0), Purpose.TARGET)

    return Decision(*count_agreed(drafts, chosen))


def rows_off_by_one(generation, position, drafts, processor, logits, hidden):
    law = generation.sampling_params

    def chosen(at):
        return choose(logits[max(0, at - 1)], law, position + at, Purpose.TARGET)

    return Decision(*count_agreed(drafts, chosen))


def never_the_token_after(generation, position, drafts, processor, logits, hidden):
    law = generation.sampling_params
    accepted, token = count_agreed(
        drafts, lambda at: choose(logits[at], law, position + at, Purpose.TARGET)
    )
    return Decision(accepted, drafts[-1] if drafts else token)


MUTANTS = {
    "accepts one draft unchecked": ("_verify", accepts_one_unchecked),
    "noise of the next position": ("_verify", noise_off_by_one),
    "logits of the position before": ("_verify", rows_off_by_one),
    "the last draft instead of the token": ("_verify", never_the_token_after),
    "goes on behind an end token": ("_cut_at_end", lambda ends, ids: ids),
}


@pytest.mark.parametrize(("name", "mutant"), MUTANTS.values(), ids=MUTANTS.keys())
def test_a_planted_fault_shows(artifact, monkeypatch, name, mutant):
    monkeypatch.setattr(streams, name, mutant)
    with pytest.raises(AssertionError):
        play_all(artifact, random_games(40))


def test_a_planted_copy_of_the_rule_shows_nothing(artifact, monkeypatch):
    """So the mutants fail by their faults, and not by the way in which they are called."""
    monkeypatch.setattr(streams, "_verify", right)
    play_all(artifact, random_games(10))


def test_the_rule_holds_the_law_whatever_the_chain_keeps(artifact, monkeypatch):
    """A fault of the chain costs passes, and no token."""
    monkeypatch.setattr(HintChain, "drop_committed", lambda self, ids: None)
    for game in random_games(10):
        play(artifact, **game)
