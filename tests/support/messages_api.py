"""A service for Anthropic's Messages API, and a client that checks all that comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import httpx
import pytest

from pilotfish import EdgeServer
from tests.conftest import Pair
from tests.device_runtime.service.test_responses import BIAS, CALLING, THINKING
from tests.support import web
from tests.support.anthropic_types import check
from tests.support.serving import Serving, serving
from tests.support.tiny import tiny_artifact

ALICE = "alice-0123456789abcdef"
CONTEXT = 2048
SAY = [{"role": "user", "content": "ab"}]
MOVE: dict[str, Any] = {
    "name": "move",
    "description": "It moves.",
    "input_schema": {
        "type": "object",
        "properties": {"to": {"enum": ["ab", "ba"]}},
        "required": ["to"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A strict service with a key, whose models can write calls, and think."""
    folder = tmp_path_factory.mktemp("callers")
    pair = Pair(folder / "draft", folder / "target")
    for path, sharpness in zip(pair, (0.9, 0.7), strict=True):
        tiny_artifact(
            path, tokens=CALLING, seed=1, sharpness=sharpness, context=CONTEXT, template=THINKING
        )
    keys = folder / "api-keys"
    keys.write_text(f"alice:{ALICE}\n")
    keys.chmod(0o600)
    with (
        EdgeServer(pair.target, threads=1) as edge,
        serving(pair.draft, edge.endpoint, "--api-keys", keys, "--lanes", 2, "--strict") as started,
    ):
        yield started


def body_of(**fields: Any) -> dict[str, Any]:
    """A short greedy request without thoughts; a field that is None is left out."""
    body = {
        "model": "pilotfish", "max_tokens": 12, "messages": SAY, "temperature": 0,
        "logit_bias": {str(token): bias for token, bias in BIAS.items()}, **fields,
    }  # fmt: skip
    return {name: value for name, value in body.items() if value is not None}


def post(service: Serving, body: object, path: str = "/v1/messages") -> httpx.Response:
    headers = {"x-api-key": ALICE, "anthropic-version": "2023-06-01"}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return web.post(service.url + path, content=content, headers=headers, timeout=60.0)


def message(service: Serving, **fields: Any) -> dict[str, Any]:
    answer = post(service, body_of(**fields))
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    check(body)
    return body


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each checked against its type and its name."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        check(event)
        events.append(event)
    return events


def stream(service: Serving, **fields: Any) -> list[dict[str, Any]]:
    answer = post(service, body_of(**fields, stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text)


def grown(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events add up to, as Anthropic's clients do it."""
    start, *blocks, last, stop = events
    assert (start["type"], last["type"], stop["type"]) == (
        "message_start", "message_delta", "message_stop"
    )  # fmt: skip
    content: list[dict[str, Any]] = []
    for index, group in groupby(blocks, lambda event: event["index"]):
        first, *deltas, end = group
        assert index == len(content)
        assert (first["type"], end["type"]) == ("content_block_start", "content_block_stop")
        block = first["content_block"]
        arguments = ""
        for event in deltas:
            assert event["type"] == "content_block_delta"
            delta = event["delta"]
            match delta["type"]:
                case "text_delta":
                    block["text"] += delta["text"]
                case "thinking_delta":
                    block["thinking"] += delta["thinking"]
                case "signature_delta":
                    assert event is deltas[-1]
                    block["signature"] = delta["signature"]
                case "input_json_delta":
                    arguments += delta["partial_json"]
        if block["type"] == "tool_use" and last["delta"]["stop_reason"] == "tool_use":
            block["input"] = json.loads(arguments)
        content.append(block)
    whole: dict[str, Any] = start["message"]
    usage = {**whole["usage"], **last["usage"]}
    return {**whole, **last["delta"], "content": content, "usage": usage}


def prompt_tokens(body: dict[str, Any]) -> int:
    """The tokens of a message's prompt: those that were read, and those that were read before."""
    usage = body["usage"]
    return int(usage["input_tokens"] + usage["cache_read_input_tokens"])
