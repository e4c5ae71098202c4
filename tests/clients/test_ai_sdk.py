"""The AI SDK for node, with its provider for servers that are compatible with OpenAI's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.clients.client_answers import PLACES, expect_chat


def test_ai_sdk(answers_of: Callable[..., dict[str, Any]]) -> None:
    answers = answers_of("ai_sdk.mjs")
    expect_chat(answers)
    assert answers["result"] in PLACES
    assert answers["structured"]["kind"] in ("shark", "pilot")
    assert isinstance(answers["structured"]["big"], bool)
