"""LangChain's classes for OpenAI's API; several prompts of a completion go in one request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.clients.client_answers import FISH, expect_call, expect_chat


def test_langchain(answers_of: Callable[..., dict[str, Any]]) -> None:
    answers = answers_of("langchain.py")
    expect_chat(answers)
    expect_call(answers["call"])
    assert answers["after the call"]
    assert answers["batch"][0] == answers["chat"] != answers["batch"][1]
    assert answers["structured"] in FISH
    assert answers["response"]
    assert answers["completions"][0] == answers["completion"] != answers["completions"][1]
