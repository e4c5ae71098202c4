"""Families of models, templates as theirs are, and a vocabulary with all their control tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from pilotfish.engines.chat_formats import CHAT_FORMATS, ChatFormat, Tools
from pilotfish.engines.chat_formats.outline import Outline
from pilotfish.engines.grammar import Grammars
from pilotfish.engines.tokenizer import Tokenizer
from tests.conftest import Pair
from tests.support.tiny import tiny_artifact
from tests.support.vocabularies import byte_level
from tests.support.writing import PIECES

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
CONTROLS = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|tool_call|>", "<|im_start|>"]
CALLING = [family for family in CHAT_FORMATS if family.calls is not None]

# What tells a family in its templates; the real ones are in tests/data.
TOLD = {
    "mistral-args": "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]name[ARGS]",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] [",
    "gemma-4": "<|turn>model {{ '<|tool_call>call:' + name }}",
    "gemma": "<start_of_turn>model",
    "granite": "<|start_of_role|>{% if tools %}{% endif %}",
    "phi": "{{ '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}",
    "llama": "<|start_header_id|>{% if tools %}{% endif %}",
    "hermes": "<|im_start|>{% if tools %}<tool_call>{% endif %}",
}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """OpenAI's object of a function that takes these."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    options = {"name": name, "description": f"It does {name}.", "parameters": schema}
    return {"type": "function", "function": options}


TOOLS = [tool("move", to={"enum": ["here", "there"]}), tool("stop"), tool("stop_all")]


@cache
def vocabulary() -> Tokenizer:
    return byte_level(added=[AddedToken(name, special=True) for name in CONTROLS])


@cache
def grammars() -> Grammars:
    tokenizer = vocabulary()
    (end,) = tokenizer.encode("<|end|>", special=True)
    return Grammars(tokenizer, tokenizer.vocab_size, [end])


def allowed(outline: Outline, text: str, *, special: bool = True) -> bool:
    """Whether an answer may be exactly this text; special: control tokens in it are those."""
    assert outline.grammar is not None
    tokenizer = vocabulary()
    constraint = grammars().constraint(outline.grammar)
    ids = np.array(tokenizer.encode(text, special=special), np.uint32)
    (end,) = tokenizer.encode("<|end|>", special=True)
    for at, token in enumerate([*ids.tolist(), end]):
        row = np.zeros((1, tokenizer.vocab_size), np.float32)
        constraint.forbid(row, ids[:at], [[]])
        if not np.isfinite(row[0, token]):
            return False
    return True


def outline(
    family: ChatFormat, choice: str = "auto", *, parallel: bool = True, **info: Any
) -> Outline:
    """The outline of a turn that may call `TOOLS`; the model thinks."""
    tools = Tools.read(TOOLS, choice, parallel)
    return Outline.for_chat_format(family, family.thought[1], tools=tools, **info)


# Random models of these pieces can write calls, and think.
CALLER_PIECES = [
    *PIECES,
    *"mgovhipk_<>/",
    "Ċ",
    "nk",
    "ink",
    "th",
    "think",
    "</",
    "think>",
    "</think>",
]


@pytest.fixture(scope="session")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("callers")
    for name, sharpness in (("draft", 0.9), ("target", 0.7)):
        tiny_artifact(
            folder / name, tokens=CALLER_PIECES, seed=1, sharpness=sharpness, context=4096,
        )  # fmt: skip
    return Pair(folder / "draft", folder / "target")
