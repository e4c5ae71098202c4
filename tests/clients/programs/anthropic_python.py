"""Anthropic's client for Python: prints an object with the outcome of each use."""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic

MESSAGES: Any = [{"role": "user", "content": "ab"}]
SCHEMA = {
    "type": "object",
    "properties": {"to": {"enum": ["here", "there"]}},
    "required": ["to"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "move", "description": "Move.", "input_schema": SCHEMA}]
SHORT: Any = {
    "model": "pilotfish",
    "max_tokens": 12,
    "messages": MESSAGES,
    "extra_body": {"temperature": 0},
}

client = anthropic.Anthropic(
    base_url=sys.argv[1].removesuffix("/v1"), api_key=sys.argv[2], max_retries=0
)
create = client.messages.create

with client.messages.stream(**SHORT) as stream:
    streamed = "".join(stream.text_stream)
    usage = stream.get_final_message().usage.output_tokens
forced: Any = {"type": "any", "disable_parallel_tool_use": True}
called = create(**{**SHORT, "max_tokens": 150}, tools=TOOLS, tool_choice=forced)
call = next(block for block in called.content if block.type == "tool_use")
result = {"type": "tool_result", "tool_use_id": call.id, "content": "ab"}
after = create(
    **{
        **SHORT,
        "messages": [
            *MESSAGES,
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result]},
        ],
    },
    tools=TOOLS,
    tool_choice={"type": "none"},
)
try:
    create(**{**SHORT, "extra_body": {"temperature": -1}})
except anthropic.BadRequestError as error:
    refusal = [error.status_code, None, str(error)]
print(
    json.dumps(
        {
            "chat": "".join(
                block.text for block in create(**SHORT).content if block.type == "text"
            ),
            "stream": streamed,
            "usage": usage,
            "call": [call.name, json.dumps(call.input)],
            "after the call": [block.type for block in after.content],
            "tokens": client.messages.count_tokens(
                model="pilotfish", messages=MESSAGES
            ).input_tokens,
            "error": refusal,
        }
    )
)
