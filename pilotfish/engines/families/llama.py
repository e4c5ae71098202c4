"""Llama 3: an answer that begins with "{" is a call, of which there is one in a turn."""

from pilotfish.engines.families.family import Calls, Family

LLAMA = Family(
    name="llama",
    speaks=lambda template: "<|start_header_id|>" in template,
    calls=Calls(
        trigger='{"name": "',
        before="",
        behind='", "parameters": ',
        anywhere=False,
        parallel=False,
    ),
    taught="tools",
)
