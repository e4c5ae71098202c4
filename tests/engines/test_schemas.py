"""What a schema asserts: annotations are none, and what is left out of one permits no less."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.engines.relaxation import relax
from pilotfish.engines.schemas import assertions
from tests.support.examples import examples


def asserted(schema: Any) -> Any:
    return json.loads(assertions(json.dumps(schema)))


def test_annotations_are_no_assertions() -> None:
    options = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T",
        "description": "long " * 1000,
        "type": "object",
        "properties": {
            "e": {"type": "string", "format": "emoji", "examples": ["x"], "x-order": 1},
            "f": {"items": {"deprecated": True, "type": "string", "default": {"title": "T"}}},
        },
        "$defs": {"a": {"$comment": "c", "anyOf": [{"title": "A", "type": "null"}]}},
    }
    assert asserted(options) == {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"e": {"type": "string"}, "f": {"items": {"type": "string"}}},
        "$defs": {"a": {"anyOf": [{"type": "null"}]}},
    }


@pytest.mark.parametrize(
    "message",
    [
        {"properties": {"title": {"type": "string"}, "description": {}, "default": True}},
        {"properties": {"properties": {"properties": {"title": {}, "examples": {}}}}},
        {"enum": [{"title": "T", "description": "D"}], "const": {"default": 1}},
        {"required": ["title", "description"], "patternProperties": {"title": {}}},
        {"$defs": {"description": {"type": "string"}}, "$ref": "#/$defs/description"},
        # a reference leads through what is an annotation else
        {"components": {"schemas": {"a": {"type": "null"}}}, "$ref": "#/components/schemas/a"},
        {"default": {"a~b/c": {"type": "null"}}, "$ref": "#/default/a~0b~1c"},
        {"$ref": "#/properties", "properties": {"title": {}}, "additionalProperties": False},
        {"$ref": "#/enum/0", "enum": [{"title": 1}]},
        {"x-guidance": {"whitespace_flexible": True}},
    ],
)
def test_names_and_data_stay(message: dict[str, Any]) -> None:
    assert asserted(message) == message


@pytest.mark.parametrize(
    ("message", "same"),
    [
        ({"uniqueItems": False}, {}),
        ({"propertyNames": {"type": "string"}}, {}),
        ({"not": {}}, {"enum": []}),
        ({"minLength": 2.0}, {"minLength": 2}),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}},
            {
                "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
                "additionalProperties": False,
            },
        ),
        (
            {"propertyNames": {"pattern": "^x"}},
            {"patternProperties": {"^x": True}, "additionalProperties": False},
        ),
        ({"propertyNames": {"maxLength": 3}}, {"propertyNames": {"maxLength": 3}}),
        (
            {"propertyNames": {"enum": ["a", "1"], "pattern": "a"}},  # which one name does not fit
            {"propertyNames": {"enum": ["a", "1"], "pattern": "a"}},
        ),
        (
            {"propertyNames": {"type": "integer", "pattern": "a"}},  # which no name fits
            {"propertyNames": {"type": "integer", "pattern": "a"}},
        ),
    ],
)
def test_what_can_be_said_in_another_way(message: dict[str, Any], same: dict[str, Any]) -> None:
    assert asserted(message) == same


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "ab", "ba"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "title"]), inner, max_size=3)
    ),
    max_leaves=4,
)


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from(["a", "b", "title"]), inner, max_size=2)
    keywords = {
        "type": st.sampled_from(["string", "integer", "array", "object", ["array", "null"]]),
        "title": st.just("T"),
        "enum": st.lists(JSON, min_size=1, max_size=3, unique_by=str),
        "properties": named,
        "patternProperties": st.dictionaries(st.sampled_from(["a", "b$"]), inner, max_size=2),
        "additionalProperties": inner,
        "required": st.lists(st.sampled_from(["a", "b"]), unique=True),
        "minProperties": st.integers(0, 2),
        "propertyNames": st.sampled_from(
            [{"enum": ["a"]}, {"pattern": "a"}, {"maxLength": 1}, {"enum": ["b"], "pattern": "a"}]
        ),
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "uniqueItems": st.booleans(),
        "maxLength": st.integers(0, 2),
        "pattern": st.sampled_from(["^a", "a(?=b)"]),
        "maximum": st.sampled_from([1, 1e300, 3.5e38]),
        "not": inner,
        "oneOf": st.lists(inner, min_size=1, max_size=2),
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "if": inner,
        "then": inner,
        "dependentRequired": st.just({"a": ["b"]}),
        "$ref": st.sampled_from(["#/$defs/d", "#/nowhere/b"]),
    }
    return st.sets(st.sampled_from(sorted(keywords)), max_size=4).flatmap(
        lambda chosen: st.fixed_dictionaries({name: keywords[name] for name in sorted(chosen)})
    )


SCHEMAS = st.recursive(st.booleans() | st.just({}), _schemas, max_leaves=5)


def fits(value: Any, schema: Any) -> bool:
    """Whether a value fits a schema, by another reader; a reference to nowhere is to anything."""
    info = {**schema, "nowhere": {"b": True}} if isinstance(schema, dict) else schema
    return jsonschema.Draft202012Validator(info).is_valid(value)


@given(st.fixed_dictionaries({"properties": st.dictionaries(st.sampled_from("ab"), SCHEMAS),
                              "allOf": st.lists(SCHEMAS, max_size=1),
                              "$defs": st.fixed_dictionaries({"d": st.just({"type": "array"})})}),
       st.lists(JSON, min_size=8, max_size=8))  # fmt: skip
@examples(200)
def test_all_that_fits_a_schema_fits_what_is_left_of_it(message: Any, values: list[Any]) -> None:
    text = assertions(json.dumps(message))
    assert assertions(text) == text  # an edge of before compiles it as it is
    result = relax(text)
    for value in [*values, {"a": values[0]}, {"a": values[1], "b": values[2]}]:
        wanted = fits(value, message)
        assert fits(value, json.loads(text)) == wanted
        assert fits(value, json.loads(result.text)) >= wanted
