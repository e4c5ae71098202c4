"""Tools whose schemas cannot be enforced wholly, and calls that come back as agents keep them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from pilotfish.device_runtime.service.refusal import RefusalError
from pilotfish.device_runtime.service.tools import (
    MOST_PARAMETERS,
    FunctionFields,
    read_tools,
    with_call_ids,
)
from tests.conftest import Pair
from tests.support import web
from tests.support.calling import callers
from tests.support.serving import Serving, two_lanes

assert callers  # a fixture
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SET = {"type": "object", "properties": {"ids": {"type": "array", "uniqueItems": True}}}
OPTIONAL = {"type": "object", "properties": {"a": {"type": "null", "format": "path"}}}


@pytest.fixture(scope="module")
def service(callers: Pair) -> Iterator[Serving]:
    with two_lanes(callers) as started:
        yield started


def requests(
    service: Serving, route: str, *functions: dict[str, Any], **more: Any
) -> httpx.Response:
    """Ask on one of the routes, offering these functions; `more` is of the chat route."""
    if route == CHAT:
        tools = [{"type": "function", "function": function} for function in functions]
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "tools": tools}
    else:
        tools = [{"type": "function", **function} for function in functions]
        body = {"input": "x", "max_output_tokens": 16, "tools": tools}
    return web.post(service.url + route, json={**body, **more}, timeout=60.0)


@pytest.mark.parametrize("route", [CHAT, RESPONSES])
def test_a_tool_that_cannot_be_enforced_wholly_refuses_nothing(
    service: Serving, route: str
) -> None:
    answer = requests(service, route, {"name": "put", "parameters": SET})
    assert answer.status_code == 200, answer.text
    strict = {"name": "put", "parameters": SET, "strict": True}
    answer = requests(
        service, route, {"name": "move", "parameters": OPTIONAL, "strict": True}, strict
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    where = "tools[1].function.parameters" if route == CHAT else "tools[1].parameters"
    assert (error["code"], error["param"]) == ("bad_grammar", where)
    assert "'put'" in error["message"]
    assert '"uniqueItems" (at /properties/ids/uniqueItems)' in error["message"]


def test_the_forms_of_answers_are_refused_by_name(service: Serving) -> None:
    form = {"type": "json_schema", "name": "n", "schema": SET}
    answers = (
        requests(service, CHAT, response_format={"type": "json_schema", "json_schema": {
            "name": "n", "schema": SET}}),
        requests(service, RESPONSES, text={"format": form}),
        requests(service, CHAT, structured_outputs={"json": SET}),
    )  # fmt: skip
    params = ["response_format", "text.format.schema", "structured_outputs"]
    for answer, param in zip(answers, params, strict=True):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert '"uniqueItems" (at /properties/ids/uniqueItems)' in error["message"]


def test_schemas_beyond_a_megabyte_are_refused() -> None:
    for size, fits in ((MOST_PARAMETERS // 2, True), (MOST_PARAMETERS, False)):
        text = json.dumps({"type": "object", "description": "x" * size}).encode()
        function = FunctionFields("f", parameters=msgspec.Raw(text))
        if fits:
            assert read_tools([function]) is not None
        else:
            with pytest.raises(RefusalError, match="have more than 1,048,576 bytes"):
                read_tools([function])


CUT = ['{"to": "he', "{", "", "null", "3", '["a"]', '"a"', {"to": "here"}, {}, None]


@pytest.mark.parametrize("arguments", CUT, ids=str)
def test_a_call_that_was_cut_off_goes_on(service: Serving, arguments: Any) -> None:
    """As at vLLM: a refusal would come again with each request that goes on with the chat."""
    call = {"id": "a", "function": {"name": "move", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "a", "content": None}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call]},
        result,
    ]
    answer = requests(service, CHAT, {"name": "move"}, messages=messages)
    assert answer.status_code == 200, answer.text
    items = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "a", "name": "move", "arguments": arguments},
        {"type": "function_call_output", "call_id": "a", "output": None},
    ]
    answer = requests(service, RESPONSES, {"name": "move"}, input=items)
    assert answer.status_code == 200, answer.text


def test_older_forms_of_calls(service: Serving) -> None:
    old = {"name": "move", "arguments": '{"to": "here"}'}
    for reply in (
        [{"role": "assistant", "content": None, "function_call": old},
         {"role": "function", "name": "move", "content": "done"}],
        [{"role": "assistant", "tool_calls": [{"function": {**old, "arguments": {"to": "x"}}}]},
         {"role": "tool"}],
    ):  # fmt: skip
        answer = requests(service, CHAT, {"name": "move"}, messages=reply)
        assert answer.status_code == 200, answer.text


def test_results_without_an_id_are_of_the_calls_before_them() -> None:
    def call(name: str, id: str | None = None) -> dict[str, Any]:
        return {"id": id, "function": {"name": name}}

    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [call("a", ""), call("b"), call("c", "x")]},
        {"role": "tool", "name": "b"},
        {"role": "tool", "tool_call_id": "x"},
        {"role": "tool", "tool_call_id": ""},  # names none, as the id "" of a call
    ]
    info = with_call_ids(messages)
    ids = [item["id"] for item in info[0]["tool_calls"]]
    assert [item["tool_call_id"] for item in info[1:]] == [ids[1], "x", ids[0]]
    assert len({*ids}) == 3
    assert all(len(id) == 9 and id.isalnum() for id in ids[:2])
    with pytest.raises(RefusalError, match=r"messages\[4\]\.tool_call_id is missing"):
        with_call_ids([*info, {"role": "tool"}])
