"""LangChain's classes for OpenAI's API: prints an object with the outcome of each use."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

COMMON: Any = {
    "base_url": sys.argv[1], "api_key": sys.argv[2], "model": "pilotfish", "temperature": 0,
    "max_retries": 0,
}  # fmt: skip


class Fish(BaseModel):
    """A fish."""

    kind: Literal["shark", "pilot"]
    big: bool


@tool
def move(to: Literal["here", "there"]) -> str:
    """Move."""
    return to


short = ChatOpenAI(**COMMON, max_tokens=12, stream_usage=True)
long = ChatOpenAI(**COMMON, max_tokens=150)
completion = OpenAI(**COMMON, max_tokens=12)

*_, last = chunks = list(short.stream("ab"))
lines: list[Any] = [HumanMessage("ab")]
called = long.bind_tools([move], tool_choice="any", parallel_tool_calls=False).invoke(lines)
(call,) = called.tool_calls
lines += [called, ToolMessage(move.invoke(call["args"]), tool_call_id=call["id"])]
responses = ChatOpenAI(**COMMON, max_tokens=16, use_responses_api=True)
try:
    ChatOpenAI(**{**COMMON, "temperature": -1}).invoke("ab")
except openai.BadRequestError as error:
    refusal = [error.status_code, error.param, str(error)]
print(
    json.dumps(
        {
            "chat": short.invoke("ab").content,
            "stream": "".join(str(chunk.content) for chunk in chunks),
            "usage": next(
                chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata
            ),
            "batch": [message.content for message in short.batch(["ab", "ba"])],
            "call": [call["name"], json.dumps(call["args"])],
            "after the call": short.bind_tools([move], tool_choice="none").invoke(lines).content,
            "structured": str(long.with_structured_output(Fish, strict=True).invoke("ab")),
            "response": responses.invoke("ab").text,
            "completion": completion.invoke("ab"),
            "completions": [each[0].text for each in completion.generate(["ab", "ba"]).generations],
            "error": refusal,
        }
    )
)
