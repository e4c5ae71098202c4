"""Anthropic's Messages API, over plain HTTP: its answers and events."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.conftest import Pair
from tests.device_runtime.service.test_responses import BIAS, ENDING
from tests.support import web
from tests.support.anthropic_types import check
from tests.support.messages_api import (
    ALICE,
    CONTEXT,
    MOVE,
    SAY,
    body_of,
    callers,
    events_of,
    grown,
    message,
    post,
    prompt_tokens,
    stream,
)
from tests.support.serving import Serving, serving

assert callers  # a fixture

FORCED: dict[str, Any] = {
    "tools": [MOVE], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}
}  # fmt: skip
SCHEMA = {"format": {"type": "json_schema", "schema": MOVE["input_schema"]}}
THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
ENDS_SOON = {"temperature": 1.0, "seed": 3, "logit_bias": ENDING, "max_tokens": 600}
WAYS: dict[str, dict[str, Any]] = {
    "words": {},
    "schema": {"output_config": SCHEMA, "max_tokens": 300},
    "older schema": {"output_format": SCHEMA["format"], "max_tokens": 300},
    "stop": {"stop_sequences": ["rrr"], "max_tokens": 300},
    "call": {**FORCED, "max_tokens": 200},
    "named": {"tools": [MOVE], "tool_choice": {"type": "tool", "name": "move"}, "max_tokens": 200},
    "cut off": {**FORCED, "max_tokens": 42},
    "thought": {**THINK, **ENDS_SOON, "output_config": SCHEMA},
    "thought only": THINK,
    "thought and call": {**THINK, **ENDS_SOON, **FORCED},
    "hidden thought": {
        **ENDS_SOON, **FORCED,
        "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    },
}  # fmt: skip
BLOCKS = {
    "words": (["text"], "max_tokens"),
    "schema": (["text"], "end_turn"),
    "older schema": (["text"], "end_turn"),
    "stop": (["text"], "stop_sequence"),
    "call": (["tool_use"], "tool_use"),
    "named": (["tool_use"], "tool_use"),
    "cut off": (["tool_use"], "max_tokens"),
    "thought": (["thinking", "text"], "end_turn"),
    "thought only": (["thinking"], "max_tokens"),
    "thought and call": (["thinking", "tool_use"], "tool_use"),
    "hidden thought": (["thinking", "tool_use"], "tool_use"),
}


def without_ids(body: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs each time."""
    content = [{**block, "id": ""} for block in body["content"]]
    usage = {name: value for name, value in body["usage"].items() if "input" not in name}
    usage["prompt"] = prompt_tokens(body)
    return {**body, "id": "", "content": content, "usage": usage, "pilotfish": None}


def test_a_text_is_the_chats(callers: Serving) -> None:
    whole = message(
        callers, system="ba", top_k=3, metadata={"user_id": "x"}, service_tier="auto",
        pilotfish={"protocol": "greedy", "window": 3},
    )  # fmt: skip
    messages: Any = [{"role": "system", "content": "ba"}, *SAY]
    same = callers.client(ALICE).chat.completions.create(
        model="pilotfish", messages=messages, max_tokens=12, temperature=0,
        extra_body={"logit_bias": BIAS},
    )  # fmt: skip
    assert whole["content"] == [{"type": "text", "text": same.choices[0].message.content}]
    assert same.usage is not None
    assert prompt_tokens(whole) == same.usage.prompt_tokens
    assert whole["usage"]["output_tokens"] == 12
    assert whole["pilotfish"]["protocol"] == "greedy"


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_grows_into_the_whole(callers: Serving, way: str) -> None:
    whole = message(callers, **WAYS[way])
    events = stream(callers, **WAYS[way])
    assert ([block["type"] for block in whole["content"]], whole["stop_reason"]) == BLOCKS[way]
    assert without_ids(grown(events)) == without_ids(whole)
    assert prompt_tokens(events[0]["message"]) == prompt_tokens(whole)
    assert events[-2]["pilotfish"].keys() == whole["pilotfish"].keys()
    for block in whole["content"]:
        match block["type"]:
            case "tool_use" if way != "cut off":
                assert block["input"]["to"] in ("ab", "ba")
            case "tool_use":
                assert block["input"] == {}
            case "thinking":
                assert block["signature"]
                assert (block["thinking"] == "") == ("hidden" in way)
    thought = whole["usage"]["output_tokens_details"]["thinking_tokens"]
    assert (thought > 0) == ("thought" in way)
    assert thought <= whole["usage"]["output_tokens"]


def test_the_stop_sequence_is_named(callers: Serving) -> None:
    text = message(callers)["content"][0]["text"]
    stopped = message(callers, stop_sequences=["nowhere", text[5:8], text[4:7]])
    assert stopped["stop_sequence"] == text[text.index(text[4:7]) :][:3]
    assert stopped["content"][0]["text"] == text[: text.index(text[4:7])]


def test_the_end_of_the_context_is_no_limit_of_tokens(callers: Serving) -> None:
    whole = message(callers, max_tokens=10 * CONTEXT)
    assert whole["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [({"type": "adaptive"}, False), ({"type": "disabled"}, False), (THINK["thinking"], True)],
)
def test_thinking(callers: Serving, thinking: dict[str, Any], thinks: bool) -> None:
    content = message(callers, thinking=thinking)["content"]
    assert (content[0]["type"] == "thinking") == thinks


def test_a_loop_of_three_calls(callers: Serving) -> None:
    """As programs do it: the content goes back as it came."""
    lines: list[Any] = [{"role": "user", "content": "move"}]
    read = 0
    for number in range(3):
        answer = message(callers, messages=lines, **THINK, **ENDS_SOON, **FORCED)
        assert prompt_tokens(answer) > read
        read = prompt_tokens(answer)
        call = answer["content"][-1]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "ab"}
        lines = [
            *lines,
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [{**result, "is_error": number == 1}]},
        ]
    last = message(callers, messages=lines, tools=[MOVE], tool_choice={"type": "none"})
    assert last["content"][0]["type"] == "text"
    counted = post(
        callers, {"messages": lines, "tools": [MOVE], "system": [{"type": "text", "text": "ab"}]},
        "/v1/messages/count_tokens",
    ).json()  # fmt: skip
    assert counted == {"input_tokens": prompt_tokens(last) + 3}


def test_thoughts_go_on(callers: Serving) -> None:
    first = message(callers, **WAYS["thought"])
    after = [{"role": "user", "content": "dd"}]
    whole = [*SAY, {"role": "assistant", "content": first["content"]}, *after]
    without = [*SAY, {"role": "assistant", "content": first["content"][1:]}, *after]
    redacted = [{"type": "redacted_thinking", "data": "x"}, *first["content"][1:]]
    also = [*SAY, {"role": "assistant", "content": redacted}, *after]
    counts = [prompt_tokens(message(callers, messages=lines)) for lines in (whole, without, also)]
    assert counts[0] > counts[1] == counts[2]


def test_what_changes_no_text_is_accepted(callers: Serving) -> None:
    """The fields that Anthropic's own clients send beside the conversation."""
    cache = {"type": "ephemeral", "ttl": "1h"}
    block = {"type": "text", "text": "ab", "cache_control": cache}
    more = {
        "messages": [{"role": "user", "content": [{**block, "citations": None}]}],
        "system": [{**block, "text": "ba"}],
        "tools": [{**MOVE, "type": "custom", "cache_control": cache, "input_examples": [{}]}],
        "cache_control": cache, "fallbacks": [], "container": None,
        "mcp_servers": [], "output_config": {"effort": "low"}, "speed": "standard",
        "metadata": {"user_id": "u"}, "service_tier": "standard_only", "stream": False,
    }  # fmt: skip
    whole = message(callers, **more)
    assert whole["content"] == message(callers, system="ba", tools=[MOVE])["content"]


def test_what_is_read_again_is_counted_apart(callers: Serving) -> None:
    system = "ab" * 100
    first, again = (message(callers, system=system) for _ in range(2))
    assert again["usage"]["cache_read_input_tokens"] >= 100
    assert prompt_tokens(again) == prompt_tokens(first)


def test_unknown_fields_are_named_in_a_header(pair: Pair) -> None:
    """As Claude Code sends some, at a service that is not strict."""
    block = {"type": "text", "text": "ab", "novel": 1}
    body = {
        "max_tokens": 2,
        "messages": [{"role": "user", "content": [block]}],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 20_000}},
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    }
    with serving(pair.draft, None) as service:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = web.post(f"{service.url}{path}?beta=true", json=body)
            assert answer.status_code == 200, answer.text
            names = answer.headers["x-pilotfish-ignored"].split(", ")
            assert {*names} >= {
                "context_management", "messages[0].content[0].novel", "tools[0]",
                "output_config.task_budget",
            }  # fmt: skip
            body.pop("max_tokens", None)


def test_the_key_in_either_header(callers: Serving) -> None:
    url = f"{callers.url}/v1/messages"
    for headers, status in (
        ({"x-api-key": ALICE}, 200),
        ({"Authorization": f"Bearer {ALICE}"}, 200),
        ({"x-api-key": ALICE, "Authorization": "Bearer another"}, 200),
        ({"x-api-key": f"Bearer {ALICE}"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "another", "Authorization": "another"}, 401),
        ({}, 401),
    ):
        answer = web.post(url, json=body_of(), headers=headers)
        assert answer.status_code == status, headers
        check(answer.json())
    assert answer.json()["error"]["type"] == "authentication_error"
    assert "x-api-key" in answer.json()["error"]["message"]
    listed = callers.get("/v1/models", headers={"x-api-key": ALICE})
    assert listed.status_code == 200


def test_a_stream_ends_with_what_went_wrong(callers: Serving, long_pair: Pair) -> None:
    early = post(callers, body_of(messages=[{"role": "user", "content": "ab" * 4000}], stream=True))
    assert early.status_code == 400
    assert early.json()["error"]["details"]["error_code"] == "context_length_exceeded"
    check(early.json())
    body = {"max_tokens": 30_000, "messages": SAY, "stream": True}
    with (
        serving(long_pair.draft, None, "--drain", 0.1, "--protocol", "local") as service,
        web.stream("POST", f"{service.url}/v1/messages", json=body, timeout=60.0) as answer,
    ):
        lines = answer.iter_text()
        text = next(lines)
        service.tell(signal.SIGTERM)
        events = events_of(text + "".join(lines))
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "overloaded_error"
    assert events[-1]["error"]["details"]["error_code"] == "draining"


def test_a_waiting_stream_gets_pings(pair: Pair) -> None:
    """While the edge cannot be reached; a lane notices only then that the client is gone."""
    nobody = "tcp://127.0.0.1:9"
    body = {"max_tokens": 3, "messages": SAY, "stream": True}
    with (
        serving(pair.draft, nobody) as service,
        web.stream("POST", f"{service.url}/v1/messages", json=body, timeout=60.0) as answer,
    ):
        lines = answer.iter_text()
        start, ping = next(lines), next(lines)
    assert [event["type"] for event in events_of(start)] == ["message_start"]
    assert ping == 'event: ping\ndata: {"type":"ping"}\n\n'
