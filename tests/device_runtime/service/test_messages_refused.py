"""What Anthropic's Messages API refuses here, in Anthropic's form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import web
from tests.support.anthropic_types import check
from tests.support.messages_api import (
    ALICE,
    MOVE,
    SAY,
    body_of,
    callers,
    message,
    post,
)
from tests.support.serving import Serving

assert callers  # a fixture

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": ""}}
CALL = {"type": "tool_use", "id": "a", "name": "move", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}


def chat_of(*blocks: object, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*blocks]}, *SAY]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [*SAY, {"role": "assistant", "content": "a"}]}, "messages[1]"),
        ({"messages": [*SAY, {"role": "assistant", "content": []}]}, "messages[1]"),
        (chat_of({}), "messages[0].content[0]"),
        (chat_of("a"), "messages[0].content[0]"),
        (chat_of({"type": "text"}), "messages[0].content[0]"),
        (chat_of({"type": "text", "text": "a", "x": 1}), "messages[0].content[0].x"),
        (chat_of(IMAGE), "messages[0].content[0]"),
        (chat_of(DOCUMENT), "messages[0].content[0]"),
        (chat_of({"type": "server_tool_use"}), "messages[0].content[0].type"),
        (chat_of(CALL), "messages[0].content[0]"),
        (chat_of({"type": "thinking", "thinking": "a"}), "messages[0].content[0]"),
        (chat_of(RESULT), "messages[0].content[0].tool_use_id"),
        (chat_of(CALL, RESULT, role="assistant"), "messages[0].content[1]"),
        (chat_of(CALL, role="system"), "messages[0].content[0]"),
        (chat_of({**CALL, "input": "{}"}, role="assistant"), "messages[0].content[0]"),
        (chat_of({**CALL, "input": None}, role="assistant"), "messages[0].content[0]"),
        (chat_of({**RESULT, "content": [IMAGE]}), "messages[0].content[0].content[0]"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"system": 3}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "a"}]}, "tools[0]"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools"),
        ({"tools": [MOVE, MOVE]}, "tools"),
        ({"tools": [{**MOVE, "input_schema": {"type": "string"}}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"tools": [MOVE], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [MOVE], "tool_choice": {"type": "tool", "name": "x"}}, "tools"),
        ({"tools": [MOVE], "tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": {}}, "thinking"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}},
            "output_config.format.schema",
        ),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 2}, "n"),
        ({"pilotfish": {"verse": 1}}, "pilotfish.verse"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(callers: Serving, fields: dict[str, Any], param: str) -> None:
    body = body_of(**fields)
    answer = post(callers, body)
    assert answer.status_code == 400, answer.text
    check(answer.json())
    error = answer.json()["error"]
    assert (error["type"], error["details"]["param"]) == ("invalid_request_error", param)
    if not {"max_tokens", "stop_sequences"} & {*fields}:
        del body["max_tokens"]
        counted = post(callers, body, "/v1/messages/count_tokens")
        # a schema is compiled only for an answer
        assert counted.status_code == (200 if param == "output_config.format.schema" else 400)


@pytest.mark.parametrize("kind", ["create", "continue"])
def test_threads_are_refused_so_that_clients_go_on_without(callers: Serving, kind: str) -> None:
    """Anthropic's Python client sends this field first, and the whole conversation then."""
    thread = {"type": kind, "previous_message_id": "msg_1"}
    error = post(callers, body_of(thread=thread)).json()["error"]
    assert error["details"]["error_code"] == "thread_unsupported_request"
    assert message(callers, thread=None)["content"]
    null = post(callers, json.dumps({**body_of(), "thread": None}).encode())
    assert null.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("GET", "/v1/messages/count_tokens", 405, "invalid_request_error"),
    ],
)
def test_other_routes_below(
    callers: Serving, method: str, path: str, status: int, kind: str
) -> None:
    answer = web.request(method, callers.url + path, headers={"x-api-key": ALICE})
    check(answer.json())
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


def test_another_model_and_a_long_body(callers: Serving) -> None:
    for path, most in (("/v1/messages", 3), ("/v1/messages/count_tokens", None)):
        unknown = post(callers, body_of(model="claude-x", max_tokens=most), path)
        assert unknown.status_code == 404
        assert unknown.json()["error"]["type"] == "not_found_error"
        long = post(callers, b'{"x": "' + b"x" * 1_000_000 + b'"}', path)
        assert long.status_code == 413
        assert long.json()["error"]["type"] == "request_too_large"
        check(unknown.json())
        check(long.json())


SOME = b'"model": "pilotfish", "max_tokens": 2, '
BLOCK = b'{"type": "text", "text": "a"}'
SHORT = b'{"role":"user","content":""}'
NESTED = b"[" * 9000 + b"]" * 9000
MEBIBYTE = 2**20


def in_content(blocks: bytes, role: bytes = b"user") -> bytes:
    return b'{%b"messages": [{"role": "%b", "content": [%b]}]}' % (SOME, role, blocks)


def in_call(value: bytes) -> bytes:
    call = b'{"type": "tool_use", "id": "a", "name": "a", "input": %b}' % value
    return in_content(call, b"assistant")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{" + SOME,
        b"\xff{}",
        b"[" * 50_000,
        b'{%b"messages": %b}' % (SOME, NESTED),
        b'{%b"messages": [%b{}]}' % (SOME, b"{}," * 30_000),
        b'{%b"messages": [%b]}' % (SOME, b",".join([SHORT] * 4097)),
        b'{%b"messages": [{"role": "user", "content": {"a": 1}}]}' % SOME,
        b'{%b"messages": {"role": "user", "content": "a"}}' % SOME,
        in_content(b"{}," * 30_000 + b"{}"),
        in_content(b"null"),
        in_content(b"[%b]" % BLOCK),
        in_content(NESTED),
        in_content(BLOCK + b", " + NESTED),
        in_content(b'{"type": ["text"]}'),
        in_content(b'{"type": "text", "text": {"text": "a"}}'),
        in_content(b'{"type": "text", "text": "a", "text": 3}'),
        in_content(b'{"type": "thinking", "thinking": []}', b"assistant"),
        in_content(b'{"type": "tool_result", "tool_use_id": 3}'),
        in_content(b'{"type": "tool_result", "tool_use_id": "a", "content": [[]]}'),
        in_content(b'{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "x"}]}'),
        in_content(b'{"type": "tool_result", "tool_use_id": "a", "is_error": "no"}'),
        in_call(b"[]"),
        in_call(b'{"a": %b}' % NESTED),
        in_call(b'{"a": 1e999}'),
        in_call(b"{"),
        b'{%b"messages": [], "system": [%b]}' % (SOME, b"{}," * 30_000 + b"{}"),
        b'{%b"messages": [], "tools": [%b]}' % (SOME, b"{}," * 30_000 + b"{}"),
        b'{%b"messages": [], "tools": [{"name": "a", "input_schema": %b}]}' % (SOME, NESTED),
        b'{%b"messages": [], "tool_choice": [[]]}' % SOME,
        b'{%b"messages": [], "thinking": [[]]}' % SOME,
        b'{%b"messages": [], "output_config": {"format": []}}' % SOME,
        b'{%b"messages": [], "metadata": %b, "stop_sequences": [[]]}' % (SOME, NESTED),
        b'{"max_tokens": 1e400, "messages": [{"role": "user", "content": "x"}]}',
    ],
    ids=lambda body: repr(body[40:80]),
)
def test_garbage_at_every_level(callers: Serving, body: bytes) -> None:
    before = callers.resident_bytes()
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = post(callers, body, path)
        assert answer.status_code == 400, answer.text
        check(answer.json())
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert len(answer.content) < 1000
    assert callers.resident_bytes() - before < 16 * MEBIBYTE


def test_strange_texts_are_texts(callers: Serving) -> None:
    """They are answered, or refused for their length; none of them is an error of the service."""
    for text in (b'"\\ud800"', b'"\\u0000"', b'"' + "ab€".encode() + b'"', b'""', b'"<think>"'):
        block = b'{"type": "text", "text": %b, "cache_control": %b}' % (text, NESTED)
        answer = post(callers, in_content(b"%b, %b" % (block, BLOCK)))
        assert answer.status_code in (200, 400), answer.text
        check(answer.json())


def test_many_blocks_take_little_memory(callers: Serving) -> None:
    before = callers.resident_bytes()
    many = in_content(b",".join([b'{"type": "text", "text": ""}'] * 4000))
    for _ in range(5):
        assert post(callers, many).status_code == 200
    assert callers.resident_bytes() - before < 16 * MEBIBYTE
