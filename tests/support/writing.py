"""A pair of random models whose tokens are pieces of JSON: only a grammar makes them write any."""

from __future__ import annotations

import pytest

from tests.conftest import Pair
from tests.support.tiny import tiny_artifact

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
