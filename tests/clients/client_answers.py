"""What the answers to every client must be."""

from __future__ import annotations

import json
from typing import Any

FISH = {f"kind='{kind}' big={big}" for kind in ("shark", "pilot") for big in (True, False)}
PLACES = ("here", "there")


def expect_chat(answers: dict[str, Any]) -> None:
    """The stream is the whole answer, which is greedy; and the error says what is wrong."""
    assert answers["chat"]
    assert answers["stream"] == answers["chat"]
    assert 0 < answers["usage"] <= 12
    status, param, message = answers["error"]
    assert status == 400
    assert param in ("temperature", None)  # not every client passes it on
    assert "temperature" in message


def expect_call(call: list[str]) -> None:
    """The call is of the tool that there is, with its parameters."""
    name, arguments = call
    assert name == "move"
    assert json.loads(arguments)["to"] in PLACES
