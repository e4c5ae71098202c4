"""The format of Hermes, Qwen 2.5 and 3, SmolLM and Granite 4; also used for unknown templates."""

import re

from pilotfish.engines.chat_formats.chat_format import Calls, ChatFormat

# Some other families use the same marks with XML between them, not JSON.
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
