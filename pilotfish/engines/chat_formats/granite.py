"""Granite 3 writes a control token, then a list of calls. Granite 4 uses the format Hermes."""

from pilotfish.engines.chat_formats.chat_format import Calls, ChatFormat

GRANITE = ChatFormat(
    name="granite",
    matches=lambda template: "<|start_of_role|>" in template and "<tool_call>" not in template,
    calls=Calls(trigger="<|tool_call|>", gap=" ", opening="[", closing="]"),
    takes_tools=lambda template: "tools" in template,
)
