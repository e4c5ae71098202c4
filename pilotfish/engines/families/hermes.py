"""Hermes, Qwen 2.5 and 3, SmolLM, Granite 4; also what all others are taken for."""

import re

from pilotfish.engines.families.family import Calls, ModelFamily

# others write XML between these marks
_JSON = re.compile(r'\\?"arguments\\?"')

HERMES = ModelFamily(
    name="hermes",
    speaks=lambda template: True,
    calls=Calls(
        trigger="<tool_call>",
        opening="\n",
        between="\n</tool_call>\n<tool_call>\n",
        closing="\n</tool_call>",
    ),
    taught=lambda template: "<tool_call>" in template and _JSON.search(template) is not None,
)
