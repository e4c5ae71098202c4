"""What cannot be enforced of a schema is left out where it stands, alone and of many tools."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pilotfish.engines import relaxation, schemas
from pilotfish.engines.chat_formats import CHAT_FORMATS, Tools
from pilotfish.engines.chat_formats.outline import Outline
from pilotfish.engines.engine_errors import GrammarBusyError, GrammarError
from pilotfish.engines.grammar_trial import TRIAL
from pilotfish.engines.notices import Notices
from pilotfish.engines.relaxation import (
    ANYTHING,
    find_obstacle,
    relax,
    relax_tool,
    with_relaxed_tools,
)
from pilotfish.engines.schemas import assertions
from pilotfish.speculation.logits_options import Grammar
from pilotfish.wire.messages import MAX_GRAMMAR
from tests.support.calling import grammars, vocabulary
from tests.support.pydantic_types import TYPES, arguments
from tests.support.tool_schemas import tool_schemas

ARGUMENT = {"type": "string", "maxLength": 3}

# Of each, what is left out, and what stays of {"a": …, "e": it}.
LEFT_OUT: dict[str, tuple[Any, list[str], Any]] = {
    "uniqueItems": ({"type": "array", "uniqueItems": True}, ["uniqueItems"], {"type": "array"}),
    "contains": ({"contains": {}, "minContains": 2}, ["contains", "minContains"], {}),
    "conditions": (
        {"if": {"type": "null"}, "then": False, "else": True}, ["if", "then", "else"], {},
    ),
    "not": ({"not": {"type": "null"}}, ["not"], {}),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, ["dependentRequired"], {}),
    "dependentSchemas": ({"dependentSchemas": {"a": False}}, ["dependentSchemas"], {}),
    "dependencies": ({"dependencies": {"a": ["b"]}}, ["dependencies"], {}),
    "unevaluated": (
        {"type": "object", "unevaluatedProperties": False}, ["unevaluatedProperties"],
        {"type": "object"},
    ),
    "$dynamicRef": ({"$dynamicRef": "#x"}, ["$dynamicRef"], {}),
    "oneOf": (
        {"oneOf": [{"type": "string"}, {"maxLength": 2}]}, ["oneOf"],
        {"anyOf": [{"type": "string"}, {"maxLength": 2}]},
    ),
    "oneOf beside anyOf": (
        {"oneOf": [{}, {}], "anyOf": [{"type": "null"}]}, ["oneOf"],
        {"anyOf": [{"type": "null"}], "allOf": [{"anyOf": [{}, {}]}]},
    ),
    "look-ahead": ({"type": "string", "pattern": "^(?=a)"}, ["pattern"], {"type": "string"}),
    "back reference": ({"pattern": r"(a)\1"}, ["pattern"], {}),
    "two patterns that overlap": (
        {"patternProperties": {"^a": {}, "b$": {}}, "additionalProperties": False},
        ["patternProperties"], {},
    ),
    "float bounds": (
        {"type": "number", "minimum": -3.5e38, "maximum": 3.5e38}, ["minimum", "maximum"],
        {"type": "number"},
    ),
    "multipleOf": ({"type": "number", "multipleOf": 12345}, ["multipleOf"], {"type": "number"}),
    "minProperties": (
        {"properties": {"a": {}, "b": {}}, "minProperties": 2}, ["minProperties"],
        {"properties": {"a": {}, "b": {}}},
    ),
    "required: null": ({"required": None}, ["required"], {}),
    "required: true": ({"type": "object", "required": True}, ["required"], {"type": "object"}),
    "properties: null": ({"properties": None, "additionalProperties": False}, ["properties"], {}),
    "a property that is no schema": (
        {"properties": {"x": "string", "y": {"type": "null"}}}, ["x"],
        {"properties": {"x": True, "y": {"type": "null"}}},
    ),
    "type": ({"type": "any"}, ["type"], {}),
    "type: null": ({"type": None, "maxLength": 1}, ["type"], {"maxLength": 1}),
    "enum": ({"enum": "a"}, ["enum"], {}),
    "items": ({"prefixItems": {"type": "null"}, "items": False}, ["prefixItems"], {}),
    "reference to nowhere": ({"$ref": "#/$defs/nowhere"}, ["$ref"], {}),
    "reference to elsewhere": ({"$ref": "other.json#/a"}, ["$ref"], {}),
    "exclusiveMinimum": ({"exclusiveMinimum": "1"}, ["exclusiveMinimum"], {}),
    "incompatible": (
        {"allOf": [{"type": "string"}, {"type": "number"}]}, ["type"],
        {"allOf": [{"type": "string"}, {}]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_cannot_be_enforced_is_left_out_where_it_stands(name: str) -> None:
    info, keywords, rest = LEFT_OUT[name]
    schema = {"type": "object", "properties": {"a": ARGUMENT, "e": info}, "required": ["e"]}
    result = relax(assertions(json.dumps(schema)))
    assert sorted(place.keyword for place in result.left_out) == sorted(keywords)
    assert all(place.path[:2] == ("properties", "e") for place in result.left_out)
    assert json.loads(result.text) == {**schema, "properties": {"a": ARGUMENT, "e": rest}}


ENFORCED: list[Any] = [
    {"type": ["string", "null"]},
    {"type": "string", "nullable": True},
    {"enum": ["a", 1, None, {"b": [2]}]},
    {"type": "string", "enum": ["a", 1]},
    {"minimum": 3, "exclusiveMinimum": True},
    {"items": [{"type": "string"}], "additionalItems": False},
    {"type": "string", "contentEncoding": "base64"},
    {"type": "string", "format": "anything at all"},
    {"oneOf": [{"type": "string"}, {"type": "null"}]},
    {"$ref": "#/properties/a", "description": "beside a reference"},
    True,
    False,
]


@pytest.mark.parametrize("message", ENFORCED, ids=str)
def test_what_can_be_enforced_is_whole(message: Any) -> None:
    schema = {"type": "object", "properties": {"a": ARGUMENT, "e": message}}
    assert relax(assertions(json.dumps(schema))).left_out == ()


def test_recursion_stays_but_where_it_has_siblings() -> None:
    node = {"type": "object", "properties": {"next": {"type": "object", "$ref": "#/$defs/n"}}}
    result = relax(assertions(json.dumps({"$ref": "#/$defs/n", "$defs": {"n": node}})))
    (place,) = result.left_out
    assert str(place) == '"$ref" (at /$defs/n/properties/next/$ref)'


def test_a_schema_that_costs_too_much_becomes_any_object() -> None:
    hard = {f"p{n}": {"type": "string", "pattern": f"a{{{n}}}(?=x)"} for n in range(60)}
    result = relax(assertions(json.dumps({"type": "object", "properties": hard})))
    assert result.text == ANYTHING
    assert result.summary == "all of it"


def test_many_faults_that_say_the_same_take_few_trials() -> None:
    properties = {f"p{n}": {"type": "number", "maximum": 3.5e38} for n in range(300)}
    result = relax(assertions(json.dumps({"type": "object", "properties": properties})))
    assert result.total == 300
    assert result.summary.endswith("and 297 more")


@pytest.mark.parametrize(("name", "schema"), tool_schemas().items())
def test_the_types_of_zod_and_pydantic_compile(name: str, schema: dict[str, Any]) -> None:
    result = relax(assertions(json.dumps(schema)))
    keywords = {place.keyword for place in result.left_out}
    assert keywords == PARTLY.get(name, set())


# Of all other types, everything is enforced.
PARTLY = {
    "zod emoji": {"pattern"},
    "zod iso.duration": {"pattern"},
    "zod float32": {"minimum", "maximum"},
    "zod regex with look-ahead": {"pattern"},
    "zod hostname": {"pattern"},
    "pydantic set": {"uniqueItems"},
    "pydantic frozenset": {"uniqueItems"},
    "pydantic tagged union": {"oneOf"},
}


# Their schemas say less than the types do: by formats that are annotations, or not at all.
SAYING_LESS = {
    *("UUID4", "Path", "Pattern", "Base64Bytes", "Json", "dict of numbers", "bytes", "Decimal"),
    *("AnyUrl", "HttpUrl", "datetime", "date", "time", "timedelta"),
}


SAYING_ALL = [
    name for name in TYPES if name not in SAYING_LESS and f"pydantic {name}" not in PARTLY
]


@pytest.mark.parametrize("name", sorted({*SAYING_ALL} - SAYING_LESS))
def test_arguments_of_a_schema_are_of_the_type(name: str) -> None:
    model, rng = arguments(name), np.random.default_rng(3)
    text = json.dumps(tool_schemas()[f"pydantic {name}"])
    for _ in range(3):
        model.model_validate_json(written(relax(assertions(text)).text, rng))


def written(schema: str, rng: np.random.Generator) -> str:
    """Write something of a schema, letter by letter; what closes a value is likelier."""
    constraint, tokenizer = grammars().constraint(Grammar("json", schema)), vocabulary()
    (end,) = tokenizer.encode("<|end|>", special=True)
    answer: list[int] = []
    row = np.empty((1, tokenizer.vocab_size), np.float32)
    while end not in answer:
        row[:] = 0
        constraint.forbid(row, np.array(answer, np.uint32), [[]])
        allowed = np.flatnonzero(np.isfinite(row[0])).tolist()
        closing = [id for id in allowed if id == end or tokenizer.decode([id]) in ('"', "]", "}")]
        answer.append(int(rng.choice(closing if closing and rng.random() < 0.7 else allowed)))
    return tokenizer.decode(answer[:-1])


def test_lists_of_keywords_and_formats_are_the_parsers() -> None:
    """What a newer llguidance can do must not be left out."""
    for keyword in schemas.LACKING - {"divisibleBy", "disallow", "extends", "dependencies"}:
        obstacle = find_obstacle(
            Outline(content=Grammar("json", json.dumps({keyword: {"maxLength": 1}})))
        )
        assert obstacle is not None, keyword
    for name in schemas.FORMATS:
        text = json.dumps({"type": "string", "format": name})
        assert assertions(text) == schemas.compact(json.loads(text))
        assert relax(text).left_out == (), name


def tools_of(schemas: dict[str, Any], **more: Any) -> Tools:
    named = [
        {"type": "function", "function": {"name": f"f{at}", "parameters": schema, **more}}
        for at, schema in enumerate(schemas.values())
    ]
    tools = Tools.read(named)
    assert tools is not None
    return tools


def turn(tools: Tools) -> Outline:
    family = next(family for family in CHAT_FORMATS if family.name == "hermes")
    return Outline.for_chat_format(family, family.thought[1], tools=tools)


def compiles(message: Outline) -> bool:
    assert message.grammar is not None
    if len(message.grammar.text) > MAX_GRAMMAR:
        return False
    try:
        grammars().attempt(message.grammar)
    except GrammarError:
        return False
    return True


def test_all_types_at_once_compile_in_one_turn() -> None:
    info = turn(tools_of(tool_schemas()))
    relaxed_tools = with_relaxed_tools(info, (), compiles)
    assert compiles(relaxed_tools)
    assert [text for _, text in relaxed_tools.tools if text == ANYTHING] == []


def test_tools_that_are_too_much_together_lose_the_largest_schemas() -> None:
    words = [f"{at:04}" for at in range(2000)]
    large = {"type": "object", "properties": {"a": {"enum": words}}}
    info = turn(tools_of({**dict.fromkeys("abcdefg", large), "small": {"type": "object"}}))
    strict = ("f0",)
    relaxed_tools = with_relaxed_tools(info, strict, compiles)
    assert compiles(relaxed_tools)
    assert [text == ANYTHING for _, text in relaxed_tools.tools] == [
        False,
        *[True] * 4,
        False,
        False,
        False,
    ]
    everything = [name for name, _ in info.tools]
    assert with_relaxed_tools(info, everything, compiles) == info


def test_divisors_that_are_too_many_together_are_left_out_first() -> None:
    fives = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 5}}}
    info = turn(tools_of(dict.fromkeys("abcdefgh", fives)))
    relaxed_tools = with_relaxed_tools(info, ("f0",), compiles)
    assert compiles(relaxed_tools)
    assert ["multipleOf" in text for _, text in relaxed_tools.tools] == [True] + [False] * 7
    assert all('"integer"' in text for _, text in relaxed_tools.tools)


def test_descriptions_do_not_count() -> None:
    """Agents offer hundreds of kilobytes, most of them descriptions."""
    parameter = {"type": "string", "description": "It is said at length. " * 60}
    schema = {"type": "object", "properties": {f"p{at}": parameter for at in range(3)}}
    info = turn(tools_of({str(at): schema for at in range(100)}))
    assert info.grammar is not None
    assert len(info.grammar.text) < 20_000
    assert "at length" not in info.grammar.text
    assert compiles(info)


# Alone each compiles; so many of them are too large for the parser.
MANY = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"k": {"const": at}, "z": {"type": "string", "pattern": "(?=x)"}},
        }
        for at in range(650)
    ]
}


def test_what_only_many_of_a_kind_exceed_is_left_out_of_all_of_them() -> None:
    schema = {"type": "object", "properties": {"a": MANY}}
    text = assertions(json.dumps(schema))
    assert len(text) < MAX_GRAMMAR
    TRIAL.attempt(Grammar("json", relax(text).text))


def test_a_schema_that_cannot_be_sent_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"properties": {"a": {"enum": [f"{at:06}" for at in range(MAX_GRAMMAR // 8)]}}}
    monkeypatch.setattr(TRIAL, "attempt", None)
    result = relax(assertions(json.dumps(schema)))
    assert (result.text, result.summary) == (ANYTHING, "all of it")


def costly(name: str) -> str:
    """Write a schema that compiles, and that others are unlike."""
    return assertions(json.dumps({"type": "object", "properties": {name: {"type": "null"}}}))


def slowly(cpu_s: float) -> Callable[[Grammar], None]:
    """Return what tries a grammar, and takes so much of a processor."""

    def attempt(grammar: Grammar) -> None:
        TRIAL._add_cost(cpu_s)

    return attempt


def test_the_tools_of_one_answer_share_what_they_may_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TRIAL, "attempt", slowly(0.2))
    tools = tuple((f"t{at}", costly(f"shared {at}")) for at in range(100))
    outline = Outline(tools=tools)
    begun_s = TRIAL.cpu_s
    limited = with_relaxed_tools(outline, (), lambda _: True)
    assert TRIAL.cpu_s - begun_s < 3.0
    assert limited.tools[0] == tools[0]
    assert limited.tools[-1] == ("t99", ANYTHING)
    # what was not tried is not blamed for it, and is tried the next time
    for _ in range(20):
        limited = with_relaxed_tools(outline, (), lambda _: True)
    assert limited.tools == tools


def test_what_others_try_meanwhile_is_no_cost_of_a_schema(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attempt(_: Grammar) -> None:
        other = threading.Thread(target=TRIAL._add_cost, args=(100.0,))
        other.start()
        other.join()

    monkeypatch.setattr(TRIAL, "attempt", attempt)
    text = costly("beside others")
    assert relax(text).text == text


def test_a_client_cannot_fill_the_journal(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    notices = Notices()
    for at in range(2000):
        notices.warn(f"tool {at}")
        notices.warn(f"tool {at}")
    assert len(caplog.records) == 30
    assert (
        caplog.records[-1].message
        == "tool 29 (further warnings of this kind are not logged for a while)"
    )
    now_s = 61.0
    notices.warn("another one")
    assert caplog.records[-1].message == "another one"


def test_what_is_left_out_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaxation, "NOTICES", Notices())
    text = assertions(json.dumps({"type": "object", "uniqueItems": True, "required": None}))
    for name in ("logged", "logged", "again"):
        relax_tool(name, text)
    assert [record.message for record in caplog.records] == [
        f"tool '{name}': these parts of its schema are not enforced: "
        '"uniqueItems" (at /uniqueItems), "required" (at /required)'
        for name in ("logged", "again")
    ]


def test_a_machine_that_is_too_busy_leaves_out_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def busy(grammar: Grammar) -> None:
        raise GrammarBusyError("later")

    monkeypatch.setattr(TRIAL, "attempt", busy)
    options = {"type": "object", "properties": {"busy": {"uniqueItems": True, "pattern": "(?=a)"}}}
    result = relax_tool("f", assertions(json.dumps(options)))
    assert result.summary == '"uniqueItems" (at /properties/busy/uniqueItems)'
    monkeypatch.undo()
    assert len(relax_tool("f", assertions(json.dumps(options))).left_out) == 2
