"""Walks of `adaptive`: each relaxation commits what device and edge commit with its options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from pilotfish import Device, EdgeServer, Generation
from pilotfish.lab.judge.model_passes import Procedure
from pilotfish.lab.judge.relaxed_walks import RelaxedSampling, RelaxedTrajectory, relaxed_walks
from pilotfish.lab.judge.tasks import Question
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.protocols.adaptive import Adaptive, RelaxationOptions
from tests.lab.judge.test_trajectories import MOST, QUESTIONS, JudgedPair, models

__all__ = ["models"]  # a fixture
WINDOW, TOP_K = 4, 12
LAMBDAS = (2.0, 0.2, 0.3)
TAUS = (0.0, 0.3, 0.6, 1.0)


@pytest.fixture(scope="module")
def device(models: JudgedPair) -> Iterator[Device]:
    """Between real sockets, with the pair of the walks."""
    drafter, target = models.paths
    with EdgeServer(target, threads=1) as edge, Device(drafter, edge.endpoint) as opened:
        yield opened


def walked(models: JudgedPair, taus: Sequence[float], seed: int) -> list[list[RelaxedTrajectory]]:
    """The trajectories of all questions, a list for each."""
    protocols = [Adaptive(RelaxationOptions(tau=tau, lambdas=LAMBDAS)) for tau in taus]
    target, drafter = Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=TOP_K)
    sampling = RelaxedSampling(window=WINDOW, seed=seed, target=target, drafter=drafter)

    def begin(question: Question) -> Procedure[list[RelaxedTrajectory]]:
        return relaxed_walks(models.speaker(question), protocols, sampling)

    table = dict(
        models.readers.run([(item.key, lambda item=item: begin(item)) for item in QUESTIONS])
    )
    return [table[item.key] for item in QUESTIONS]


def generated(device: Device, question: Question, tau: float, seed: int) -> Generation:
    """The answer over the wire."""
    return device.generate(
        question.message,
        protocol="adaptive",
        tau=tau,
        lambdas=LAMBDAS,
        temperature=1.0,
        draft_top_k=TOP_K,
        window=WINDOW,
        max_tokens=MOST,
        seed=seed,
    )


def test_walks_commit_what_device_and_edge_commit(models: JudgedPair, device: Device) -> None:
    differing = key = 0
    for seed in (3, 4):
        for question, trajectories in zip(QUESTIONS, walked(models, TAUS, seed), strict=True):
            differing += len({tuple(walk.tokens) for walk in trajectories}) - 1
            for tau, walk in zip(TAUS, trajectories, strict=True):
                answer = generated(device, question, tau, seed)
                assert walk.tokens == answer.tokens
                assert len(walk.rounds) == len(answer.rounds)
                for ours, theirs in zip(walk.rounds, answer.rounds, strict=True):
                    assert ours.drafted == theirs.window
                    assert ours.accepted == theirs.accepted or theirs is answer.rounds[-1]
                    assert ours.key == theirs.notes["key"] == len(theirs.key)
                    assert ours.deviation == pytest.approx(theirs.notes["deviation"], abs=1e-4)
                    # a clock's or a counter's number may have another size in msgpack
                    assert abs(ours.bytes.up - theirs.uplink_bytes) <= 4
                    assert abs(ours.bytes.down - theirs.downlink_bytes) <= 12
                    key += ours.key
    assert differing > 3
    assert key > 20


def test_together_each_relaxation_is_what_it_is_alone(models: JudgedPair) -> None:
    together = walked(models, TAUS, 5)
    for at, tau in enumerate(TAUS):
        alone = walked(models, [tau], 5)
        for result, (walk,) in zip(together, alone, strict=True):
            assert (result[at].tokens, result[at].rounds) == (walk.tokens, walk.rounds)
