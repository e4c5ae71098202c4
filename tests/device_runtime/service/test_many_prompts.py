"""Several prompts in a request, scoring, and the tokenizer's routes, as harnesses use them."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from pilotfish import Device
from pilotfish.device_runtime.service.openai import text_request
from pilotfish.device_runtime.service.refusal import RefusalError
from pilotfish.wire.request import Request
from tests.support import web
from tests.support.serving import Serving

TEXTS = ["once", "upon a", "hello hello hello"]


def complete(service: Serving, **body: Any) -> httpx.Response:
    body = {"max_tokens": 6, "temperature": 0, **body}
    return web.post(f"{service.url}/v1/completions", json=body, timeout=120.0)


def answer(service: Serving, **body: Any) -> dict[str, Any]:
    response = complete(service, **body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    return whole


def plain(choices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices without their index and what is measured."""
    return [{k: v for k, v in each.items() if k not in ("index", "pilotfish")} for each in choices]


def ids_of(device: Device, texts: Sequence[str]) -> list[list[int]]:
    return [device.prompt(text, chat=False).ids.tolist() for text in texts]


def numbers(choices: Sequence[dict[str, Any]]) -> list[list[float | None]]:
    return [each["logprobs"]["token_logprobs"] for each in choices]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 2, "temperature": 1, "seed": 5},
        {"n": 1, "best_of": 3, "temperature": 1, "seed": 5},
        {"echo": True},
        {"max_tokens": 0, "echo": True},
        {"stop": ["e"]},
    ],
)
@pytest.mark.parametrize("kind", ["texts", "ids", "mixed"])
def test_several_prompts_are_answered_as_one_by_one(
    service: Serving, device: Device, options: dict[str, Any], kind: str
) -> None:
    ids = ids_of(device, TEXTS)
    kinds: dict[str, list[Any]] = {
        "texts": [*TEXTS], "ids": [*ids], "mixed": [TEXTS[0], ids[1], TEXTS[2]]
    }  # fmt: skip
    prompts = kinds[kind]
    together = answer(service, prompt=prompts, **options)
    alone = [answer(service, prompt=prompt, **options) for prompt in prompts]
    each = [choice for single in alone for choice in single["choices"]]
    assert [choice["index"] for choice in together["choices"]] == list(range(len(each)))
    assert plain(together["choices"]) == plain(each)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][name] == sum(single["usage"][name] for single in alone), name


@pytest.mark.parametrize("options", [{}, {"n": 2, "echo": True}, {"max_tokens": 0, "echo": True}])
def test_a_stream_of_several_prompts(service: Serving, options: dict[str, Any]) -> None:
    whole = answer(service, prompt=TEXTS, **options)
    info = {"include_usage": True}
    lines = complete(
        service, prompt=TEXTS, stream=True, stream_options=info, **options
    ).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    texts = [""] * len(whole["choices"])
    ends = [""] * len(texts)
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert ends == [choice["finish_reason"] for choice in whole["choices"]]
    for name in ("prompt_tokens", "completion_tokens"):
        assert chunks[-1]["usage"][name] == whole["usage"][name]
    assert lines[-2] == "data: [DONE]"


@pytest.mark.parametrize(
    ("prompts", "code"),
    [
        (["once", "x" * 2000], "context_length_exceeded"),
        ([[1, 2], [1] * 256], "context_length_exceeded"),
        ([[1, 2], [64]], "token_out_of_range"),
        (["once", ""], "invalid_value"),
        (["once"] * 257, "invalid_value"),
        (["once", {}], "invalid_value"),
        (["once", None, "again"], "invalid_value"),
        (["once", None], "invalid_value"),
        ([[]], "invalid_value"),
        ([], "invalid_value"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_one_bad_prompt_refuses_them_all(
    service: Serving, prompts: list[Any], code: str, stream: bool
) -> None:
    before = service.get("/status").json()["answers"]
    refused = complete(service, prompt=prompts, stream=stream)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == code
    assert service.get("/status").json()["answers"] == before


def test_the_number_of_answers_is_bounded() -> None:
    body = json.dumps({"prompt": ["a"] * 100, "n": 11}).encode()
    with pytest.raises(RefusalError, match="1024"):
        text_request(body, Request())


@pytest.mark.parametrize("each", [b'"a",', b"[1],", b"[],"])
def test_millions_of_prompts_are_not_made_to_be_refused(each: bytes) -> None:
    body = b'{"prompt": [%s"a"]}' % (each * 1_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(RefusalError) as refused:
            text_request(body, Request())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused.value.param == "prompt"
    assert peak < 3 * len(body)


def test_other_clients_answers_come_in_between(service: Serving) -> None:
    """A request of many prompts holds one lane, answer by answer."""
    many = ["once"] * 40
    with web.stream(
        "POST",
        f"{service.url}/v1/completions",
        json={"prompt": many, "max_tokens": 4, "temperature": 0, "stream": True},
    ) as response:
        lines = response.iter_lines()
        next(lines)
        assert answer(service, prompt="upon")["choices"]
        assert sum('"finish_reason":"length"' in line for line in lines) == 40


def test_scoring_makes_no_answer(service: Serving, device: Device) -> None:
    ids = device.prompt("hello upon", chat=False).ids.tolist()
    scored = answer(service, prompt=ids, max_tokens=0, echo=True, logprobs=2)
    longer_answer = answer(service, prompt=ids, max_tokens=1, echo=True, logprobs=2)
    (score,), (longer,) = scored["choices"], longer_answer["choices"]
    assert score["finish_reason"] == "length"
    assert score["text"] == device.tokenizer.decode(ids, special=True)
    assert scored["usage"]["completion_tokens"] == 0
    for name, values in score["logprobs"].items():
        assert values == longer["logprobs"][name][:-1], name
        assert len(values) == len(ids)
    silent = answer(service, prompt=ids, max_tokens=0)
    assert (silent["choices"][0]["text"], silent["usage"]["completion_tokens"]) == ("", 0)
    rows = answer(service, prompt=ids, max_tokens=0, prompt_logprobs=1)["choices"][0]
    assert len(rows["prompt_logprobs"]) == len(ids)


# The requests of lm-eval 0.4.9.2's `local-completions` with `tokenizer_backend=remote`.


def encode(service: Serving, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    ids: list[int] = web.post(f"{service.url}/tokenize", json=body).json()["tokens"]
    return ids


def loglikelihoods(
    service: Serving, pairs: Sequence[tuple[list[int], list[int]]], batch: int
) -> list[tuple[float, bool]]:
    """Score continuations as lm-eval does."""
    results = []
    for start in range(0, len(pairs), batch):
        part = pairs[start : start + batch]
        out = answer(
            service,
            model="pilotfish",
            prompt=[context + continuation for context, continuation in part],
            temperature=0,
            max_tokens=1,
            logprobs=1,
            seed=1234,
            echo=True,
        )
        choices = sorted(out["choices"], key=lambda choice: choice["index"])
        for choice, (context, _) in zip(choices, part, strict=True):
            of_tokens = choice["logprobs"]["token_logprobs"][len(context) : -1]
            tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
            best = all(a == max(b.values()) for a, b in zip(of_tokens, tops, strict=True))
            results.append((sum(of_tokens), best))
    return results


def test_a_harness_scores_alike_in_batches_and_with_a_remote_tokenizer(
    service: Serving, device: Device
) -> None:
    info = service.get("/tokenizer_info")
    assert info.status_code == 200
    assert info.json()["chat_template"] == device.vocabulary.chat_template
    tokenizer = device.tokenizer
    for name in ("eos_token", "bos_token"):
        token = info.json()[name]
        if token is not None:
            assert encode(service, token) == tokenizer.encode(token, special=True)
            assert len(encode(service, token)) == 1
    assert info.json()["eos_token"] is not None
    texts = [("once", " upon"), ("hello", " a"), ("upon a", " once hello"), ("a", "b"), ("b", "a")]
    local = [tuple(tokenizer.encode(part, special=True) for part in pair) for pair in texts]
    remote = [tuple(encode(service, part) for part in pair) for pair in texts]
    assert remote == local
    alone = loglikelihoods(service, local, 1)  # type: ignore[arg-type]  # each is a pair
    for batch in (2, 5):
        for (value, best), (wanted, also) in zip(
            loglikelihoods(service, remote, batch),  # type: ignore[arg-type]  # each is a pair
            alone,
            strict=True,
        ):
            assert value == pytest.approx(wanted, abs=1e-4)
            assert best == also
    tokens = remote[0][0]
    back = web.post(f"{service.url}/detokenize", json={"tokens": tokens}).json()
    assert back == {"prompt": tokenizer.decode(tokens, special=True)}


def test_tokens_with_and_without_those_that_belong_before_a_text(
    service: Serving, device: Device
) -> None:
    text = "once " + str(service.get("/tokenizer_info").json()["eos_token"])

    def tokens(**more: Any) -> list[int]:
        body = {"prompt": text, **more}
        ids: list[int] = web.post(f"{service.url}/tokenize", json=body).json()["tokens"]
        return ids

    tokenizer = device.tokenizer
    assert tokens() == device.prompt(text, chat=False).ids.tolist()
    assert tokens(add_special_tokens=False) == tokenizer.encode(text, special=True)
    whole = [*tokenizer.beginning, *tokenizer.encode(text, special=True)]
    assert tokens(add_special_tokens=True) == whole
