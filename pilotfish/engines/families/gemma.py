"""Gemma 2 and 3: told of tools in words, to call as Llama does. Gemma 4's arguments are no JSON."""

from pilotfish.engines.families.family import ModelFamily
from pilotfish.engines.families.llama import LLAMA

GEMMA = ModelFamily(
    name="gemma",
    speaks=lambda template: "<start_of_turn>" in template,
    calls=LLAMA.calls,
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
