"""Bodies of programs that have a window: each is answered, with the fields that they send.

The shapes are those of the programs' sources; texts, ids and limits are ours.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import web
from tests.support.serving import Serving

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "A file."}},
    "required": ["path"],
    "additionalProperties": False,
}
FUNCTION = {"name": "read_file", "description": "Reads a file.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {
    "id": "call_1", "type": "function",
    "function": {"name": "read_file", "arguments": '{"path": "a"}'},
}  # fmt: skip
ASKED = {"role": "user", "content": "ab"}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def message(role: str, kind: str, text: str = "ab") -> dict[str, Any]:
    """An item of the responses' API."""
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


# Codex, codex-rs/codex-api/src/common.rs at 001cb8e2 (ResponsesApiRequest).
CODEX = {
    "model": "pilotfish",
    "instructions": "ab",
    "input": [message("developer", "input_text"), message("user", "input_text")],
    "tools": [{"type": "function", "strict": False, **FUNCTION}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01900000-0000-7000-8000-000000000000",
    "text": {"verbosity": "medium"},
    "max_output_tokens": 24,
}
# Home Assistant, components/openai_conversation/entity.py at 0150749b.
HOME_ASSISTANT = {
    "model": "pilotfish",
    "input": [
        {"type": "message", "role": "developer", "content": "ab"},
        {"type": "message", "role": "user", "content": "ab"},
    ],
    "max_output_tokens": 24,
    "top_p": 1.0,
    "temperature": 1.0,
    "user": "01K00000000000000000000000",
    "store": False,
    "stream": True,
    "tools": [{"type": "function", "strict": False, **FUNCTION}],
}
# Zed, crates/open_ai/src/open_ai.rs at 014676e4 (Request, RequestMessage).
ZED = {
    "model": "pilotfish",
    "messages": [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ],
    **USAGE,
    "max_completion_tokens": 24,
    "temperature": 1.0,
    "parallel_tool_calls": False,
    "tools": TOOLS,
    "prompt_cache_key": "01900000-0000-7000-8000-000000000000",
}
# Open WebUI, backend/open_webui/utils/payload.py at 05746a99 (apply_model_params_to_body_openai).
OPEN_WEBUI = {
    "model": "pilotfish",
    "messages": [{"role": "system", "content": "ab"}, ASKED],
    "stream": True,
    "temperature": 0.8,
    "top_p": 0.9,
    "max_tokens": 24,
    "frequency_penalty": 0.0,
    "seed": 0,
    "stop": ["\n\n"],
}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Codex": ("responses", CODEX),
    "Codex after a call": (
        "responses",
        {
            **CODEX,
            "input": [
                *CODEX["input"],  # type: ignore[misc]  # these values are lists
                {"type": "function_call", "name": "read_file", "arguments": "{}", "call_id": "c"},
                {"type": "function_call_output", "call_id": "c", "output": "ab"},
            ],
        },
    ),
    # Fields of later releases, as a report lists them.
    "Codex with other tools": (
        "responses",
        {
            **CODEX,
            "client_metadata": {"origin": "ab"},
            "tools": [
                *CODEX["tools"],  # type: ignore[misc]  # these values are lists
                {"type": "web_search", "external_web_access": False},
            ],
        },
    ),
    "Home Assistant": ("responses", HOME_ASSISTANT),
    "Home Assistant after a call": (
        "responses",
        {
            **HOME_ASSISTANT,
            "input": [
                *HOME_ASSISTANT["input"],  # type: ignore[misc]  # these values are lists
                {"type": "function_call", "name": "read_file", "arguments": "{}", "call_id": "c"},
                {"type": "function_call_output", "call_id": "c", "output": '{"ab": 1}'},
            ],
        },
    ),
    "Zed": ("chat/completions", ZED),
    "Zed after a call": (
        "chat/completions",
        {
            **ZED,
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [CALL],
                    "reasoning_content": "ab",
                },
                {"role": "tool", "content": "ab", "tool_call_id": "call_1"},
            ],
        },
    ),
    # Continue, packages/openai-adapters/src/apis/OpenAI.ts at 023111db (modifyChatBody).
    "Continue": (
        "chat/completions",
        {
            "model": "pilotfish", "messages": [{"role": "system", "content": "ab"}, ASKED],
            "max_tokens": 24, "tools": TOOLS, "parallel_tool_calls": False, **USAGE,
        },
    ),
    "Continue's completion": (
        "completions",
        {
            "model": "pilotfish", "prompt": "ab", "max_tokens": 24, "temperature": 0.01,
            "stop": ["<fim_prefix>", "<fim_suffix>", "\n\n"], "stream": True,
        },
    ),
    # Cline, src/api/providers/openai.ts at 00566920.
    "Cline": (
        "chat/completions",
        {
            "model": "pilotfish", "temperature": 0, "max_tokens": 24, **USAGE,
            "messages": [
                {"role": "system", "content": "ab"},
                {"role": "user", "content": [{"type": "text", "text": "ab"}]},
                {"role": "assistant", "content": "ab"},
                {"role": "user", "content": [{"type": "text", "text": "ab"}]},
            ],
        },
    ),
    "Open WebUI": ("chat/completions", OPEN_WEBUI),
    "Open WebUI's title": (
        "chat/completions",
        {"model": "pilotfish", "messages": [ASKED], "stream": False, "max_completion_tokens": 24},
    ),
}  # fmt: skip


@pytest.mark.parametrize("origin", BODIES)
def test_a_published_body_is_answered(service: Serving, origin: str) -> None:
    route, body = BODIES[origin]
    answer = web.post(f"{service.url}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        assert answer.json()["choices"][0]["message"]["content"]
    elif route == "responses":
        assert '"type":"response.incomplete"' in answer.text or "response.completed" in answer.text
    else:
        assert answer.text.endswith("data: [DONE]\n\n")
