"""OpenAI's Responses API, asked by OpenAI's own client."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from pilotfish import EdgeServer
from tests.conftest import Pair
from tests.support import web
from tests.support.pydantic_types import Robot
from tests.support.serving import Serving, chat, serving
from tests.support.tiny import tiny_artifact
from tests.support.writing import PIECES

ALICE, BOB = (f"{name}-0123456789abcdef" for name in ("alice", "bob"))
# Random models of these pieces can write calls, and end a thought.
CALLING = [*PIECES, "th", "nk", "ink", "think", "</", "</think", "</think>", *"mgovhipkw_<>/", "Ċ"]
# They begin no thought by themselves, and end one soon.
BIAS = {at: -100 for at, piece in enumerate(CALLING) if piece in ("<", "h", "th", "think")}
ENDING = {**BIAS, CALLING.index("</think>"): 3}
THINKING = (
    "{% for message in messages %}{{ message.role[0] }}{{ message.reasoning_content }}"
    "{{ message.content }}{% for call in message.tool_calls %}{{ call.function.name }}"
    "{{ call.function.arguments }}<tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}a{% if enable_thinking %}<think>{% endif %}{% endif %}"
    "{# </think> #}"
)
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "move",
    "description": "It moves.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"to": {"enum": ["ab", "ba"]}},
        "required": ["to"],
        "additionalProperties": False,
    },
}
FORCED: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """For two clients."""
    folder = tmp_path_factory.mktemp("callers")
    pair = Pair(folder / "draft", folder / "target")
    for path, sharpness in zip(pair, (0.9, 0.7), strict=True):
        tiny_artifact(
            path, tokens=CALLING, seed=1, sharpness=sharpness, context=2048, template=THINKING
        )
    keys = folder / "api-keys"
    keys.write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    keys.chmod(0o600)
    with (
        EdgeServer(pair.target, threads=1) as edge,
        serving(pair.draft, edge.endpoint, "--api-keys", keys, "--lanes", 2, "--strict") as started,
    ):
        yield started


@pytest.fixture(scope="module")
def client(service: Serving) -> openai.OpenAI:
    return service.client(ALICE)


def requests(**info: Any) -> dict[str, Any]:
    """A short greedy request."""
    return {"model": "pilotfish", "max_output_tokens": 12, "temperature": 0, "input": "ab", **info}


def biased(**info: Any) -> dict[str, Any]:
    """The same, in words for the client, without thoughts."""
    return requests(**{**info, "extra_body": {"logit_bias": BIAS, **info.get("extra_body", {})}})


def respond(client: openai.OpenAI, **info: Any) -> Any:
    return client.responses.create(**biased(**info))


def without_ids(items: Any) -> list[dict[str, Any]]:
    info = [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in items]
    assert info
    return info


def test_a_text(client: openai.OpenAI) -> None:
    whole = respond(
        client, instructions="ba", metadata={"a": "b"}, user="x", truncation="disabled",
        extra_body={"top_k": 3, "pilotfish": {"protocol": "greedy", "window": 3}},
    )  # fmt: skip
    messages: Any = [{"role": "system", "content": "ba"}, {"role": "user", "content": "ab"}]
    same = client.chat.completions.create(
        model="pilotfish", messages=messages, max_tokens=12, temperature=0,
        extra_body={"logit_bias": BIAS},
    )  # fmt: skip
    assert whole.output_text == same.choices[0].message.content
    assert whole.id.startswith("resp_")
    assert whole.object == "response"
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.output[0].status == "incomplete"
    assert same.usage is not None
    assert whole.usage.input_tokens == same.usage.prompt_tokens
    assert whole.usage.output_tokens == 12
    assert whole.usage.total_tokens == whole.usage.input_tokens + 12
    assert whole.metadata == {"a": "b"}
    assert (whole.instructions, whole.max_output_tokens, whole.temperature) == ("ba", 12, 0)
    assert whole.pilotfish["protocol"] == "greedy"
    ended = respond(client, text={"format": schema(Robot)}, max_output_tokens=300)
    assert (ended.status, ended.incomplete_details) == ("completed", None)
    assert ended.output[0].status == "completed"


def schema(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    return {"type": "json_schema", "name": "n", "strict": True, "schema": model.model_json_schema()}


EFFORT = {
    "reasoning": {"effort": "low"},
    "temperature": 1.0,
    "extra_body": {"logit_bias": ENDING, "seed": 3},
}
WAYS: dict[str, dict[str, Any]] = {
    "words": {},
    "schema": {"text": {"format": schema(Robot)}, "max_output_tokens": 300},
    "call": {**FORCED, "max_output_tokens": 200},
    "cut off": {**FORCED, "max_output_tokens": 42},
    "thought": {**EFFORT, "text": {"format": schema(Robot)}, "max_output_tokens": 600},
    "thought only": {"reasoning": {"effort": "low"}},
    "thought and call": {**EFFORT, **FORCED, "max_output_tokens": 600},
}
KINDS = {
    "words": ["message"],
    "schema": ["message"],
    "call": ["function_call"],
    "cut off": ["function_call"],
    "thought": ["reasoning", "message"],
    "thought only": ["reasoning"],
    "thought and call": ["reasoning", "function_call"],
}


def counts(response: Any) -> dict[str, Any]:
    """The usage without what depends on earlier requests: how much of the prompt was cached."""
    return {**response.usage.model_dump(), "input_tokens_details": None}


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_grows_into_the_whole(client: openai.OpenAI, way: str) -> None:
    whole = respond(client, **WAYS[way])
    events = list(respond(client, **WAYS[way], stream=True))
    assert [item.type for item in whole.output] == KINDS[way]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert last.response.id == events[0].response.id
    assert counts(last.response) == counts(whole)
    assert without_ids(last.response.output) == without_ids(whole.output)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    for item in done:
        its = [event for event in events if getattr(event, "item_id", None) == item.id]
        grown = "".join(event.delta for event in its if event.type.endswith(".delta"))
        match item.type:
            case "function_call":
                assert (grown, its[-1].arguments) == (item.arguments, item.arguments)
                assert item.call_id.startswith("call_")
                assert item.id.startswith("fc_")
            case "message" | "reasoning":
                assert its[0].type == "response.content_part.added"
                assert its[-1].type == "response.content_part.done"
                assert grown == item.content[0].text == its[-1].part.text
    assert (whole.usage.output_tokens_details.reasoning_tokens > 0) == ("thought" in way)


def test_the_lines_of_a_stream(service: Serving) -> None:
    headers = {"Authorization": f"Bearer {ALICE}"}
    answer = web.post(
        f"{service.url}/v1/responses", json=requests(stream=True), headers=headers, timeout=60.0
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_the_client_parses_models(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "pilotfish", "input": "a", "temperature": 1.0}
    options["extra_body"] = {"seed": 2, "logit_bias": BIAS}
    whole = client.responses.parse(**options, text_format=Robot)
    assert isinstance(whole.output_parsed, Robot)
    with client.responses.stream(**options, text_format=Robot) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.output_text.delta" in kinds
    assert final.output_parsed == whole.output_parsed
    assert final.output_text == whole.output_text


@pytest.mark.parametrize("chained", [False, True], ids=["whole input", "previous_response_id"])
def test_a_loop_of_three_calls(client: openai.OpenAI, chained: bool) -> None:
    """As programs do it: the output goes back as it came."""
    lines: list[Any] = [{"role": "user", "content": "move"}]
    previous = None
    read = 0
    for _ in range(3):
        answer = client.responses.parse(
            **biased(input=lines, max_output_tokens=200), **FORCED, previous_response_id=previous
        )
        assert answer.usage is not None
        assert answer.usage.input_tokens > read
        read = answer.usage.input_tokens
        (call,) = answer.output
        assert call.type == "function_call"
        assert call.parsed_arguments == json.loads(call.arguments)
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "ab"}]
        lines = results if chained else [*lines, *answer.output, *results]
        previous = answer.id if chained else None
    last = respond(
        client, input=lines, previous_response_id=previous, tools=[TOOL], tool_choice="none"
    )
    assert last.output_text


def test_what_was_said_goes_on(client: openai.OpenAI) -> None:
    first = respond(client, input="ab", instructions="ba ba")
    for stream in (False, True):
        options = {"input": "dd", "previous_response_id": first.id, "instructions": "x"}
        answer = respond(client, **options, stream=stream)
        second = list(answer)[-1].response if stream else answer
        whole = [
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": [{"type": "input_text", "text": "dd"}]},
        ]
        same = respond(client, input=whole, instructions="x")
        assert counts(second) == counts(same)
        assert second.output_text == same.output_text
        assert second.previous_response_id == first.id
        third = respond(client, input="ab", previous_response_id=second.id)
        assert third.usage.input_tokens > second.usage.input_tokens


def test_thoughts_go_on_too(client: openai.OpenAI) -> None:
    first = respond(client, **WAYS["thought"])
    chained = respond(client, input="dd", previous_response_id=first.id)
    whole = [{"role": "user", "content": "ab"}, *first.output, {"role": "user", "content": "dd"}]
    assert counts(chained) == counts(respond(client, input=whole))
    selection = [item for item in whole if getattr(item, "type", "") != "reasoning"]
    assert chained.usage.input_tokens > respond(client, input=selection).usage.input_tokens


def test_a_call_that_was_cut_off_does_not_go_on(client: openai.OpenAI) -> None:
    first = respond(client, **WAYS["cut off"])
    assert first.status == "incomplete"
    assert respond(client, previous_response_id=first.id).output_text


def test_a_response_is_kept_for_its_client_only(service: Serving, client: openai.OpenAI) -> None:
    bob = service.client(BOB)
    first = respond(client)
    assert client.responses.retrieve(first.id) == first
    for ask in (bob.responses.retrieve, bob.responses.delete):
        with pytest.raises(openai.NotFoundError):
            ask(first.id)
    with pytest.raises(openai.NotFoundError) as refused:
        respond(bob, previous_response_id=first.id)
    assert "whole conversation as input" in refused.value.message
    assert refused.value.param == "previous_response_id"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    for info in ({"store": False}, {"store": False, "stream": True}):
        answer = respond(client, **info)
        name = list(answer)[-1].response.id if "stream" in info else answer.id
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)
    with pytest.raises(openai.BadRequestError):
        client.responses.retrieve(first.id, stream=True)


def test_a_stream_ends_with_what_went_wrong(client: openai.OpenAI, long_pair: Pair) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        respond(client, input="ab" * 4000, stream=True)
    assert refused.value.code == "context_length_exceeded"
    flags = ("--drain", 0.1, "--protocol", "local")
    with serving(long_pair.draft, None, *flags) as service:
        events = service.client().responses.create(
            **requests(max_output_tokens=30_000), stream=True
        )
        result = [next(events) for _ in range(9)]
        service.tell(signal.SIGTERM)
        result += events
        assert result[-1].type == "response.failed"
        assert result[-1].response.error.code == "draining"
        assert result[-1].response.status == "failed"
        (message,) = result[-1].response.output
        assert message.status == "incomplete"
        assert [event.sequence_number for event in result] == list(range(len(result)))


@pytest.mark.parametrize(
    ("options_value", "code", "param"),
    [
        ({"input": None}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [{}]}, "invalid_value", "input[0]"),
        ({"input": [{"role": "user"}]}, "invalid_value", "input[0]"),
        ({"input": [{"role": "user", "content": "a", "x": 1}]}, "unknown_parameter", "input[0].x"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "unsupported_parameter", "input[0].content",
        ),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "invalid_value", "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "invalid_value", "input[0]"),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]},
            "invalid_value", "input[0].call_id",
        ),
        ({"tools": [{"type": "web_search"}]}, "unknown_parameter", "tools[0]"),
        ({"tools": [{**TOOL, "async": True}]}, "unknown_parameter", "tools[0].async"),
        ({"tools": [TOOL, TOOL]}, "invalid_value", "tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "invalid_value", "tool_choice"),
        ({"tool_choice": "required"}, "invalid_value", "tools"),
        ({"text": {"format": {"type": "yaml"}}}, "invalid_value", "text.format.type"),
        ({"text": {"verbosity": "low"}}, "unsupported_parameter", "text.verbosity"),
        ({"reasoning": {"effort": "utmost"}}, "invalid_value", "reasoning.effort"),
        ({"include": ["message.output_text.logprobs"]}, "invalid_value", "include[0]"),
        ({"top_logprobs": 2}, "unsupported_parameter", "top_logprobs"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"conversation": "a"}, "unsupported_parameter", "conversation"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"max_tokens": 3}, "unknown_parameter", "max_tokens"),
        ({"n": 2}, "unknown_parameter", "n"),
        ({"response_format": {"type": "text"}}, "unknown_parameter", "response_format"),
        ({"metadata": {"a": 1}}, "invalid_value", "metadata[...]"),
        ({"pilotfish": {"verse": 1}}, "unknown_parameter", "pilotfish.verse"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(
    service: Serving, options_value: dict[str, Any], code: str, param: str
) -> None:
    headers = {"Authorization": f"Bearer {ALICE}"}
    answer = web.post(
        f"{service.url}/v1/responses", json=requests(**options_value), headers=headers
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)


def test_chats_are_as_before(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 12
