"""The messages for a chat template that follow from Anthropic's blocks."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from pilotfish.device_runtime.service.messages import count_request

ASK: dict[str, Any] = {"role": "user", "content": "ask"}
LAST: dict[str, Any] = {"role": "user", "content": "last"}
CALLS = [
    {"type": "tool_use", "id": "a", "name": "move", "input": {"to": "here"}},
    {"type": "tool_use", "id": "b", "name": "stop", "input": {}},
]
TOOL_CALLS = [
    {"id": "a", "type": "function", "function": {"name": "move", "arguments": '{"to":"here"}'}},
    {"id": "b", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def result(call: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, **fields}


def tool(call: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call}


@pytest.mark.parametrize(
    ("system", "items", "expected"),
    [
        (None, [ASK], [ASK]),
        ("be", [ASK], [{"role": "system", "content": "be"}, ASK]),
        ([text("be"), text("kind")], [ASK], [{"role": "system", "content": "be\nkind"}, ASK]),
        (
            "be",
            [{"role": "system", "content": "kind"}, ASK, {"role": "system", "content": "now"}],
            [{"role": "system", "content": "be\nkind"}, ASK, {"role": "system", "content": "now"}],
        ),
        (None, [ASK, LAST], [{"role": "user", "content": "ask\nlast"}]),
        (
            None,
            [{"role": "user", "content": [text("a"), text("b")]}],
            [{"role": "user", "content": "a\nb"}],
        ),
        (
            None,
            [
                ASK,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "redacted_thinking", "data": "x"},
                        text("so"),
                        *CALLS,
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        result("b", content=[text("one"), text("two")]),
                        result("a", content="no way", is_error=True),
                        text("go"),
                        text("on"),
                    ],
                },
            ],
            [
                ASK,
                {
                    "role": "assistant",
                    "content": "so",
                    "reasoning_content": "hm",
                    "tool_calls": TOOL_CALLS,
                },
                tool("b", "one\ntwo"),
                tool("a", "Error: no way"),
                {"role": "user", "content": "go\non"},
            ],
        ),
        (
            None,
            [
                ASK,
                {"role": "assistant", "content": CALLS[:1]},
                {"role": "assistant", "content": CALLS[1:]},
                {"role": "user", "content": [result("a")]},
                {"role": "user", "content": [result("b", content=None)]},
            ],
            [
                ASK,
                {"role": "assistant", "content": "", "tool_calls": TOOL_CALLS},
                tool("a", ""),
                tool("b", ""),
            ],
        ),
        (
            None,
            [
                ASK,
                {"role": "assistant", "content": []},
                LAST,
                {"role": "assistant", "content": ""},
                {"role": "user", "content": []},
            ],
            [
                ASK,
                {"role": "assistant", "content": ""},
                LAST,
                {"role": "assistant", "content": ""},
                {"role": "user", "content": ""},
            ],
        ),
    ],
)
def test_messages(system: Any, items: list[Any], expected: list[Any]) -> None:
    body = {"messages": items} if system is None else {"messages": items, "system": system}
    _, talk = count_request(json.dumps(body).encode())
    messages = [dict(each) for each in talk.messages]
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = json.dumps(
                json.loads(function["arguments"]), separators=(",", ":")
            )
    assert messages == expected


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", True)),
        ({"type": "auto"}, ("auto", True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False)),
        ({"type": "any"}, ("required", True)),
        ({"type": "tool", "name": "move", "disable_parallel_tool_use": True}, ("move", False)),
        ({"type": "none"}, ("none", True)),
    ],
)
def test_the_choice_of_tools(choice: Any, expected: tuple[str, bool]) -> None:
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("move", "stop")]
    body = {"messages": [ASK], "tools": tools, **({"tool_choice": choice} if choice else {})}
    _, talk = count_request(json.dumps(body).encode())
    assert talk.tools is not None
    assert (talk.tools.choice, talk.tools.parallel) == expected


LONG = "x" * 150
MANY = 45_000


@pytest.mark.parametrize(
    ("items", "length"),
    [
        ([{"role": "user", "content": [text(LONG)] * MANY}], 151 * MANY - 1),
        ([{"role": "user", "content": LONG * 13}] * 4096, (13 * 150 + 1) * 4096 - 1),
        ([ASK, {"role": "assistant", "content": [text(LONG)] * MANY}, LAST], 151 * MANY - 1),
        (
            [
                ASK,
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": LONG}] * MANY,
                },
                LAST,
            ],
            151 * MANY - 1,
        ),
    ],
    ids=["user", "messages", "assistant", "thoughts"],
)
def test_many_blocks_are_read_in_time_that_grows_with_their_number(
    items: list[Any], length: int
) -> None:
    body = json.dumps({"messages": items}).encode()
    began_s = time.process_time()
    _, talk = count_request(body)
    assert time.process_time() - began_s < 2
    texts = [text for each in talk.messages for text in each.values() if isinstance(text, str)]
    assert max(map(len, texts)) == length
