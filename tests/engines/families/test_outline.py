"""A turn's grammar allows what its family writes, and nothing else where something must be."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pilotfish.engines.errors import GrammarError
from pilotfish.engines.families import FAMILIES, Family, Tools, family_of
from pilotfish.engines.families.outline import KIND, Outline, read_outline
from pilotfish.speculation.shaping import Grammar
from tests.support.calling import (
    CALLING,
    TEMPLATES,
    TOLD,
    TOOLS,
    grammars,
    outline,
    tool,
    vocabulary,
)

MOVE, STOP = ("move", {"to": "here"}), ("stop", {})
every_family = pytest.mark.parametrize("family", CALLING, ids=lambda family: family.name)


def allowed(told: Outline, text: str) -> bool:
    """Whether an answer may be exactly this text, control tokens included."""
    assert told.grammar is not None
    tokenizer = vocabulary()
    constraint = grammars().constraint(told.grammar)
    ids = np.array(tokenizer.encode(text, special=True), np.uint32)
    (end,) = tokenizer.encode("<|end|>", special=True)
    for at, token in enumerate([*ids.tolist(), end]):
        row = np.zeros((1, tokenizer.vocab_size), np.float32)
        constraint.forbid(row, ids[:at], [[]])
        if not np.isfinite(row[0, token]):
            return False
    return True


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_template_tells_its_family(family: Family) -> None:
    assert family_of(TOLD[family.name]) is family


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("qwen2.5", "hermes"), ("qwen3", "hermes"), ("smollm2", "hermes"), ("llama3", "llama")],
)
def test_real_templates(name: str, wanted: str) -> None:
    path = TEMPLATES / f"{name}.jinja"
    assert family_of(path.read_text() if path.exists() else "").name == wanted


def thought(family: Family) -> str:
    return f"{family.thought[0]}\nhm <b> {{\n{family.thought[1]}\n\n"


@every_family
def test_what_a_turn_may_be(family: Family) -> None:
    calls = family.calls
    assert calls is not None
    one, two = calls.written([MOVE]), calls.written([STOP, MOVE])
    before = "I see.\n" if calls.anywhere else ""
    auto = outline(family)
    for text in ("", "Hello <b> [x]", one, before + one, thought(family) + one):
        assert allowed(auto, text), text
    assert allowed(auto, thought(family) + "Hello")
    assert allowed(auto, two) is calls.parallel
    assert allowed(outline(family, parallel=False), one)
    assert not allowed(outline(family, parallel=False), two)


@every_family
def test_what_must_be_called(family: Family) -> None:
    calls = family.calls
    assert calls is not None
    one, two, other = (calls.written(each) for each in ([MOVE], [STOP, MOVE], [STOP]))
    for choice, wanted in (
        ("required", {one, other} | ({two} if calls.parallel else set())),
        ("move", {one}),
    ):
        must = outline(family, choice)
        for text in ("", "Hello", one, two, other, f"Well. {one}"):
            assert allowed(must, text) is (text in wanted), (choice, text)
        assert allowed(must, thought(family) + one)
        assert not allowed(must, thought(family))


@every_family
def test_arguments_are_of_their_schema(family: Family) -> None:
    assert family.calls is not None
    for call in (("move", {}), ("move", {"to": "away"}), ("stop", {"a": 1}), ("go", {})):
        assert not allowed(outline(family), family.calls.written([call])), call
    # of two names of which one begins the other
    assert allowed(outline(family), family.calls.written([("stop_all", {})]))


@pytest.mark.parametrize(
    ("more", "wanted"),
    [({}, False), ({"additionalProperties": True}, True), ({"allOf": [{}]}, True)],
)
def test_properties_that_are_not_named(more: dict[str, Any], wanted: bool) -> None:
    told = tool("move", to={"type": "integer"})
    schema = {"type": "object", "properties": {"to": {"type": "integer"}}, **more}
    told["function"]["parameters"] = schema
    (hermes,) = (family for family in CALLING if family.name == "hermes")
    tools = Tools.read([told])
    assert tools is not None
    assert tools.told[0]["function"]["parameters"] == schema  # a template has it as it is
    may = Outline.of(hermes, "", tools=tools)
    assert hermes.calls is not None
    assert allowed(may, hermes.calls.written([("move", {"to": 1})]))
    assert allowed(may, hermes.calls.written([("move", {"to": 1, "by": 2})])) is wanted


@every_family
def test_a_form_beside_calls(family: Family) -> None:
    assert family.calls is not None
    form = Grammar.of_schema({"type": "array", "items": {"type": "integer"}})
    may = outline(family, content=form)
    assert allowed(may, "[1, 2]")
    assert allowed(may, thought(family) + "[1]")
    assert allowed(may, family.calls.written([MOVE]))
    assert not allowed(may, "Hello")


@every_family
def test_a_form_behind_a_thought(family: Family) -> None:
    form = Grammar("regex", "[ab]{2}")
    may = Outline.of(family, family.thought[1], content=form)
    assert may.grammar is not None
    assert may.grammar.kind == KIND
    for text, wanted in (("ab", True), (thought(family) + "ba", True), (thought(family), False)):
        assert allowed(may, text) is wanted
    begun = Outline.of(family, family.thought[1], content=form, thinking=True)
    assert allowed(begun, f"hm\n{family.thought[1]}\nab")
    assert not allowed(begun, "ab")


def test_a_model_that_does_not_think_has_the_form_alone() -> None:
    form = Grammar("regex", "[ab]{2}")
    assert Outline.of(CALLING[0], "a template", content=form).grammar == form


def test_a_family_whose_calls_are_no_json_is_refused() -> None:
    (family,) = (family for family in FAMILIES if family.calls is None)
    with pytest.raises(GrammarError, match="not JSON"):
        Outline.of(family, "", tools=Tools.read(TOOLS))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no turn"),
        ('{"x": 1}', "no turn"),
        (json.dumps({"content": [KIND, "{}"]}), "not within a turn"),
        (json.dumps({"calls": {"trigger": "<"}}), "names tools"),
        (json.dumps({"calls": {"trigger": ""}, "tools": [["a", "{}"]]}), "names tools"),
        (json.dumps({"content": ["json", '{"multipleOf": 99999}']}), "multipleOf"),
        (json.dumps({"content": ["lark", "start: %json {}"]}), "cannot have %json"),
        (json.dumps({"content": ["json", "["]}), "no JSON"),
    ],
)
def test_a_turn_that_is_none(text: str, said: str) -> None:
    with pytest.raises(GrammarError, match=said):
        grammars().constraint(Grammar(KIND, text))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([{"type": "web"}], "A tool is"),
        ([tool("a b")], "names no function"),
        ([tool("a"), tool("a")], "Two tools"),
        ([tool(f"t{n}") for n in range(129)], "128 is the most"),
        ([{"function": {"name": "a", "parameters": {"type": "string"}}}], "type object"),
        ([{"function": {"name": "a", "code": "x"}}], "has no 'code'"),
    ],
)
def test_tools_that_are_none(told: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Tools.read(told)


@pytest.mark.parametrize("field", ["trigger", "gap", "opening", "before", "behind", "end"])
def test_texts_of_a_turn_are_no_rules(field: str) -> None:
    evil = '" | start\n%ignore /./\nX: "\\'
    calls = {"trigger": "<", field: evil}
    told = read_outline(json.dumps({"calls": calls, "tools": [["go", "{}"]], "called": True}))
    assert told.calls is not None
    text = told.calls.written([("go", {})])
    assert (evil in text) is (field != "gap")
    assert allowed(told, text)
    assert not allowed(told, text + "x")


def test_choices() -> None:
    assert Tools.read(TOOLS, "none") is None
    assert Tools.read([]) is None
    with pytest.raises(ValueError, match="is no tool: move"):
        Tools.read(TOOLS, "fly")
    with pytest.raises(ValueError, match="needs tools"):
        Tools.read(None, "required")
