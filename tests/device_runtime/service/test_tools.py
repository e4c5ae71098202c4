"""Tools over HTTP, asked by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.conftest import Pair
from tests.support import web
from tests.support.calling import TOOLS, callers, tool
from tests.support.serving import Serving, chat, two_lanes

assert callers  # a fixture
MOVE = {"type": "function", "function": {"name": "move"}}


@pytest.fixture(scope="module")
def service(callers: Pair) -> Iterator[Serving]:
    with two_lanes(callers) as started:
        yield started


@pytest.fixture(scope="module")
def client(service: Serving) -> openai.OpenAI:
    return service.client()


def grown(chunks: Any) -> tuple[str, list[list[str]], str]:
    """Put a stream together: its words, its calls (id, name, arguments), and why it ended."""
    words, reason = "", ""
    calls: list[list[str]] = []
    for chunk in chunks:
        (choice,) = chunk.choices
        words += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                calls.append([call.id, call.function.name, ""])
            calls[call.index][2] += call.function.arguments
    return words, calls, reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_grows_into_the_whole(client: openai.OpenAI, temperature: float) -> None:
    for choice in ("auto", "required", MOVE):
        options: dict[str, Any] = {
            "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False,
            "temperature": temperature, "seed": 5, "max_tokens": 150,
        }  # fmt: skip
        whole = chat(client, **options).choices[0]
        words, calls, reason = grown(chat(client, **options, stream=True))
        wanted = whole.message.tool_calls or []
        assert [call[1:] for call in calls] == [
            [item.function.name, item.function.arguments] for item in wanted
        ]
        assert words == (whole.message.content or "")
        assert reason == whole.finish_reason
        if choice != "auto":
            assert reason == "tool_calls"
            assert whole.message.content is None
            assert all(item.id.startswith("call_") for item in wanted)
            json.loads(calls[0][2])
        if choice == MOVE:
            assert [call[1] for call in calls] == ["move"]


def test_a_loop_of_three_calls(client: openai.OpenAI) -> None:
    lines: list[Any] = [{"role": "user", "content": "move"}]
    for _ in range(3):
        answer = client.chat.completions.create(
            model="pilotfish", messages=lines, tools=TOOLS, tool_choice="required", max_tokens=400
        )
        lines.append(answer.choices[0].message)
        calls = answer.choices[0].message.tool_calls
        assert calls
        lines += [
            {"role": "tool", "tool_call_id": call.id, "content": call.function.arguments}
            for call in calls
        ]
    answer = client.chat.completions.create(
        model="pilotfish", messages=lines, tools=TOOLS, tool_choice="none", max_tokens=8
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_a_call_that_is_cut_off(client: openai.OpenAI) -> None:
    whole = chat(client, tools=TOOLS, tool_choice=MOVE, max_tokens=150)
    short = chat(
        client, tools=TOOLS, tool_choice=MOVE, max_tokens=whole.usage.completion_tokens - 5
    ).choices[0]
    assert short.finish_reason == "length"
    (call,) = short.message.tool_calls
    arguments = whole.choices[0].message.tool_calls[0].function.arguments
    assert arguments.startswith(call.function.arguments)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"tools": [tool("a b")]}, "tools"),
        ({"tools": [tool("a"), tool("a")]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": 1}}]}, "function.name"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "required"}, "tools"),
        ({"messages": [{"role": "tool", "content": "x", "tool_calls": [{}]}]}, "tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "tool_call_id"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    service: Serving, message: dict[str, Any], param: str | None
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **message}
    answer = web.post(f"{service.url}/v1/chat/completions", json=body, timeout=60.0)
    assert answer.status_code == 400, answer.text
    named = answer.json()["error"]["param"]
    assert named == param or (param and named.endswith(param)), answer.text


@pytest.mark.parametrize(
    "message",
    [
        {"reasoning_effort": "none"},
        {"reasoning_effort": "high"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tools": [], "tool_choice": "none"},
    ],
)
def test_what_may_be_said(service: Serving, message: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **message}
    answer = web.post(f"{service.url}/v1/chat/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text


NESTED = "[" * 985 + "]" * 985


@pytest.mark.parametrize("parameters", ["1e400", "-1e999", "7" * 5000, '"\\ud800"', '{"a":1e400}'])
def test_schemas_that_are_none_are_refused(service: Serving, parameters: str) -> None:
    body = (
        '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "tools": [{"type": '
        '"function", "function": {"name": "a", "parameters": {"type": "object", "x": %s}}}]}'
    )
    for text in (body % parameters, body % NESTED, body.replace("%s", '"\xff"')):
        data = text.encode("latin-1")
        answer = web.post(f"{service.url}/v1/chat/completions", content=data, timeout=60.0)
        assert answer.status_code in (200, 400), answer.text


def test_arguments_that_are_nested_deeply(service: Serving) -> None:
    for depth in (900, 960, 975, 985, 995, 1100):
        call = {"id": "a", "function": {"name": "b", "arguments": "[" * depth + "]" * depth}}
        lines = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
        body = {"messages": lines, "max_tokens": 4}
        answer = web.post(f"{service.url}/v1/chat/completions", json=body, timeout=60.0)
        assert answer.status_code in (200, 400), (depth, answer.text)


def test_a_stop_string_within_a_call(client: openai.OpenAI) -> None:
    whole = chat(client, tools=TOOLS, tool_choice=MOVE, max_tokens=150).choices[0]
    assert whole.finish_reason == "tool_calls"
    cut = chat(client, tools=TOOLS, tool_choice=MOVE, max_tokens=150, stop=["ere"]).choices[0]
    assert cut.finish_reason == "stop"
    (call,) = cut.message.tool_calls
    assert not call.function.arguments.endswith("}")


def test_several_answers_and_logprobs(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    answer = chat(client, n=3, temperature=1.0, seed=1, logprobs=True, **options)
    for choice in answer.choices:
        assert choice.message.tool_calls
        assert len(choice.logprobs.content) > 5
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == len(ids)
