"""Hermes, Qwen 2.5 and 3, SmolLM, Granite 4; also what all others are taken for."""

from pilotfish.engines.families.family import Calls, Family

HERMES = Family(
    name="hermes",
    speaks=lambda template: True,
    calls=Calls(
        trigger="<tool_call>",
        opening="\n",
        end="}",
        between="\n</tool_call>\n<tool_call>\n",
        closing="\n</tool_call>",
    ),
    taught="<tool_call>",
)
