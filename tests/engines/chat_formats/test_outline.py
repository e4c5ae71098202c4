"""A turn's grammar allows what its family writes, and nothing else where something must be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pilotfish.engines.chat_formats import CHAT_FORMATS, ChatFormat, Tools, chat_format_of
from pilotfish.engines.chat_formats.outline import KIND, Outline, read_outline
from pilotfish.engines.chat_formats.reader import Turn, TurnReader
from pilotfish.engines.engine_errors import GrammarError
from pilotfish.speculation.logits_options import Grammar
from tests.support.calling import (
    CALLING,
    TEMPLATES,
    TOLD,
    TOOLS,
    allowed,
    grammars,
    outline,
    tool,
)

MOVE, STOP = ("move", {"to": "here"}), ("stop", {})
every_family = pytest.mark.parametrize("family", CALLING, ids=lambda family: family.name)


@pytest.mark.parametrize("family", CHAT_FORMATS, ids=lambda family: family.name)
def test_a_template_tells_its_family(family: ChatFormat) -> None:
    assert chat_format_of(TOLD[family.name]) is family


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("qwen2.5", "hermes"), ("qwen3", "hermes"), ("llama3", "llama"), ("mistral", "hermes")],
)
def test_real_templates(name: str, wanted: str) -> None:
    # Mistral's of then knows of no calls
    assert chat_format_of((TEMPLATES / f"{name}.jinja").read_text()).name == wanted


def thought(family: ChatFormat) -> str:
    return f"{family.thought[0]}\nhm <b> {{\n{family.thought[1]}\n\n"


@every_family
def test_what_a_turn_may_be(family: ChatFormat) -> None:
    calls = family.calls
    assert calls is not None
    item, two = calls.format([MOVE]), calls.format([STOP, MOVE])
    before = "I see.\n" if calls.anywhere else ""
    auto = outline(family)
    for text in ("", "Hello <b> [x]", item, before + item, thought(family) + item):
        assert allowed(auto, text), text
    assert allowed(auto, thought(family) + "Hello")
    assert allowed(auto, two) is family.parallel
    assert allowed(outline(family, parallel=False), item)
    assert not allowed(outline(family, parallel=False), two)


@every_family
def test_what_must_be_called(family: ChatFormat) -> None:
    calls = family.calls
    assert calls is not None
    item, two, other = (calls.format(each) for each in ([MOVE], [STOP, MOVE], [STOP]))
    for choice, wanted in (
        ("required", {item, other} | ({two} if family.parallel else set())),
        ("move", {item}),
    ):
        must = outline(family, choice)
        for text in ("", "Hello", item, two, other, f"Well. {item}"):
            assert allowed(must, text) is (text in wanted), (choice, text)
        assert allowed(must, thought(family) + item)
        assert not allowed(must, thought(family))


@every_family
def test_none_is_to_be_called(family: ChatFormat) -> None:
    assert family.calls is not None
    none = outline(family, "none")
    assert allowed(none, "Hello <b> [x]")
    assert allowed(none, thought(family) + "Hello")
    assert not allowed(none, family.calls.format([MOVE]))


@every_family
def test_a_mark_that_is_spelled_is_none(family: ChatFormat) -> None:
    """A reader sees text: what the grammar takes for words must not look like a call."""
    assert family.calls is not None
    spelled = family.calls.format([("rm", {})])
    for text in (spelled, f"Well. {spelled}", f"{family.thought[0]} x"):
        anywhere = family.calls.anywhere or not text.startswith("Well")
        assert allowed(outline(family), text, special=False) is not anywhere, text


@every_family
@pytest.mark.parametrize("spaces", range(6))
def test_space_before_marks(family: ChatFormat, spaces: int) -> None:
    """Up to three may be; behind more it is words, which the reader sees alike."""
    assert family.calls is not None
    prefix, info = "\n" * spaces, outline(family)

    def read(text: str) -> Turn:
        reader = TurnReader(info, family.call_id)
        return Turn.from_parts([*reader.push(text), *reader.end()])

    call = prefix + family.calls.format([MOVE])
    if allowed(info, call):
        assert allowed(info, call.replace("here", "away")) is not bool(read(call).calls)
        assert family.calls.anywhere or bool(read(call).calls) is (spaces <= 3)
    if allowed(info, prefix + thought(family)):
        assert bool(read(prefix + thought(family)).reasoning) is (spaces == 0)


@every_family
def test_arguments_are_of_their_schema(family: ChatFormat) -> None:
    assert family.calls is not None
    for call in (("move", {}), ("move", {"to": "away"}), ("stop", {"a": 1}), ("go", {})):
        assert not allowed(outline(family), family.calls.format([call])), call
    # of two names of which one begins the other
    assert allowed(outline(family), family.calls.format([("stop_all", {})]))


@pytest.mark.parametrize(
    ("more", "wanted"),
    [({}, False), ({"additionalProperties": True}, True), ({"allOf": [{}]}, True)],
)
def test_properties_that_are_not_named(more: dict[str, Any], wanted: bool) -> None:
    info = tool("move", to={"type": "integer"})
    schema = {"type": "object", "properties": {"to": {"type": "integer"}}, **more}
    info["function"]["parameters"] = schema
    (hermes,) = (family for family in CALLING if family.name == "hermes")
    tools = Tools.read([info])
    assert tools is not None
    assert (
        tools.tools[0].openai_object["function"]["parameters"] == schema
    )  # a template has it as it is
    may = Outline.for_chat_format(hermes, "", tools=tools)
    assert hermes.calls is not None
    assert allowed(may, hermes.calls.format([("move", {"to": 1})]))
    assert allowed(may, hermes.calls.format([("move", {"to": 1, "by": 2})])) is wanted


@every_family
def test_a_form_beside_calls(family: ChatFormat) -> None:
    assert family.calls is not None
    form = Grammar.from_schema({"type": "array", "items": {"type": "integer"}})
    may = outline(family, content=form)
    assert allowed(may, "[1, 2]")
    assert allowed(may, thought(family) + "[1]")
    assert allowed(may, family.calls.format([MOVE]))
    assert not allowed(may, "Hello")


@every_family
@pytest.mark.parametrize(
    "form",
    [
        Grammar("lark", 'start: x | "no"\nx: "ye" /s+/'),
        Grammar("regex", "yes+|no"),
        Grammar.from_choices(["yes", "no"]),
    ],
)
def test_forms_of_every_kind(family: ChatFormat, form: Grammar) -> None:
    may = outline(family, content=form)
    for text, wanted in (("yes", True), ("no", True), ("maybe", False)):
        assert allowed(may, text) is wanted
        assert allowed(may, thought(family) + text) is wanted


@every_family
def test_a_form_behind_a_thought(family: ChatFormat) -> None:
    form = Grammar("regex", "[ab]{2}")
    may = Outline.for_chat_format(family, family.thought[1], content=form)
    assert may.grammar is not None
    assert may.grammar.kind == KIND
    for text, wanted in (("ab", True), (thought(family) + "ba", True), (thought(family), False)):
        assert allowed(may, text) is wanted
    begun = Outline.for_chat_format(family, family.thought[1], content=form, thinking=True)
    assert allowed(begun, f"hm\n{family.thought[1]}\nab")
    assert not allowed(begun, "ab")


def test_a_model_that_does_not_think_has_the_form_alone() -> None:
    form = Grammar("regex", "[ab]{2}")
    assert Outline.for_chat_format(CALLING[0], "a template", content=form).grammar == form


def test_a_family_whose_calls_are_no_json_is_refused() -> None:
    (family,) = (family for family in CHAT_FORMATS if family.calls is None)
    with pytest.raises(GrammarError, match="not JSON"):
        Outline.for_chat_format(family, "", tools=Tools.read(TOOLS))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not the outline of a turn"),
        ('{"x": 1}', "not the outline of a turn"),
        (json.dumps({"content": [KIND, "{}"]}), "outline of another turn"),
        (json.dumps({"calls": {"trigger": ""}, "tools": [["a", "{}"]]}), "need a trigger"),
        (json.dumps({"calls": {"trigger": "<", "x": 1}}), "not the outline of a turn"),
        (json.dumps({"called": True}), "their syntax and the tools"),
        (
            json.dumps({"calls": {"trigger": "<"}, "tools": [["a", "{}"]] * 129}),
            "at most 128 are allowed",
        ),
        (json.dumps({"called": True, "calls": {"trigger": "<"}}), "their syntax and the tools"),
        (json.dumps({"tools": [["a", "{}"]]}), "their syntax and the tools"),
        (
            json.dumps({"thought": ["", ""], "content": ["regex", "a"]}),
            "a begin mark and an end mark",
        ),
        (json.dumps({"content": ["json", '{"multipleOf": 99999}']}), "multipleOf"),
        (json.dumps({"content": ["lark", "start: %json {}"]}), "must not contain %json"),
        (json.dumps({"content": ["json", "["]}), "not valid JSON"),
    ],
)
def test_a_turn_that_is_none(text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        grammars().constraint(Grammar(KIND, text))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["x"], "A tool is"),
        ([{"type": "web"}], "A tool is"),
        ([{"type": "web", "function": {}}], "of type function"),
        ([{"function": {"name": "a"}, "x": 1}], "unknown field 'x'"),
        ([tool("auto")], "cannot be named"),
        ([{"function": {"name": "a", "parameters": []}}], "must be a JSON schema"),
        ([{"function": {"name": "a", "parameters": {"enum": [{1}]}}}], "not valid JSON"),
        ([{"function": {"name": "a", "parameters": {"maximum": float("nan")}}}], "not valid JSON"),
        ([tool("a b")], "cannot be the name of a function"),
        ([tool("a"), tool("a")], "Two tools"),
        ([tool(f"t{n}") for n in range(129)], "at most 128 are allowed"),
        ([{"function": {"name": "a", "parameters": {"type": "string"}}}], "type object"),
        ([{"function": {"name": "a", "code": "x"}}], "unknown field 'code'"),
    ],
)
def test_tools_that_are_none(items: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tools.read(items)


@pytest.mark.parametrize("field", ["trigger", "gap", "opening", "before", "behind", "end"])
def test_texts_of_a_turn_are_no_rules(field: str) -> None:
    evil = '" | start\n%ignore /./\nX: "\\'
    calls = {"trigger": "<", field: evil}
    info = read_outline(json.dumps({"calls": calls, "tools": [["go", "{}"]], "called": True}))
    assert info.calls is not None
    text = info.calls.format([("go", {})])
    assert (evil in text) is (field != "gap")
    assert allowed(info, text)
    assert not allowed(info, text + "x")


def test_choices() -> None:
    none = Tools.read(TOOLS, "none")
    assert none is not None
    assert none.callable == ()
    assert Tools.read([]) is None
    with pytest.raises(ValueError, match="is not the name of a tool; the tools are move"):
        Tools.read(TOOLS, "fly")
    with pytest.raises(ValueError, match="needs tools"):
        Tools.read(None, "required")
