"""What Anthropic's published types require of messages, events and errors.

A type is a Python type, a set of values, a tuple of alternatives, or the required fields of an
object; `TAGGED` has an object's required fields by its field ``type``. Other fields may be there.
"""

from __future__ import annotations

from typing import Any

Kind = Any  # see above

USAGE = {"input_tokens": int, "output_tokens": int}
STOP_REASONS = {
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "pause_turn",
    "refusal",
    "model_context_window_exceeded",
}
ERRORS = {
    "invalid_request_error",
    "authentication_error",
    "billing_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "api_error",
    "overloaded_error",
}
BLOCKS = ("text", "thinking", "tool_use")
DELTAS = ("text_delta", "thinking_delta", "signature_delta", "input_json_delta")
TAGGED: dict[str, dict[str, Kind]] = {
    # A message and its blocks.
    "message": {
        "id": str,
        "role": {"assistant"},
        "model": str,
        "content": [BLOCKS],
        "stop_reason": (STOP_REASONS, None),
        "stop_sequence": (str, None),
        "usage": USAGE,
    },
    "text": {"text": str},
    "thinking": {"thinking": str, "signature": str},
    "tool_use": {"id": str, "name": str, "input": dict},
    # Events.
    "ping": {},
    "message_start": {"message": ("message",)},
    "content_block_start": {"index": int, "content_block": BLOCKS},
    "content_block_delta": {"index": int, "delta": DELTAS},
    "content_block_stop": {"index": int},
    "message_delta": {
        "delta": {"stop_reason": (STOP_REASONS, None), "stop_sequence": (str, None)},
        "usage": {"output_tokens": int},
    },
    "message_stop": {},
    "text_delta": {"text": str},
    "thinking_delta": {"thinking": str},
    "signature_delta": {"signature": str},
    "input_json_delta": {"partial_json": str},
    # Errors, in a stream or as a body.
    "error": {"error": {"type": ERRORS, "message": str}},
}


def is_of(value: Any, kind: Kind) -> bool:
    """Whether a value is of a type; a text as type names an object by its field ``type``."""
    match kind:
        case type():
            return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
        case tuple():
            return any(is_of(value, each) for each in kind)
        case [each]:
            return isinstance(value, list) and all(is_of(item, each) for item in value)
        case dict():
            return isinstance(value, dict) and all(
                name in value and is_of(value[name], its) for name, its in kind.items()
            )
        case str():
            return is_of(value, {"type": {kind}, **TAGGED[kind]})
    return value is None if kind is None else value in kind


def check(value: dict[str, Any]) -> None:
    """Fail unless a message, an event or an error has what its type requires."""
    assert value["type"] in TAGGED, value
    assert is_of(value, value["type"]), value
