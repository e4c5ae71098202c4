"""Pydantic AI with its model for OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.clients.client_answers import FISH, expect_chat


def test_pydantic_ai(answers_of: Callable[..., dict[str, Any]]) -> None:
    answers = answers_of("pydantic_agent.py")
    expect_chat(answers)
    assert answers["structured"] in FISH
    assert answers["structured by a tool"] in FISH
