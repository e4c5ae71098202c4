"""Phi 4 mini: its template takes tools as a text within the system message."""

import json
from collections.abc import Sequence

from pilotfish.engines.families.family import Calls, Message, ModelFamily
from pilotfish.engines.families.tools import Tool


def _in_system_message(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    # calls and results are not rendered by this template
    said = PHI.in_words(messages, ())
    if not tools:
        return said
    told = json.dumps([tool.told["function"] for tool in tools], ensure_ascii=False)
    if said and said[0].get("role") == "system":
        return [{**said[0], "tools": told}, *said[1:]]
    words = "You are a helpful assistant with some tools."
    return [{"role": "system", "content": words, "tools": told}, *said]


PHI = ModelFamily(
    name="phi",
    speaks=lambda template: "<|tool|>" in template and "<|end|>" in template,
    calls=Calls(trigger="functools[", closing="]"),
    taught=lambda template: "['tools']" in template,
    tell=_in_system_message,
)
