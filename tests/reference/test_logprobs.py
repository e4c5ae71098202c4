"""Told log-probabilities and greedy answers against transformers: plain, penalised, constrained.

A real edge with the default model in fp32, on loopback; the reference reads prompt and answer in
one pass, in torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from pilotfish import Device, EdgeServer, Generation
from pilotfish.engines.artifact import Artifact
from tests.conftest import Pair
from tests.reference.test_architectures import reference, smollm2

pytestmark = pytest.mark.reference
CLOSE = 1e-4  # of log-probabilities; 5e-5 was the most in any of these
EXACT = 1e-6  # of what is certain
MOST = 20
PROMPT = "Write a Python function that adds two numbers."
LIMIT = 32
# Temperature and truncation do not show in what is told.
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "seed": 7}
PROTOCOLS = ("stream", "greedy", "coupled", "ahead", "dssd")
CASES: list[tuple[str, dict[str, Any]]] = [
    *((protocol, {}) for protocol in PROTOCOLS),
    *((protocol, SAMPLED) for protocol in PROTOCOLS if protocol != "greedy"),
]
ALL: dict[str, Any] = {"logit_bias": {260: 3.0, 28: -100.0, 30: 2.0}, "repetition_penalty": 1.3,
                       "frequency_penalty": 0.9, "presence_penalty": 1.1}  # fmt: skip
ALONE: list[dict[str, Any]] = [
    *({name: value} for name, value in ALL.items() if name != "repetition_penalty"),
    {"repetition_penalty": 0.8},
    {"frequency_penalty": -0.4},
    {"presence_penalty": -0.6},
]
COLOURS = ("blue", "black", "green")
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": COLOURS},
        "reason": {"type": "string", "maxLength": 40},
        "sure": {"const": True},
    },
    "required": ["colour", "reason", "sure"],
    "additionalProperties": False,
}
BEFORE, BEHIND = '{"colour": "', '", "reason": "'  # a colour


class Ends(NamedTuple):
    """Both sides of the comparison."""

    device: Device
    model: Any

    def prompt(self, text: str) -> list[int]:
        return list(self.device.prompt(text).ids.tolist())

    def logits(self, text: str, answer: Generation) -> np.ndarray:
        """The rows that the answer's tokens were drawn from, as transformers has them."""
        prompt = self.prompt(text)
        return reference(self.model, np.array([*prompt, *answer.tokens]))[0][len(prompt) - 1 : -1]

    def greedy(self, **info: Any) -> list[int]:
        """What transformers' own generate() says to the prompt at temperature 0."""
        import torch

        ids = torch.tensor([self.prompt(PROMPT)])
        prompt = ids[0].tolist()

        def law(ids: Any, scores: Any) -> Any:
            return shaped(scores[0], prompt, ids[0, len(prompt) :].tolist(), **info)[None]

        # the repetition penalty is transformers' own, the others are not
        ours = {"logits_processor": [law]} if "logit_bias" in info else info
        limits = {"max_new_tokens": LIMIT, "do_sample": False}
        answer = self.model.generate(ids, attention_mask=torch.ones_like(ids), **limits, **ours)
        return list(answer[0, len(prompt) :].tolist())


@pytest.fixture(scope="module")
def ends(default_artifacts: Pair) -> Iterator[Ends]:
    draft, target = default_artifacts
    model = smollm2()
    eos = model.generation_config.eos_token_id = list(Artifact.open(target).manifest.eos_ids)
    model.generation_config.pad_token_id = eos[0]
    with EdgeServer(target, threads=1) as edge, Device(draft, edge.endpoint, threads=1) as device:
        yield Ends(device, model)


def shaped(
    row: Any,
    prompt: list[int],
    items: list[int],
    logit_bias: dict[int, float] | None = None,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
) -> Any:
    """Logits [V] after bias and penalties, as transformers and vLLM define them, in torch."""
    import torch
    from transformers import RepetitionPenaltyLogitsProcessor

    row = row.clone()
    for token, bias in (logit_bias or {}).items():
        row[token] += bias
    repeated = RepetitionPenaltyLogitsProcessor(repetition_penalty)
    row = repeated(torch.tensor([prompt + items]), row[None])[0]
    counts = torch.bincount(torch.tensor(items, dtype=torch.long), minlength=len(row))
    row -= frequency_penalty * counts
    row -= presence_penalty * (counts > 0)
    return row


def check(ends: Ends, answer: Generation, **info: Any) -> None:
    """Compare what was told of each token and of the likeliest with the reference."""
    import torch

    prompt, logits = ends.prompt(PROMPT), torch.from_numpy(ends.logits(PROMPT, answer))
    assert len(answer.logprobs) == len(answer.tokens) > 5
    worst, moved = 0.0, 0.0
    for at, (token, its) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        if its is None:
            assert (answer.protocol, at) == ("dssd", len(answer.tokens) - 1)
            continue
        row = shaped(logits[at], prompt, answer.tokens[:at], **info)
        law = row.double().log_softmax(-1).numpy()
        plain = logits[at].double().log_softmax(-1).numpy()
        ids, values = [id for id, _ in its.top], np.array([value for _, value in its.top])
        assert len(set(ids)) == MOST
        # ids may be swapped where they tie, but each has its own value and each rank has its
        differences = [*(values - law[ids]), *(values - np.sort(law)[::-1][:MOST])]
        worst = max(worst, *np.abs(differences), abs(its.logprob - law[token]))
        moved = max(moved, np.abs(plain[ids] - values).max())
    assert worst < CLOSE, answer.protocol
    assert not info or moved > 0.1, answer.protocol  # else a penalty that is not there would pass


@pytest.mark.parametrize("message", [{}, {"repetition_penalty": 1.3}, ALL], ids=str)
def test_answers_and_told_are_those_of_transformers(ends: Ends, message: dict[str, Any]) -> None:
    wanted = ends.greedy(**message)
    for protocol, options in CASES:
        requests: dict[str, Any] = {"protocol": protocol, "max_tokens": LIMIT, **options, **message}
        answer = ends.device.generate(PROMPT, logprobs=MOST, **requests)
        assert len(answer.rounds) < len(answer.tokens) or protocol in ("stream", "ahead")
        assert options or answer.tokens == wanted, protocol
        check(ends, answer, **message)


@pytest.mark.parametrize("message", ALONE, ids=str)
def test_told_are_under_each_penalty(ends: Ends, message: dict[str, Any]) -> None:
    requests: dict[str, Any] = {"protocol": "coupled", "max_tokens": LIMIT, **SAMPLED, **message}
    check(ends, ends.device.generate(PROMPT, logprobs=MOST, **requests), **message)


@pytest.mark.parametrize(("protocol", "options"), CASES)
def test_told_under_a_schema_are_of_the_masked_law(
    ends: Ends, protocol: str, options: dict[str, Any]
) -> None:
    text, read = "What colour is the sky, and why? Answer in JSON.", ends.device.tokenizer
    requests: dict[str, Any] = {"schema": SCHEMA, "protocol": protocol, "max_tokens": 60, **options}
    answer = ends.device.generate(text, logprobs=MOST, **requests)
    logits = ends.logits(text, answer).astype(np.float64)
    whole = [colour + BEHIND for colour in COLOURS]
    certain, chosen = 0, 0
    for at, (token, its) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        assert its is not None
        ids, values = [id for id, _ in its.top], np.array([value for _, value in its.top])
        assert math.isfinite(its.logprob)
        assert np.exp(values).sum() <= 1 + EXACT
        # what the mask leaves gains alike: the norm is that of fewer tokens
        norm = logits[at, [*ids, token]] - [*values, its.logprob]
        assert np.ptp(norm) < CLOSE
        assert norm[0] < np.logaddexp.reduce(logits[at]) + CLOSE
        if len(ids) < MOST:
            assert abs(norm[0] - np.logaddexp.reduce(logits[at, ids])) < CLOSE
        decoded = read.decode(answer.tokens[:at])
        if decoded == BEFORE:
            words = [read.decode([id]) for id in range(logits.shape[1])]
            begins = [bool(word) and any(item.startswith(word) for item in whole) for word in words]
            assert set(ids) == {*np.flatnonzero(begins)}
            chosen += 1
        elif len(decoded) < len(BEFORE) or len(ids) == 1:
            assert ids == [token]
            assert abs(its.logprob) < EXACT
            certain += 1
    assert chosen == 1
    assert certain >= 10
