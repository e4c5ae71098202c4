"""Pydantic AI with its model for OpenAI's API: prints an object with the outcome of each use."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Fish(BaseModel):
    kind: Literal["shark", "pilot"]
    big: bool


model = OpenAIChatModel(
    "pilotfish", provider=OpenAIProvider(base_url=sys.argv[1], api_key=sys.argv[2])
)
SHORT: Any = {"temperature": 0, "max_tokens": 12}
LONG: Any = {"temperature": 0, "max_tokens": 150}


async def main() -> dict[str, Any]:
    agent = Agent(model)
    answers: dict[str, Any] = {"chat": (await agent.run("ab", model_settings=SHORT)).output}
    async with agent.run_stream("ab", model_settings=SHORT) as streamed:
        answers["stream"] = "".join([text async for text in streamed.stream_text(delta=True)])
    answers["usage"] = streamed.usage.output_tokens
    structured = await Agent(model, output_type=NativeOutput(Fish)).run("ab", model_settings=LONG)
    answers["structured"] = str(structured.output)
    as_tool = await Agent(model, output_type=Fish).run("ab", model_settings=LONG)
    answers["structured by a tool"] = str(as_tool.output)
    try:
        await agent.run("ab", model_settings={"temperature": -1})
    except ModelHTTPError as error:
        answers["error"] = [error.status_code, None, str(error.body)]
    return answers


print(json.dumps(asyncio.run(main())))
