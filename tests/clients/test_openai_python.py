"""OpenAI's client for Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.clients.client_answers import FISH, expect_call, expect_chat


def test_openai_python(answers_of: Callable[..., dict[str, Any]]) -> None:
    answers = answers_of("openai_python.py")
    expect_chat(answers)
    expect_call(answers["call"])
    assert answers["after the call"]
    assert answers["structured"] in FISH
    assert answers["response"]
    assert answers["completion"]
    assert answers["models"] == ["pilotfish"]
