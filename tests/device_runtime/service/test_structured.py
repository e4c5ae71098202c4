"""Structured output over HTTP, asked by OpenAI's own client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.conftest import Pair
from tests.support import web
from tests.support.pydantic_types import Robot
from tests.support.serving import Serving, chat, content_of, two_lanes
from tests.support.writing import OBJECT, PIECES, writers

assert writers  # a fixture


@pytest.fixture(scope="module")
def service(writers: Pair) -> Iterator[Serving]:
    with two_lanes(writers) as started:
        yield started


@pytest.fixture(scope="module")
def client(service: Serving) -> openai.OpenAI:
    return service.client()


def test_an_object_of_a_schema(client: openai.OpenAI) -> None:
    """As llama.cpp has it, and older clients of schemas ask."""
    options: Any = {"type": "json_object", "schema": OBJECT}
    answer = chat(client, response_format=options, max_tokens=120)
    assert set(json.loads(answer.choices[0].message.content)) == {"ab", "bad", "x", "dd"}


def named(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema(client: openai.OpenAI, stream: bool, temperature: float) -> None:
    for seed in range(3):
        options = {"temperature": temperature, "seed": seed, "max_tokens": 120, "stream": stream}
        answer = chat(client, response_format=named(OBJECT), **options)
        text = content_of(answer) if stream else answer.choices[0].message.content
        assert set(json.loads(text)) == {"ab", "bad", "x", "dd"}


def test_forced_tokens_are_told(client: openai.OpenAI) -> None:
    body = {"pilotfish": {"protocol": "greedy", "window": 6}}
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 120, "extra_body": body}
    for info in ({"response_format": named(OBJECT)}, {}):
        chunks = [*chat(client, stream=True, **info, **options)]
        pieces = [chunk.choices[0].pilotfish for chunk in chunks[1:-1]]
        forced = [chunk["tokens"] for chunk in pieces if chunk["origin"] == "forced"]
        assert sum(forced) == chunks[-1].pilotfish["forced"]
        assert bool(forced) == bool(info)


def test_the_client_parses_models(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="pilotfish", messages=[{"role": "user", "content": "a"}], max_tokens=200,
        response_format=Robot, temperature=1.0, seed=2, n=3,
    )  # fmt: skip
    robots = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(robot, Robot) for robot in robots)
    assert len({str(robot) for robot in robots}) > 1


def test_any_object(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"response_format": {"type": "json_object"}, "max_tokens": 30}
    bias = {PIECES.index("}"): 100, PIECES.index('{"'): -100}
    answer = chat(client, **options, logit_bias=bias)
    assert json.loads(answer.choices[0].message.content) == {}


@pytest.mark.parametrize(
    ("message", "pattern"),
    [
        ({"regex": "[ab]{3}[0-9]"}, "[ab]{3}[0-9]"),
        ({"choice": ["abc", 'b"d']}, 'abc|b"d'),
        ({"grammar": 'start: /[0-9]{2}/ "-" /[a-c]{2}/'}, "[0-9]{2}-[a-c]{2}"),
        ({"json": {"enum": ["ab", 12]}}, '"ab"|12'),
        ({"json": '{"enum": ["ab", 12]}'}, '"ab"|12'),
        ({"json_object": True}, r"\{.*"),
    ],
)
def test_as_vllm_has_them(client: openai.OpenAI, message: dict[str, Any], pattern: str) -> None:
    body = {"structured_outputs": message}
    answer = chat(client, max_tokens=20, extra_body=body)
    assert re.fullmatch(pattern, answer.choices[0].message.content, re.DOTALL)
    text = client.completions.create(
        model="pilotfish", prompt="a", max_tokens=20, temperature=0, extra_body=body
    )
    assert re.fullmatch(pattern, text.choices[0].text, re.DOTALL)


def test_no_format_at_all(client: openai.OpenAI) -> None:
    plain = chat(client, max_tokens=8).choices[0].message.content
    for info in ({"type": "text"}, None):
        assert chat(client, max_tokens=8, response_format=info).choices[0].message.content == plain


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "invalid_value", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "invalid_value", "response_format"),
        ({"response_format": named({"type": "strange"})}, "bad_grammar", "response_format"),
        ({"structured_outputs": {"regex": "("}}, "bad_grammar", "structured_outputs"),
        ({"structured_outputs": {"regex": 3}}, "invalid_value", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "invalid_value", "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": 3}}, "invalid_value",
         "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "invalid_value",
         "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "invalid_value", "structured_outputs"),
        ({"structured_outputs": {"regex": "z"}}, "bad_grammar", None),
    ],
)  # fmt: skip
def test_what_is_no_format(
    service: Serving, body: dict[str, Any], code: str, param: str | None
) -> None:
    requests = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, **body}
    answer = web.post(f"{service.url}/v1/chat/completions", json=requests)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == code
    if param is not None:
        assert error["param"].startswith(param)
