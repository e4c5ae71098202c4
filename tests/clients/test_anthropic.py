"""Anthropic's client for Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.clients.client_answers import expect_call, expect_chat


def test_anthropic(answers_of: Callable[..., dict[str, Any]]) -> None:
    answers = answers_of("anthropic_python.py")
    expect_chat(answers)
    expect_call(answers["call"])
    assert answers["after the call"] == ["text"]
    assert answers["tokens"] > 0
