"""Scores as evaluation harnesses take them over HTTP, against transformers on the same weights.

A harness sends ids, led by the control token that begins a text, asks for `echo` with `logprobs`
and one token more, and counts from the front: so many tokens of context, the last one left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from pilotfish import EdgeServer
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.tokenizer import Tokenizer
from tests.conftest import Pair
from tests.reference.test_architectures import reference, smollm2
from tests.support.serving import Serving, serving

pytestmark = pytest.mark.reference
CLOSE = 2e-3  # of a sum of log-probabilities; 9e-4 was the most over some hundred tokens
CHOICES = [
    ("The capital of France is", [" London", " Paris", " Rome"]),
    ("Two plus two equals", [" four", " seven", " nine"]),
    ("<|im_start|>user\nName a fish.<|im_end|>\n<|im_start|>assistant\n", ["A salmon", "🐟 花"]),
]
TEXTS = ["The quick brown fox jumps over the lazy dog. " * 4, "def add(a, b):\n    return a + b\n"]


class Harness(NamedTuple):
    """Both sides of the comparison."""

    service: Serving
    tokenizer: Tokenizer
    model: Any
    begin: int

    def score(self, context: list[int], rest: list[int]) -> tuple[float, bool]:
        """Log-probability of the rest, and whether greedy decoding would say it."""
        options = {"prompt": context + rest, "max_tokens": 1, "echo": True, "logprobs": 1}
        answer = self.ask(**options)["logprobs"]
        part = slice(len(context), -1)
        tops = answer["top_logprobs"][part]
        greedy = [
            max(top, key=top.get) == token
            for top, token in zip(tops, answer["tokens"][part], strict=True)
        ]
        return sum(answer["token_logprobs"][part]), all(greedy)

    def ask(self, **info: Any) -> Any:
        body = {"temperature": 0, **info}
        answer = httpx.post(f"{self.service.url}/v1/completions", json=body, timeout=120.0)
        return answer.json()["choices"][0]

    def expected(self, context: list[int], rest: list[int]) -> tuple[float, bool]:
        """The same by transformers."""
        rows = reference(self.model, np.array(context + rest))[0][len(context) - 1 : -1]
        rows = rows.astype(float)
        rows -= rows.max(axis=1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
        ours = rows[np.arange(len(rest)), rest]
        return float(ours.sum()), bool((rows.argmax(axis=1) == rest).all())


@pytest.fixture(scope="module")
def harness(default_artifacts: Pair) -> Iterator[Harness]:
    target = Artifact.open(default_artifacts.target)
    begin = target.manifest.bos_id
    assert begin is not None
    with (
        EdgeServer(default_artifacts.target, threads=1) as edge,
        serving(default_artifacts.draft, edge.endpoint) as service,
    ):
        yield Harness(service, Tokenizer(target), smollm2(), begin)


@pytest.mark.parametrize(("context", "choices"), CHOICES)
@pytest.mark.parametrize("begun", [False, True])
def test_choices(harness: Harness, context: str, choices: list[str], begun: bool) -> None:
    before = harness.tokenizer.encode(context, special=True)
    before = [harness.begin, *before] if begun else before
    for choice in choices:
        rest = harness.tokenizer.encode(choice)
        (result, greedy), (wanted, likeliest) = (
            harness.score(before, rest), harness.expected(before, rest),
        )  # fmt: skip
        assert abs(result - wanted) < CLOSE
        assert greedy == likeliest


@pytest.mark.parametrize("text", TEXTS)
def test_perplexity(harness: Harness, text: str) -> None:
    ids = harness.tokenizer.encode(text)
    result, _ = harness.score([harness.begin], ids)
    assert abs(result - harness.expected([harness.begin], ids)[0]) < CLOSE


def test_greedy_answers(harness: Harness) -> None:
    import torch

    for context, _ in CHOICES[:2]:
        ids = [harness.begin, *harness.tokenizer.encode(context)]
        result = harness.ask(prompt=ids, max_tokens=16)["text"]
        wanted = harness.model.generate(
            torch.tensor([ids]), max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0
        )[0, len(ids) :].tolist()
        # transformers goes on behind an end
        assert harness.tokenizer.decode(wanted).startswith(result)
        assert len(result) > 20
