"""Fields of a request that the service refuses, and fields that it ignores."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.device_runtime.service.test_service import client
from tests.support import web
from tests.support.serving import Serving, chat

__all__ = ["client"]


REFUSED = {
    "logprobs": "yes",
    "top_logprobs": 3,  # without logprobs
    "n": 17,
    "tools": [{"type": "function"}],
    "tool_choice": "always",
    "functions": [{"name": "f"}],
    "response_format": {"type": "yaml"},
    "logit_bias": {"5": 101},
    "presence_penalty": 2.5,
    "frequency_penalty": -2.5,
    "repetition_penalty": 0,
    "reasoning_effort": "extreme",
    "modalities": ["audio"],
    "min_p": 1.1,
    "guided_json": {},
    "repeat_penalty": 1.1,
    "use_beam_search": True,
    "temperature": -1,
    "top_p": -0.5,
    "top_k": -5,
    "seed": -2,
    "max_tokens": 0,
    "max_completion_tokens": "many",
    "stop": ["x"] * 17,
    "stream": "yes",
    "pilotfish": {"protocol": "greedy", "temperature": 1},
    "stream_options": {"include_usage": "yes"},
    "verbosity": "high",
    "ignore_eos": 1,
    "messages": [],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_offered_is_refused_by_its_name(service: Serving, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, name: REFUSED[name]}
    answer = web.post(f"{service.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert name in error["param"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("logprobs", 21), ("best_of", 0), ("suffix", "x"), ("prompt", ["a", {}]), ("prompt", [])],
)
def test_what_completions_do_not_offer(service: Serving, name: str, value: object) -> None:
    body = {"prompt": "x", "max_tokens": 4, name: value}
    answer = web.post(f"{service.url}/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("extension", "word"),
    [
        ({"protocol": "telepathy"}, "telepathy"),
        ({"protocol": "greedy", "lossy": True}, "auto"),
        (
            {"protocol": "greedy", "thrift": True},
            "rtt_threshold_s and thrift can only be used with protocol auto",
        ),
        ({"thrift": True, "lossy": True, "policy": "threshold"}, "not support thrift"),
        ({"policy": "fortune"}, "fortune"),
        ({"window": 4000}, "window"),
        ({"protocol": "dsd", "expansion": [2, 2]}, "expansion"),
    ],
)
def test_an_extension_that_makes_no_sense(
    service: Serving, extension: dict[str, Any], word: str
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "pilotfish": extension}
    answer = web.post(f"{service.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x"},
        {"role": ["user"], "content": "x"},
        {"role": "user"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": "assistant", "tool_calls": [{}]},
        {"role": "user", "content": "x", "weight": 0},
        {"role": "user", "content": "x", "name": 5},
    ],
)
def test_a_message_that_makes_no_sense(service: Serving, message: dict[str, Any]) -> None:
    answer = web.post(f"{service.url}/v1/chat/completions", json={"messages": [message]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages[0].")


def test_fields_that_change_no_text_are_passed_over(client: openai.OpenAI) -> None:
    plain = chat(client)
    same = chat(client, user="me", n=1, store=False, metadata={"a": "b"}, presence_penalty=0)
    assert same.choices[0].message.content == plain.choices[0].message.content


def test_fields_of_a_message_that_are_null_are_as_if_they_were_not_there(service: Serving) -> None:
    answered = {"role": "assistant", "content": None, "name": None, "refusal": None}
    messages = [{"role": "user", "content": "x"}, answered, {"role": "user", "content": "x"}]
    body = {"messages": messages, "max_tokens": 4}
    assert web.post(f"{service.url}/v1/chat/completions", json=body).status_code == 200


def test_a_prompt_that_does_not_fit(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, "x" * 2000, stream=stream)
        assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="pilotfish", prompt="")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="pilotfish", prompt=[64])


def test_a_model_of_another_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        chat(client, model="gpt-4")
    assert refused.value.code == "model_not_found"
    assert refused.value.param == "model"
