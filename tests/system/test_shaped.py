"""Bias, penalties and min-p at real edges: the text is the target's under the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import TokenOutOfRangeError, UnsupportedError
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.logits_options import LogitsOptions
from tests.conftest import VOCAB, Pair
from tests.device_runtime.bridged_devices.conftest import models as bridged_models
from tests.support.daemons import running
from tests.support.enumeration import p_value
from tests.support.in_process import Reader, expect_the_same
from tests.support.relay import Relay
from tests.support.shaped import shaped
from tests.system.test_lossless import (
    ANSWERS,
    EOS,
    PROMPT,
    THRESHOLD,
    frequencies,
    law_after,
    read,
)
from tests.system.test_lossless import pair as small_pair

assert bridged_models  # fixtures
assert small_pair

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5, 3, 5]]
SAMPLED = {"temperature": 1.0, "min_p": 0.02}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.8, "presence_penalty": 0.6}
TOLD: dict[str, Any] = {"logit_bias": {7: 3.0, 2: -100.0}, **PENALTIES}
TRIES = 10  # for drafts that come true: on a busy machine hints may all be late
SAME = [("greedy", 0.0), ("tree", 0.0), ("ahead", 0.0), ("coupled", 1.0), ("ahead", 1.0)]


def said_alone(artifact: Path, prompt: Sequence[int], count: int, ends: Sequence[int]) -> list[int]:
    """A model's own answer at temperature 0, shaped token by token."""
    decoder, answer = Decoder(artifact, threads=1), []
    for _ in range(count):
        decoder.rollback(0, 0)
        tokens = np.array([*prompt, *answer])
        row = decoder.forward([Pass(slot=0, tokens=tokens, rows=1)])[0].logits[0]
        answer.append(int(shaped(row, prompt, answer, LogitsOptions(**TOLD)).argmax()))
        if answer[-1] in ends:
            break
    return answer


@pytest.mark.parametrize("protocol", ["stream", "greedy", "tree", "local"])
def test_each_says_what_its_model_says_under_the_same_settings(
    pair: Pair, device: Device, protocol: str
) -> None:
    ends = Artifact.open(pair.target).manifest.eos_ids
    owner = pair.draft if protocol == "local" else pair.target
    for prompt in PROMPTS:
        answer = device.generate(prompt, protocol=protocol, max_tokens=24, **TOLD)
        assert answer.tokens == said_alone(owner, prompt, 24, ends)
        plain = device.generate(prompt, protocol=protocol, max_tokens=24)
        assert answer.tokens != plain.tokens
        assert 2 not in answer.tokens


@pytest.mark.parametrize(("protocol", "temperature"), SAME)
def test_the_text_is_that_of_stream(device: Device, protocol: str, temperature: float) -> None:
    for again in range(TRIES):
        accepted = 0
        for at, prompt in enumerate(PROMPTS):
            seed = at + again * len(PROMPTS)
            options = {**TOLD, **SAMPLED, "temperature": temperature, "seed": seed}
            wanted = device.generate(prompt, protocol="stream", max_tokens=60, **options)
            got = device.generate(prompt, protocol=protocol, max_tokens=60, **options)
            assert got.tokens == wanted.tokens
            accepted += sum(each.accepted for each in got.rounds)
        if accepted:
            return
    pytest.fail("no draft was accepted")


def test_drafts_are_shaped_too(pair: Pair, edge: EdgeServer) -> None:
    """A target that drafts for itself is always right."""
    options = {**TOLD, "max_tokens": 40, "window": 3}
    with Device(pair.target, edge.endpoint, threads=1) as device:
        for protocol, ours in (
            ("greedy", {}),
            ("coupled", {**SAMPLED, "seed": 1}),
            ("tslt", {**SAMPLED, "seed": 1}),
        ):
            answer = device.generate(PROMPTS[1], protocol=protocol, **options, **ours)
            drafted = sum(each.window for each in answer.rounds)
            wrong = drafted - sum(each.accepted for each in answer.rounds)
            assert wrong <= (0.05 if protocol == "tslt" else 0) * drafted


WAYS = [
    ("tslt", {"window": 2, "draft_top_p": 0.8}),
    ("dssd", {"window": 2}),
    ("dsd", {"window": 3}),
    ("tree", {"expansion": (2, 1)}),
    ("ahead", {}),
]
SMALL_TOLD: dict[str, Any] = {"logit_bias": {1: 1.0}, **PENALTIES}
CUT = {"temperature": 1.0, "min_p": 0.1}


@pytest.mark.parametrize(("protocol", "local"), WAYS)
def test_answers_are_those_of_the_protocol_alone(
    small_pair: tuple[Device, Path], protocol: str, local: dict[str, Any]
) -> None:
    device, folder = small_pair
    models = [Reader(folder / end) for end in ("target", "draft")]
    options = {"protocol": protocol, **CUT, **SMALL_TOLD, **local}
    expect_the_same(device, models, PROMPT, EOS, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "local"), WAYS[:3])
def test_answers_follow_the_targets_law(
    small_pair: tuple[Device, Path], protocol: str, local: dict[str, Any]
) -> None:
    device, folder = small_pair
    outcomes, plain = (law(folder, CUT, each) for each in (SMALL_TOLD, {}))
    counts = frequencies(device, outcomes, protocol=protocol, **CUT, **SMALL_TOLD, **local)
    assert p_value(counts, np.array(list(outcomes.values())) * ANSWERS) > THRESHOLD
    # the test can fail: without penalties the law is far away
    wrong = np.array([plain.get(ids, 0.0) for ids in outcomes]) * ANSWERS
    assert p_value(counts, np.maximum(wrong, 1e-9)) < 1e-12


def law(
    folder: Path, options: dict[str, Any], message: dict[str, Any]
) -> dict[tuple[int, ...], float]:
    """That of the target's answers."""
    decoder = Decoder(folder / "target")

    def logits(answer: Sequence[int]) -> Any:
        row = read(decoder, [*PROMPT, *answer])[0]
        return shaped(row, PROMPT, answer, LogitsOptions(**message))[None]

    result: dict[tuple[int, ...], float] = law_after(logits, Sampling(**options), EOS)
    return result


def test_an_edge_that_lost_the_session_counts_from_the_same_token(
    pair: Pair, edge: EdgeServer
) -> None:
    relay = Relay(edge.endpoint)
    for protocol, options in (("greedy", {}), ("ahead", {**SAMPLED, "seed": 4})):
        endless = {"logit_bias": {VOCAB - 1: -100.0}}
        requests = {**PENALTIES, **endless, **options, "max_tokens": 120}
        with Device(pair.draft, relay.endpoint, threads=1) as device:
            wanted = device.generate(PROMPTS[1], **requests, protocol="stream").tokens
            got: list[int] = []
            for piece in device.stream(PROMPTS[1], **requests, protocol=protocol):
                if len(got) < 30 <= len(got) + len(piece.tokens):
                    relay.cut()
                got += piece.tokens
            assert got == wanted
            assert device.last is not None
            assert device.last.recoveries
    relay.close()


def test_across_a_bridge(bridged_models: Any) -> None:
    with (
        EdgeServer(bridged_models.target, threads=1) as edge,
        Device(bridged_models.draft, edge.endpoint, threads=1) as device,
    ):
        for protocol in ("greedy", "ahead"):
            options = {**PENALTIES, "max_tokens": 40}
            wanted = device.generate(PROMPTS[0], protocol="stream", **options)
            got = device.generate(PROMPTS[0], protocol=protocol, **options)
            assert got.tokens == wanted.tokens


def test_drafts_of_the_edge_come_true(pair: Pair) -> None:
    """The target beside itself: all that it drafts is right."""
    flags = ("--target", pair.target, "--threads", 1, "--draft", pair.target)
    options = {**TOLD, **SAMPLED, "seed": 2, "max_tokens": 80}
    with running(*flags) as edge, Device(pair.draft, edge.endpoint, threads=1) as device:
        wanted = device.generate(PROMPTS[0], protocol="stream", **options)
        got = device.generate(PROMPTS[0], protocol="ahead", hints="edge", **options)
    assert got.tokens == wanted.tokens
    rounds = [each for each in got.rounds if each.source == "edge"]
    assert sum(each.accepted for each in rounds) == sum(each.window for each in rounds)


# Refusals


def test_a_token_that_the_target_lacks(device: Device) -> None:
    with pytest.raises(TokenOutOfRangeError, match=f"token {VOCAB}, but the target has {VOCAB}"):
        device.generate(PROMPTS[0], protocol="greedy", logit_bias={VOCAB: 1.0}, max_tokens=2)
    assert device.generate(
        PROMPTS[0], protocol="greedy", logit_bias={VOCAB - 1: 1.0}, max_tokens=2
    ).tokens


@pytest.mark.parametrize(
    "message", [{"min_p": 1.5}, {"repetition_penalty": 0.0}, {"logit_bias": {1: 101.0}}]
)
def test_values_that_make_no_sense(device: Device, message: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(message))):
        device.generate(PROMPTS[0], max_tokens=2, **message)
