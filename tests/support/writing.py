"""Random models whose tokens are pieces of JSON: only a grammar makes them write any.

And a pair that thinks and calls tools.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pilotfish.export.model import export_model
from tests.conftest import Pair
from tests.support.tiny import RandomSource, tiny_artifact, tiny_config

PIECES = [
    *'{}[]":,-.e+\\abcdnxtrufls0123456789', "Ġ", ",Ġ", ":Ġ", '":', '":Ġ', '{"', '["', '",Ġ',
    "ab", "ba", "abc", "12", "tr", "tru", "true", "fa", "nu", "nul", "null", "\\u",
]  # fmt: skip
OBJECT = {
    "type": "object",
    "properties": {
        "ab": {"type": "integer", "minimum": 0, "maximum": 99},
        "bad": {"type": "array", "items": {"enum": ["ab", "ba", "c"]}, "maxItems": 3},
        "x": {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
        "dd": {"type": "string", "maxLength": 6},
    },
    "required": ["ab", "bad", "x", "dd"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("writers")
    for name, sharpness in (("draft", 0.9), ("target", 0.7)):
        tiny_artifact(folder / name, tokens=PIECES, seed=1, sharpness=sharpness)
    return Pair(folder / "draft", folder / "target")


THINKING = (
    "{% for message in messages %}{{ message.role[0] }}{{ message.content }}"
    "{{ message.tool_calls[0].function.name if message.tool_calls }}{% endfor %}"
    "{% if add_generation_prompt %}a<think>{% endif %}{# ends with </think> #}"
)
_SIGNS = [chr(code) for code in range(33, 127)]
_MARK = "</think>"  # a token, so that random models end their thoughts


class CallerSource(RandomSource):
    """Random weights that think, and can write a call in ASCII."""

    def __init__(self, sharpness: float) -> None:
        tokens = [*_SIGNS, "Ġ", "Ċ", "Ġ:", "Ġ,"]
        config = tiny_config(vocab_size=len(tokens) + 1, context=4096)
        super().__init__(config, seed=1, tokens=tokens, sharpness=sharpness, template=THINKING)
        payload = json.loads(self.vocabulary.tokenizer_json)
        vocabulary = {id: token for token, id in payload["model"]["vocab"].items()}
        vocabulary[tokens.index("Ġ:")] = _MARK
        payload["model"]["merges"] = []
        payload["model"]["vocab"] = {token: id for id, token in vocabulary.items()}
        self.change_vocabulary(tokenizer_json=json.dumps(payload))


def calling_pair(folder: Path) -> Pair:
    """Make a drafter and a target that think, and call tools where they must."""
    for name, sharpness in (("draft", 0.9), ("target", 0.7)):
        export_model(CallerSource(sharpness), folder / name, precision="fp32")
    return Pair(folder / "draft", folder / "target")
