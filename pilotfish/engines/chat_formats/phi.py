"""Phi 4 mini: its template takes tools as text in the system message."""

import json
from collections.abc import Sequence

from pilotfish.engines.chat_formats.chat_format import Calls, ChatFormat, Message
from pilotfish.engines.chat_formats.tools import Tool


def _in_system_message(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    # The template renders neither calls nor results, so they become plain text.
    plain = PHI.to_plain_text(messages, ())
    if not tools:
        return plain
    signatures = json.dumps([tool.openai_object["function"] for tool in tools], ensure_ascii=False)
    if plain and plain[0].get("role") == "system":
        return [{**plain[0], "tools": signatures}, *plain[1:]]
    words = "You are a helpful assistant with some tools."
    return [{"role": "system", "content": words, "tools": signatures}, *plain]


PHI = ChatFormat(
    name="phi",
    matches=lambda template: "<|tool|>" in template and "<|end|>" in template,
    calls=Calls(trigger="functools[", closing="]"),
    takes_tools=lambda template: "['tools']" in template,
    convert=_in_system_message,
)
