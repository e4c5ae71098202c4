"""OpenAI's client for node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.clients.client_answers import PLACES, expect_chat


def test_openai_node(answers_of: Callable[..., dict[str, Any]]) -> None:
    answers = answers_of("openai_node.mjs")
    expect_chat(answers)
    assert answers["result"] in PLACES
    assert answers["structured"]["to"] in PLACES
    assert answers["response"]
    assert answers["models"] == ["pilotfish"]
