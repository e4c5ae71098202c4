"""Gemma 2 and 3 get tools as instructions and write calls as Llama does.

Gemma 4's arguments are not JSON.
"""

from pilotfish.engines.chat_formats.chat_format import ChatFormat
from pilotfish.engines.chat_formats.llama import LLAMA

GEMMA = ChatFormat(
    name="gemma",
    matches=lambda template: "<start_of_turn>" in template,
    calls=LLAMA.calls,
    parallel=False,
    takes_tools=lambda template: False,
)
GEMMA_4 = ChatFormat(
    name="gemma-4",
    matches=lambda template: "<|tool_call>call:" in template,
    calls=None,
    takes_tools=lambda template: True,
    thought=("<|channel>thought\n", "<channel|>"),
)
