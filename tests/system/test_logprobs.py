"""Log-probabilities through real edges: those of the target's own rows, under every protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pilotfish import Device, EdgeServer, Generation, Grammar
from pilotfish.base.errors import UnsupportedError
from pilotfish.edge_runtime.reply_logprobs import expect_sendable
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.speculation.logits_options import LogitsOptions
from pilotfish.wire.protocols import PROTOCOL_REGISTRY
from tests.conftest import VOCAB, Pair
from tests.support.registered import completed
from tests.support.relay import Relay
from tests.support.shaped import shaped

PROMPT = [3, 1, 4, 1, 5]
SAMPLED: dict[str, Any] = {"temperature": 1.3, "top_k": 20, "seed": 5}
TOLD: dict[str, Any] = {"logit_bias": {VOCAB - 1: -100.0, 9: 2.0}, "presence_penalty": 0.7}
CLOSE = 2e-4  # passes of other shapes round differently
LISTED: list[tuple[str, dict[str, Any]]] = [
    ("stream", {}), ("stream", SAMPLED), ("greedy", {}), ("tree", {"expansion": (2, 2)}),
    ("coupled", SAMPLED), ("tslt", SAMPLED), ("dsd", SAMPLED), ("dssd", SAMPLED),
    ("tree", {**SAMPLED, "expansion": (2, 1, 2)}), ("ahead", {}), ("ahead", SAMPLED),
    ("wisv-full", {}), ("wisv-selective", {"threshold": 0.7}),
]  # fmt: skip
CASES = completed(LISTED, PROTOCOL_REGISTRY, seed=5)


@pytest.fixture(scope="module")
def reader(pair: Pair) -> Decoder:
    return Decoder(Artifact.open(pair.target), threads=1)


def rows(reader: Decoder, answer: Generation, message: dict[str, Any]) -> Any:
    """The target's log-probabilities after each part of an answer, f64 [n, V]."""
    tokens = np.array([*PROMPT, *answer.tokens])
    reader.rollback(0, 0)
    logits = reader.forward([Pass(slot=0, tokens=tokens, rows=len(answer.tokens) + 1)])[0].logits
    ours = [
        shaped(row, PROMPT, answer.tokens[:at], LogitsOptions(**message)).astype(float)
        for at, row in enumerate(logits[:-1])
    ]
    return [row - row.max() - np.log(np.exp(row - row.max()).sum()) for row in ours]


def check(reader: Decoder, answer: Generation, most: int, message: dict[str, Any]) -> int:
    """Compare with the target's own; returns how many tokens had none."""
    assert len(answer.logprobs) == len(answer.tokens)
    unknown = 0
    wanted = rows(reader, answer, message)
    for row, token, result in zip(wanted, answer.tokens, answer.logprobs, strict=True):
        if result is None:
            unknown += 1
            continue
        assert abs(result.logprob - row[token]) < CLOSE
        assert len(result.top) == most
        likeliest = np.sort(row)[::-1][:most]
        assert np.allclose([value for _, value in result.top], likeliest, atol=CLOSE)
        assert np.allclose([row[id] for id, _ in result.top], likeliest, atol=CLOSE)
    return unknown


@pytest.mark.parametrize(("protocol", "options"), CASES)
@pytest.mark.parametrize("message", [{}, TOLD], ids=["plain", "shaped"])
def test_they_are_the_targets(
    device: Device, reader: Decoder, protocol: str, options: dict[str, Any], message: dict[str, Any]
) -> None:
    for most in (0, 3):
        answer = device.generate(
            PROMPT, protocol=protocol, max_tokens=40, logprobs=most, **options, **message
        )
        unknown = check(reader, answer, most, message)
        assert unknown <= (protocol == "dssd")  # the last one


def test_pieces_have_theirs(device: Device) -> None:
    for protocol, options in (("greedy", {}), ("ahead", SAMPLED), ("dssd", SAMPLED)):
        requests: dict[str, Any] = {"max_tokens": 80, "logprobs": 2, **options, **TOLD}
        pieces = list(device.stream(PROMPT, protocol=protocol, **requests))
        assert device.last is not None
        known = [logprob for piece in pieces for logprob in piece.logprobs]
        assert len(known) == len(device.last.tokens)
        late = [a is not b for a, b in zip(known, device.last.logprobs, strict=True)]
        assert any(late) == (protocol == "dssd")
        assert all(known[at] is None for at, other in enumerate(late) if other)


def test_an_answer_that_did_not_ask_has_none(device: Device) -> None:
    for protocol in ("greedy", "stream", "ahead"):
        plain = device.generate(PROMPT, protocol=protocol, max_tokens=12)
        answer = device.generate(PROMPT, protocol=protocol, max_tokens=12, logprobs=5)
        assert plain.logprobs == [None] * len(plain.tokens)
        assert answer.tokens == plain.tokens
        if protocol == "ahead":
            continue  # how many messages there are is chance
        down = [sum(item.downlink_bytes for item in each.rounds) for each in (plain, answer)]
        # numbers in headers differ by a byte here and there
        assert abs(down[1] - down[0] - len(plain.tokens) * (4 + 5 * 8)) < 2 * len(plain.tokens)


def test_under_a_grammar_what_is_forbidden_has_none(device: Device) -> None:
    grammar = Grammar.from_choices(["ab", "ba"])
    only = device.generate(PROMPT, grammar=grammar, protocol="greedy", max_tokens=4, logprobs=20)
    for logprob in only.logprobs:
        assert logprob is not None
        assert 0 < len(logprob.top) < 20
        assert abs(sum(np.exp(value) for _, value in logprob.top) - 1.0) < 1e-5


def test_after_a_cut_all_tokens_have_theirs(pair: Pair, edge: EdgeServer, reader: Decoder) -> None:
    relay = Relay(edge.endpoint)
    for protocol, options in (
        ("greedy", {}),
        ("ahead", SAMPLED),
        ("stream", {}),
        ("tslt", SAMPLED),
    ):
        with Device(pair.draft, relay.endpoint, threads=1) as device:
            requests: dict[str, Any] = {"max_tokens": 120, "logprobs": 2, **options, **TOLD}
            reply = 0
            for piece in device.stream(PROMPT, protocol=protocol, **requests):
                if any(reply < at <= reply + len(piece.tokens) for at in (20, 70)):
                    relay.cut()
                reply += len(piece.tokens)
            assert device.last is not None
            assert device.last.recoveries
            assert not check(reader, device.last, 2, TOLD)
    relay.close()


def test_the_drafters_own_tokens_have_none(device: Device) -> None:
    answer = device.generate(PROMPT, protocol="local", max_tokens=5, logprobs=2)
    assert answer.logprobs == [None] * 5


@pytest.mark.parametrize("most", [-1, 21])
def test_more_than_there_are_to_be_told(device: Device, most: int) -> None:
    with pytest.raises(UnsupportedError, match="logprobs must be between 0 and 20"):
        device.generate(PROMPT, protocol="greedy", logprobs=most)


LONG = [int(token) for token in np.random.default_rng(3).integers(0, VOCAB - 1, 130)]


def prompt_rows(reader: Decoder, prompt: list[int]) -> Any:
    """The target's log-probabilities before all tokens of a prompt but one, f64 [n − 1, V]."""
    if len(prompt) == 1:
        return []
    reader.rollback(0, 0)
    tokens = np.array(prompt[:-1])
    row = reader.forward([Pass(slot=0, tokens=tokens, rows=len(tokens))])[0].logits.astype(float)
    row -= row.max(axis=1, keepdims=True)
    return row - np.log(np.exp(row).sum(axis=1, keepdims=True))


def check_prompt(reader: Decoder, answer: Generation, prompt: list[int], most: int) -> None:
    assert answer.prompt_ids == prompt
    assert len(answer.prompt_logprobs) == len(prompt)
    assert answer.prompt_logprobs[0] is None
    wanted = prompt_rows(reader, prompt)
    for row, token, result in zip(wanted, prompt[1:], answer.prompt_logprobs[1:], strict=True):
        assert result is not None
        assert abs(result.logprob - row[token]) < CLOSE
        assert np.allclose(
            [value for _, value in result.top], np.sort(row)[::-1][:most], atol=CLOSE
        )


@pytest.mark.parametrize(("protocol", "options"), CASES)
def test_those_of_a_prompt(
    device: Device, reader: Decoder, protocol: str, options: dict[str, Any]
) -> None:
    """Whatever of it the edge has read before, and unshaped."""
    for prompt, most in ((LONG, 2), (LONG, 0), ([*LONG[:70], 5, 6], 3), ([*LONG, 4], 1), ([7], 2)):
        info: dict[str, Any] = {"protocol": protocol, "max_tokens": 9, **options}
        plain = device.generate(prompt, **info, logprobs=1)
        answer = device.generate(prompt, **info, logprobs=1, prompt_logprobs=most, **TOLD)
        check_prompt(reader, answer, prompt, most)
        assert plain.prompt_logprobs == []
        same = device.generate(prompt, **info, prompt_logprobs=most)
        if options.get("seed") is not None or not options.get("temperature"):
            assert same.tokens == plain.tokens


def test_those_of_a_prompt_come_once_and_survive_cuts(
    pair: Pair, edge: EdgeServer, reader: Decoder
) -> None:
    relay = Relay(edge.endpoint)
    for protocol in ("greedy", "stream", "ahead"):
        with Device(pair.draft, relay.endpoint, threads=1) as device:
            whole = device.generate(LONG, protocol=protocol, max_tokens=60)
            results = []
            for piece in device.stream(LONG, protocol=protocol, max_tokens=60, prompt_logprobs=2):
                results += piece.tokens
                if len(results) in (1, 2, 5, 20, 21):
                    relay.cut()
            assert device.last is not None
            assert results == whole.tokens
            check_prompt(reader, device.last, LONG, 2)


def test_those_of_a_prompt_have_their_bytes(device: Device) -> None:
    requests: dict[str, Any] = {"protocol": "greedy", "max_tokens": 12}
    plain = device.generate(LONG, **requests)
    answer = device.generate(LONG, **requests, prompt_logprobs=4)
    down = [sum(item.downlink_bytes for item in each.rounds) for each in (plain, answer)]
    assert abs(down[1] - down[0] - (len(LONG) - 1) * (4 + 4 * 8)) < 40


def test_those_of_a_prompt_that_are_too_large() -> None:
    expect_sendable(1000, 20, 1 << 18)
    with pytest.raises(UnsupportedError, match="fewer of the likeliest"):
        expect_sendable(2000, 20, 1 << 18)
