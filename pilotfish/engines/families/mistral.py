"""Mistral: a control token, then a list of calls; since late 2025 names and arguments alone.

Their templates take ids of nine letters and digits.
"""

import secrets
import string

from pilotfish.engines.families.family import Calls, Family


def _call_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


MISTRAL_ARGS = Family(
    name="mistral-args",
    speaks=lambda template: "[TOOL_CALLS]" in template and "[ARGS]" in template,
    calls=Calls(trigger="[TOOL_CALLS]", before="", behind="[ARGS]", end="", between="[TOOL_CALLS]"),
    taught="[AVAILABLE_TOOLS]",
    thought=("[THINK]", "[/THINK]"),
    call_id=_call_id,
)
MISTRAL = Family(
    name="mistral",
    speaks=lambda template: "[TOOL_CALLS]" in template,
    calls=Calls(trigger="[TOOL_CALLS]", gap=" ", opening="[", closing="]"),
    taught="[AVAILABLE_TOOLS]",
    thought=("[THINK]", "[/THINK]"),
    call_id=_call_id,
)
