"""Llama 3: an answer that begins like a call is a call; a turn has at most one."""

from pilotfish.engines.chat_formats.chat_format import Calls, ChatFormat

LLAMA = ChatFormat(
    name="llama",
    matches=lambda template: "<|start_header_id|>" in template,
    calls=Calls(
        trigger='{"name": "',
        before="",
        behind='", "parameters": ',
        anywhere=False,
    ),
    parallel=False,
    takes_tools=lambda template: "tools" in template,
)
