"""Mistral writes a control token, then a list of calls; since late 2025, name and arguments alone.

The templates require ids of nine letters and digits.
"""

from functools import partial

from pilotfish.engines.chat_formats.chat_format import Calls, ChatFormat, call_id

_call_id = partial(call_id, "", 9)

MISTRAL_ARGS = ChatFormat(
    name="mistral-args",
    matches=lambda template: "[TOOL_CALLS]" in template and "[ARGS]" in template,
    calls=Calls(trigger="[TOOL_CALLS]", before="", behind="[ARGS]", end="", between="[TOOL_CALLS]"),
    takes_tools=lambda template: "[AVAILABLE_TOOLS]" in template,
    thought=("[THINK]", "[/THINK]"),
    call_id=_call_id,
)
MISTRAL = ChatFormat(
    name="mistral",
    matches=lambda template: "[TOOL_CALLS]" in template,
    calls=Calls(trigger="[TOOL_CALLS]", gap=" ", opening="[", closing="]"),
    takes_tools=lambda template: "[AVAILABLE_TOOLS]" in template,
    thought=("[THINK]", "[/THINK]"),
    call_id=_call_id,
)
