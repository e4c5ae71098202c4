"""Which fault of a body a refusal names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.service.openai import CompletionRequest, chat_request, text_request
from pilotfish.device_runtime.service.refusal import RefusalError
from pilotfish.device_runtime.service.responses import response_request
from pilotfish.device_runtime.service.responses_input import Message
from pilotfish.wire.request import Request


def no_conversation(name: str) -> Sequence[Message]:
    raise AssertionError(name)


def response(body: bytes, defaults: Request) -> CompletionRequest:
    return response_request(body, defaults, no_conversation).completion


@pytest.mark.parametrize(
    ("read", "body", "code", "param"),
    [
        (response, b'{"prompt": {"id": "a"}}', "unsupported_parameter", "prompt"),
        (response, b'{"n": 1}', "unknown_parameter", "n"),
        (response, b"{}", "invalid_value", "input"),
        (chat_request, b'{"functions": [1], "messages": 3}', "unsupported_parameter", "functions"),
        (chat_request, b'{"functions": [], "messages": 3}', "invalid_value", "messages"),
        (chat_request, b'{"functions": [1], "nothing": 3}', "unknown_parameter", "nothing"),
        (text_request, b'{"prompt": "a", "top_p": 2}', "invalid_value", "top_p"),
        (text_request, b'{"prompt": "a", "top_p": 2', "invalid_value", "top_p"),
        (chat_request, b'{"mirostat": 1, "audio": 1, "n": 0}', "unsupported_parameter", "mirostat"),
        (chat_request, b'{"audio": 1, "suffix": 1, "n": 0}', "unknown_parameter", "suffix"),
        (chat_request, b'{"audio": 1, "mirostat": 1, "n": 0}', "unsupported_parameter", "audio"),
        (text_request, b'{"prompt": "a"', "malformed", None),
        (text_request, b"[]", "malformed", None),
        (
            text_request,
            b'{"prompt": "a", "pilotfish": {"nothing": 1}}',
            "unknown_parameter",
            "pilotfish.nothing",
        ),
        (
            text_request,
            b'{"prompt": "a", "pilotfish": {"draft_top_p": 2}}',
            "invalid_value",
            "pilotfish.draft_top_p",
        ),
    ],
)
def test_a_refusal_names_the_fault(
    read: Callable[[bytes, Request], Any], body: bytes, code: str, param: str | None
) -> None:
    with pytest.raises(RefusalError) as refused:
        read(body, Request())
    assert (refused.value.code, refused.value.param) == (code, param)


def test_a_protocol_takes_the_place_of_the_default_and_its_drafting() -> None:
    defaults = Request(protocol="tslt", window=7, draft_top_k=9, top_k=5, options={"tau": 0.5})
    unchanged = text_request(b'{"prompt": "a"}', defaults).request
    assert (unchanged.protocol, unchanged.window, unchanged.draft_top_k) == ("tslt", 7, 9)
    body = b'{"prompt": "a", "pilotfish": {"protocol": "dsd", "draft_top_p": 0.5}}'
    changed = text_request(body, defaults).request
    assert (changed.protocol, changed.window, changed.draft_top_k) == ("dsd", None, None)
    assert (changed.draft_top_p, changed.top_k, changed.options) == (0.5, 5, {"tau": 0.5})


@pytest.mark.parametrize(
    ("shape", "window", "expansion"),
    [
        (b'{"expansion": [2, 2]}', None, [2, 2]),
        (b'{"window": 3}', 3, None),
        (b'{"lossy": true, "protocol": "auto", "window": 2}', 2, None),
    ],
)
@pytest.mark.parametrize("default", [{"window": 4}, {"expansion": [3]}])
def test_a_window_and_an_expansion_replace_each_other(
    shape: bytes, window: int | None, expansion: list[int] | None, default: dict[str, Any]
) -> None:
    defaults = Request(protocol="tree", temperature=1.0, **default)
    request = text_request(b'{"prompt": "a", "pilotfish": ' + shape + b"}", defaults).request
    assert (request.window, request.expansion) == (window, expansion)


def test_a_body_with_both_is_refused() -> None:
    body = b'{"prompt": "a", "pilotfish": {"window": 3, "expansion": [2, 2]}}'
    with pytest.raises(UnsupportedError, match="give no window with it"):
        text_request(body, Request(protocol="tree", temperature=1.0))


def test_a_stop_text_of_any_form_is_bounded() -> None:
    for stop in (b'"%s"', b'["%s"]'):
        body = b'{"prompt": "a", "stop": ' + stop % (b"x" * 1025) + b"}"
        with pytest.raises((RefusalError, UnsupportedError), match="1024"):
            text_request(body, Request(protocol="greedy"))
