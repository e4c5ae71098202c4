"""A federation says what the average of its workers says, token for token, or as its law has it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish import Device
from pilotfish.cli.summary import summary
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.ids import decode_ids
from pilotfish.wire.protocols import SamplingParams
from tests.conftest import VOCAB
from tests.support.averaging import tokens_of
from tests.support.enumeration import p_value
from tests.support.federating import SESSIONS, Cast, Ensemble, Running, cast_in, federation
from tests.support.hostile import RawClient, RawSession
from tests.system.test_lossless import ANSWERS, THRESHOLD, frequencies, law_after
from tests.system.test_lossless import PROMPT as SHORT

PROMPT = [3, 1, 4, 1, 5]
SLOW = pytest.mark.slow


# Texts

FEDERATIONS = {
    "ab": ("ab", (), {"kept": 16}),
    "unequal": ("ab", (0.7, 0.3), {"kept": 8, "values": "fp32", "reconstruction": "spread"}),
    "abc": ("abc", (1.0, 2.0, 3.0), {"kept": 12, "values": "levels"}),
    "whole": ("ab", (), {"kept": VOCAB, "values": "fp32"}),
}  # fmt: skip


@dataclass
class Pairing:
    """A federation that serves, a device of it, and what it should say."""

    running: Running
    device: Device
    ensemble: Ensemble
    alone: Ensemble  # its first worker

    def check(self, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
        """The answer, which is the ensemble's own."""
        shape = {k: options[k] for k in ("temperature", "top_k", "top_p") if k in options}
        law = SamplingParams(sampling=Sampling(**shape), seed=options.get("seed", 0))
        wanted = self.ensemble.decode(prompt, count, law)
        got = self.device.generate(prompt, max_tokens=count, **options).tokens
        self.ensemble.assert_same(prompt, law, got, wanted)
        return got


@pytest.fixture(
    scope="module",
    params=["abc", *(pytest.param(name, marks=SLOW) for name in ("ab", "unequal", "whole"))],
)
def pairing(
    request: pytest.FixtureRequest, cast: Cast, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pairing]:
    names, weights, settings = FEDERATIONS[request.param]
    models = [getattr(cast, name) for name in names]
    averaged = {k: settings[k] for k in ("kept", "values", "reconstruction") if k in settings}
    folder = tmp_path_factory.mktemp("federation")
    with (
        federation(folder, models, weights, **settings) as running,
        Device(cast.draft, running.endpoint, threads=1) as device,
    ):
        ensemble = Ensemble(models, weights, **averaged)
        yield Pairing(running, device, ensemble, Ensemble(models[:1], **averaged))


def test_greedy_is_the_ensembles_own_decoding(pairing: Pairing) -> None:
    alike = []
    for seed, window in enumerate([0, 1, 2, 3, 5, 8]):
        prompt = tokens_of(seed, 6).tolist()
        got = pairing.check(prompt, 50, protocol="greedy", window=window)
        alike.append(
            got == pairing.alone.decode(prompt, 50, SamplingParams(sampling=Sampling(), seed=0))
        )
    assert not all(alike)  # it is not that of one worker


@pytest.mark.parametrize(
    "shape",
    [
        {"temperature": 0.5},
        {"temperature": 1.0},
        {"temperature": 1.5},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.8},
    ],
)
def test_coupled_is_the_ensembles_own_sample(pairing: Pairing, shape: dict[str, float]) -> None:
    texts = {
        tuple(pairing.check(PROMPT, 50, protocol="coupled", window=3, seed=seed, **shape))
        for seed in range(4)
    }
    assert len(texts) > 2


def test_trees_are_verified_by_all_workers(pairing: Pairing) -> None:
    """A drafter that samples grows true trees, of which paths are kept by every worker."""
    for seed, expansion in enumerate([(2, 2, 1), (3, 2), (1, 2, 1, 2), (5,), (2, 1, 2)]):
        prompt = tokens_of(seed, 6).tolist()
        options = {"expansion": expansion, "draft_temperature": 1.3}
        pairing.check(prompt, 40, protocol="tree", seed=seed, **options)


@pytest.mark.parametrize("protocol", ["dsd", "tslt", "dssd", "stream"])
def test_every_protocol_is_greedy_at_temperature_zero(pairing: Pairing, protocol: str) -> None:
    for seed in range(2):
        prompt = tokens_of(seed, 6).tolist()
        pairing.check(prompt, 40, protocol=protocol, seed=seed)


def test_a_prompt_of_several_chunks(pairing: Pairing) -> None:
    for seed in range(3):
        prompt = tokens_of(seed, 200).tolist()
        pairing.check(prompt, 30, protocol="coupled", window=4, seed=seed, temperature=1.0)


@pytest.mark.parametrize("protocol", ["tslt", "tree"])
def test_every_round_reports_the_mass_that_was_left_out(pairing: Pairing, protocol: str) -> None:
    """Bound (19) of the verified positions, also in figures of answers."""
    options = {"expansion": (2, 2, 1)} if protocol == "tree" else {"window": 3}
    sampled = {"temperature": 1.0, "draft_temperature": 1.3, "seed": 3, "max_tokens": 30}
    answer = pairing.device.generate(PROMPT, protocol=protocol, **options, **sampled)
    text, total, verified = [*PROMPT, *answer.tokens], 0.0, 0
    for round_ in answer.rounds:
        bounds = [
            pairing.ensemble.omitted(text[: round_.start + i]) for i in range(round_.verified)
        ]
        assert round_.notes == {"omitted_mass": pytest.approx(sum(bounds), abs=1e-3)}
        total, verified = total + sum(bounds), verified + round_.verified
    assert summary(answer)["omitted_mass"] == pytest.approx(total / verified, abs=1e-3)
    if pairing.ensemble.omitted(PROMPT) > 1e-6:  # some tokens are left out
        assert total > 0.1


@pytest.mark.parametrize(
    "options",
    [{"protocol": "stream"}, {"protocol": "ahead", "hints": "device"}, {"protocol": "ahead"}],
)
def test_a_stream_reports_the_mass_that_was_left_out(
    pairing: Pairing, options: dict[str, Any]
) -> None:
    """Bound (19) at every token: of accepted drafts, and of the token after them."""
    answer = pairing.device.generate(PROMPT, temperature=1.0, seed=3, max_tokens=30, **options)
    text, total, positions = [*PROMPT, *answer.tokens], 0.0, 0
    for round_ in answer.rounds:
        bounds = [
            pairing.ensemble.omitted(text[: round_.start + i]) for i in range(round_.accepted + 1)
        ]
        assert round_.notes == {"omitted_mass": pytest.approx(sum(bounds), abs=1e-3)}
        total, positions = total + sum(bounds), positions + len(bounds)
    assert summary(answer)["omitted_mass"] == pytest.approx(total / positions, abs=1e-3)
    if pairing.ensemble.omitted(PROMPT) > 1e-6:  # some tokens are left out
        assert total > 0.1


def test_repeated_tokens_report_no_mass(pairing: Pairing) -> None:
    """A pull of tokens that were sent already gets them in one message, which is no pass."""
    session = RawSession()
    with RawClient(pairing.running.endpoint) as client:
        client.send(*session.begin(PROMPT, "stream"))
        client.send(*session.pull(3))
        passes = [client.receive() for _ in range(3)]
        client.send(*session.pull(3))
        repeated, (ids,) = client.receive_all()
    for reply in passes:
        assert isinstance(reply, m.Tokens)
        assert reply.omitted_mass is not None
    assert isinstance(repeated, m.Tokens)
    assert (repeated.start, repeated.omitted_mass) == (len(PROMPT), None)
    assert len(decode_ids(ids, VOCAB)) == 3


def test_several_devices_at_once(pairing: Pairing, cast: Cast) -> None:
    """Their windows share passes, or cross on their way to the workers."""
    answers: dict[int, list[int]] = {}

    def converse(seed: int) -> None:
        with Device(cast.draft, pairing.running.endpoint, threads=1) as device:
            for turn in range(3):
                prompt = tokens_of(10 * seed + turn, 5 + 30 * turn).tolist()
                options = {"protocol": "coupled", "temperature": 1.0, "window": 3}
                got = device.generate(prompt, max_tokens=40, seed=seed, **options)
                answers[10 * seed + turn] = got.tokens

    threads = [threading.Thread(target=converse, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 12
    for key, got in answers.items():
        seed, turn = divmod(key, 10)
        prompt = tokens_of(key, 5 + 30 * turn).tolist()
        law = SamplingParams(sampling=Sampling(temperature=1.0), seed=seed)
        wanted = pairing.ensemble.decode(prompt, 40, law)
        pairing.ensemble.assert_same(prompt, law, got, wanted)


def test_sessions_come_and_go_and_answers_are_cancelled(pairing: Pairing, cast: Cast) -> None:
    """More sessions than there are slots, each left in the middle of an answer, or of a prompt."""
    for seed in range(2 * SESSIONS):
        with Device(cast.draft, pairing.running.endpoint, threads=1) as device:
            prompt = tokens_of(seed, 3 + 20 * seed).tolist()
            options = {"protocol": ("coupled", "tree", "stream")[seed % 3], "temperature": 1.0}
            pieces = device.stream(prompt, max_tokens=50, seed=seed, **options)
            for _ in range(seed % 4):
                next(pieces, None)
            pieces.close()
        pairing.check(PROMPT, 20, protocol="coupled", temperature=1.0, seed=seed)


# The law of sampled answers

CUT: dict[str, Any] = {"kept": 2, "reconstruction": "renormalise"}


@pytest.fixture(scope="module")
def lawful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Device, Cast]]:
    """Few tokens, of which the workers tell two."""
    folder = tmp_path_factory.mktemp("lawful")
    cast = cast_in(folder, sharper=2.5, vocab=6, padded_vocab=6, context=64)
    options = {"rate": 1e6, "context": 64}
    with (
        federation(folder, [cast.a, cast.b], (2.0, 1.0), options=options, **CUT) as running,
        Device(cast.c, running.endpoint, threads=1) as device,
    ):
        yield device, cast


@SLOW
@pytest.mark.parametrize(
    ("protocol", "options"),
    [
        ("tslt", {"temperature": 1.3, "top_k": 4, "window": 3, "draft_top_k": 3}),
        ("tree", {"temperature": 1.0, "expansion": (2, 2), "draft_top_k": 4}),
        ("dssd", {"temperature": 0.7, "top_p": 0.9, "window": 2}),
    ],
)
def test_sampled_answers_follow_the_ensembles_law(
    lawful: tuple[Device, Cast], protocol: str, options: dict[str, Any]
) -> None:
    device, cast = lawful
    sampling = Sampling(**{k: v for k, v in options.items() if k in Sampling.__annotations__})

    def law(ensemble: Ensemble) -> dict[tuple[int, ...], float]:
        end = ensemble.ends[0]
        return law_after(
            lambda answer: ensemble.logits([*SHORT, *answer], sampling.temperature), sampling, end
        )

    outcomes = law(Ensemble([cast.a, cast.b], (2.0, 1.0), **CUT))
    counts = frequencies(device, outcomes, protocol=protocol, **options)
    expected = np.array(list(outcomes.values())) * ANSWERS
    assert p_value(counts, expected) > THRESHOLD
    # the test can fail: the laws of one worker, and of all that is not cut, are far away
    for other in (Ensemble([cast.a], **CUT), Ensemble([cast.a, cast.b], (2.0, 1.0))):
        others = law(other)
        wrong = np.array([others.get(ids, 0.0) for ids in outcomes]) * ANSWERS
        assert p_value(counts, np.maximum(wrong, 1e-9)) < 1e-6


# The coordinator's own drafter


def test_the_coordinators_drafter_drafts_for_a_device_that_does_not(
    cast: Cast, tmp_path: Path
) -> None:
    """One command: the workers verify what the edge drafts; the text is the ensemble's own."""
    targets, options = [cast.a, cast.b], {"draft": cast.draft, "rate": 1e6}
    ensemble, accepted = Ensemble(targets, kept=16), 0
    with (
        federation(tmp_path, targets, options=options, kept=16) as running,
        Device(cast.draft, running.endpoint, threads=1) as device,
    ):
        for seed, temperature in enumerate((0.0, 1.0)):
            shape = {"temperature": temperature, "seed": seed, "max_tokens": 60}
            answer = device.generate(PROMPT, protocol="ahead", hints="edge", **shape)
            law = SamplingParams(sampling=Sampling(temperature=temperature), seed=seed)
            ensemble.assert_same(PROMPT, law, answer.tokens, ensemble.decode(PROMPT, 60, law))
            assert not any(round_.source == "device" for round_ in answer.rounds)
            accepted += answer.hints.get("edge", (0, 0))[1]
    assert accepted > 0
