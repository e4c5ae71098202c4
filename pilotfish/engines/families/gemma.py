"""Gemma 2 and 3: told of tools in words. Gemma 4 writes arguments in a syntax that is no JSON."""

from pilotfish.engines.families.family import Calls, ModelFamily

GEMMA = ModelFamily(
    name="gemma",
    speaks=lambda template: "<start_of_turn>" in template,
    calls=Calls(
        trigger='{"name": "',
        before="",
        behind='", "parameters": ',
        anywhere=False,
    ),
    parallel=False,
    taught=lambda template: False,
)
GEMMA_4 = ModelFamily(
    name="gemma-4",
    speaks=lambda template: "<|tool_call>call:" in template,
    calls=None,
    taught=lambda template: True,
    thought=("<|channel>thought\n", "<channel|>"),
)
