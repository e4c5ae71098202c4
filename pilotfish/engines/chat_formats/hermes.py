"""Hermes, Qwen 2.5 and 3, SmolLM, Granite 4; also the fallback for unknown templates."""

import re

from pilotfish.engines.chat_formats.chat_format import Calls, ChatFormat

# Other families write XML between these marks.
_JSON = re.compile(r'\\?"arguments\\?"')

HERMES = ChatFormat(
    name="hermes",
    matches=lambda template: True,
    calls=Calls(
        trigger="<tool_call>",
        opening="\n",
        between="\n</tool_call>\n<tool_call>\n",
        closing="\n</tool_call>",
    ),
    takes_tools=lambda template: "<tool_call>" in template and _JSON.search(template) is not None,
)
