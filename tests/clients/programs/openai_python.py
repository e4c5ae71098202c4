"""OpenAI's client for Python: prints an object with the outcome of each use."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel

MESSAGES: Any = [{"role": "user", "content": "ab"}]
PARAMETERS = {
    "type": "object",
    "properties": {"to": {"enum": ["here", "there"]}},
    "required": ["to"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "move", "parameters": PARAMETERS}}]
SHORT: Any = {"model": "pilotfish", "temperature": 0, "max_tokens": 12}
LONG: Any = {**SHORT, "max_tokens": 150}


class Fish(BaseModel):
    kind: Literal["shark", "pilot"]
    big: bool


client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0)
create = client.chat.completions.create

*chunks, last = create(
    messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **SHORT
)
forced: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
called = create(messages=MESSAGES, **forced, **LONG).choices[0].message
assert called.tool_calls
result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "ab"}
parsed = client.chat.completions.parse(messages=MESSAGES, response_format=Fish, **LONG)
response = client.responses.create(model="pilotfish", input="ab", max_output_tokens=16)
try:
    create(messages=MESSAGES, **{**SHORT, "temperature": -1})
except openai.BadRequestError as error:
    refusal = [error.status_code, error.param, str(error)]
print(
    json.dumps(
        {
            "models": [model.id for model in client.models.list()],
            "chat": create(messages=MESSAGES, **SHORT).choices[0].message.content,
            "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
            "usage": last.usage and last.usage.completion_tokens,
            "call": [called.tool_calls[0].function.name, called.tool_calls[0].function.arguments],
            "after the call": create(
                messages=[*MESSAGES, called, result], tools=TOOLS, tool_choice="none", **SHORT
            )
            .choices[0]
            .message.content,
            "structured": str(parsed.choices[0].message.parsed),
            "response": response.output_text,
            "completion": client.completions.create(prompt="ab", **SHORT).choices[0].text,
            "error": refusal,
        }
    )
)
