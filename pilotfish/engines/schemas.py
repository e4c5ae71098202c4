"""Keywords of JSON schemas: which are assertions, and which assertions llguidance 1.9 enforces.

In:  a schema as JSON. Out: the schema without annotations; a list of its places; a copy without
some of these places, which accepts everything that the schema accepts. A place is a keyword of a
subschema.

Property names and the values of ``enum``, ``const`` and ``default`` are data, not keywords. No
function here recurses, so the depth of a schema is limited only by the JSON reader.
"""

import json
import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

Node = dict[str, Any]

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLES = (
    *("items", "additionalItems", "contains", "unevaluatedItems"),
    *("additionalProperties", "propertyNames", "unevaluatedProperties"),
    *("not", "if", "then", "else"),
)
_IDENTITY = ("$schema", "$id", "id", "$anchor", "$defs", "definitions", "x-guidance")
_ENFORCED = (
    # The order matters: a keyword may need the earlier ones to compile. `$ref` comes last, because
    # its target must exist.
    *("type", "properties", "patternProperties", "required", "prefixItems", "items"),
    *("additionalItems", "additionalProperties", "enum", "const", "allOf", "anyOf", "oneOf"),
    *("minItems", "maxItems", "minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minProperties", "maxProperties", "$ref"),
)
# Assertions of any JSON Schema draft that llguidance does not support. Keywords in none of these
# lists are annotations.
LACKING = frozenset(
    (
        *("uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
        *("extends", "disallow", "divisibleBy"),
    )
)
FORMATS = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uuid", "uri"),
    )
)
_RANK = {keyword: value_at for value_at, keyword in enumerate(_ENFORCED)}
_INDEX = re.compile("[0-9]{1,9}")
_KNOWN = frozenset((*_IDENTITY, *_ENFORCED, *LACKING))
# Values with which an unsupported keyword asserts nothing, so that it can be removed.
_IDLE: dict[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
}
_COUNTS = frozenset(
    ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
)
_MOST_COPIED = 4096  # maximum characters of all copies of a schema for several properties
# Keywords that apply to the remaining properties or items; the key says which those are.
_REST = {
    "properties": ("additionalProperties",),
    "patternProperties": ("additionalProperties",),
    "prefixItems": ("items",),
    "items": ("additionalItems",),
}


class KeywordPlace(NamedTuple):
    """A keyword of the subschema at `path` from the root; keyword "" is the whole subschema."""

    path: tuple[str | int, ...]
    keyword: str

    @property
    def pointer(self) -> str:
        """The JSON pointer to the keyword's value."""
        names = (str(name) for name in (*self.path, self.keyword))
        return "".join(f"/{name.replace('~', '~0').replace('/', '~1')}" for name in names)

    def __str__(self) -> str:
        return f'"{self.keyword}" (at {self.pointer})' if self.keyword else "all of it"


def assertions(text: str) -> str:
    """Remove the annotations from a schema; the result accepts the same texts.

    An unknown ``format`` counts as an annotation. Unsupported assertions are replaced by supported
    ones where possible. Raises `ValueError`, `RecursionError`.
    """
    schema = json.loads(text)
    referenced = _referenced_values(schema)
    for _, node in reversed([*_nodes(schema)]):
        for keyword in [*node]:
            if not (keyword in _KNOWN or (id(node), keyword) in referenced):
                del node[keyword]
        if isinstance(format_name := node.get("format"), str) and format_name not in FORMATS:
            del node["format"]
        if not any((id(node), keyword) in referenced for keyword in node):
            _remove_idle(node)
            _names_as_properties(node)
    return compact(schema)


def _remove_idle(node: Node) -> None:
    """Remove unsupported keywords that have values without effect.

    Counts written as floats, such as 2.0, become integers.
    """
    for keyword, values in _IDLE.items():
        if keyword in node and node[keyword] in values:
            del node[keyword]
    for keyword in _COUNTS.intersection(node):
        if isinstance(count := node[keyword], float) and count.is_integer():
            node[keyword] = int(count)
    if "not" in node and node["not"] in (True, {}):
        node.clear()
        node["enum"] = []  # accepts nothing; zod's z.never() is written as "not": {}


def _names_as_properties(node: Node) -> None:
    """Replace ``propertyNames`` by equivalent properties or pattern properties, if possible."""
    names = node.get("propertyNames")
    if not isinstance(names, dict) or not {*names} <= {"type", "enum", "pattern"}:
        return
    if {"properties", "patternProperties"}.intersection(node):
        return
    if names.get("type", "string") != "string":
        return
    rest = node.get("additionalProperties", True)
    match {keyword: value for keyword, value in names.items() if keyword != "type"}:
        case {"enum": [*texts], **more} if not more and _are_few_texts(texts, rest):
            node["properties"] = dict.fromkeys(texts, rest)
        case {"pattern": str(pattern), **more} if not more:
            node["patternProperties"] = {pattern: rest}
        case _:
            return
    del node["propertyNames"]
    node["additionalProperties"] = False


def _are_few_texts(values: list[Any], each: Any) -> bool:
    """Whether all `values` are texts, and few enough to copy the schema `each` for every one."""
    texts = all(isinstance(value, str) for value in values)
    return texts and len(values) * len(compact(each)) <= _MOST_COPIED


def compact(schema: Any) -> str:
    """Write a schema as JSON without spaces."""
    return json.dumps(schema, separators=(",", ":"))


def keyword_places(schema: Any) -> list[KeywordPlace]:
    """List a schema's supported places, ordered so that each depends only on earlier places."""
    listed = [
        KeywordPlace(path, keyword)
        for path, node in _nodes(schema)
        for keyword in sorted(node, key=lambda name: _RANK.get(name, 0))
        if keyword not in LACKING
    ]
    return sorted(listed, key=lambda place: place.keyword == "$ref")


def unsupported_keywords(schema: Any) -> list[KeywordPlace]:
    """List the places with keywords that llguidance does not support."""
    return [
        KeywordPlace(path, keyword)
        for path, node in _nodes(schema)
        for keyword in node
        if keyword in LACKING
    ]


def without_keywords(schema: Any, left_out: Collection[KeywordPlace]) -> Any:
    """Copy a schema without these places; the copy accepts everything that the schema accepts.

    Keywords such as ``additionalProperties`` depend on ``properties``: they are removed together
    (see `_REST`).
    """
    copy = json.loads(json.dumps(schema))
    for place in left_out:
        node = value_at(copy, place.path)
        if not isinstance(node, dict):
            continue  # the place was in a subschema that has been removed already
        for keyword in (place.keyword, *_REST.get(place.keyword, ())):
            node.pop(keyword, None)
    return copy


def normalize_types(schema: Any) -> tuple[Any, list[KeywordPlace]]:
    """Copy a schema; replace each ``oneOf`` by ``anyOf``, and malformed subschemas by `true`.

    Return the copy and the changed places.
    """
    copy = json.loads(json.dumps(schema))
    changed = []
    for path, node in _nodes(copy):
        for steps, below in [*_subschemas(node)]:
            if not isinstance(below, dict | bool):
                value_at(node, steps[:-1])[steps[-1]] = True
                changed.append(KeywordPlace((*path, *steps[:-1]), str(steps[-1])))
        if "oneOf" not in node:
            continue
        changed.append(KeywordPlace(path, "oneOf"))
        options = node.pop("oneOf")
        if "anyOf" not in node:
            node["anyOf"] = options
        elif isinstance(node.setdefault("allOf", []), list):
            node["allOf"].append({"anyOf": options})
    return copy, changed


def value_at(schema: Any, path: tuple[str | int, ...]) -> Any:
    """Return the value at a path of a schema; None if the path does not exist."""
    for name in path:
        if isinstance(schema, dict):
            schema = schema.get(str(name))
        elif isinstance(schema, list) and isinstance(name, int) and name < len(schema):
            schema = schema[name]
        else:
            return None
    return schema


def _nodes(schema: Any) -> Iterator[tuple[tuple[str | int, ...], Node]]:
    """Yield path and content of each subschema that is an object, outer ones before inner ones."""
    seen: set[int] = set()
    elsewhere = [(path, value_at(schema, path)) for path in _reference_targets(schema)]
    waiting: list[tuple[tuple[str | int, ...], Any]] = [*elsewhere, ((), schema)]
    while waiting:
        path, node = waiting.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield path, node
        waiting += reversed([((*path, *more), below) for more, below in _subschemas(node)])


def _subschemas(node: Node) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the subschemas directly in a schema, each with its path from there."""
    for keyword, value in node.items():
        if keyword in _MAPS and isinstance(value, dict):
            for name, below in value.items():
                yield (keyword, name), below
        elif keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            for index, below in enumerate(value if isinstance(value, list) else ()):
                yield (keyword, index), below
        elif keyword in _SINGLES:
            yield (keyword,), value


def _references(schema: Any) -> Iterator[list[str]]:
    """Yield the path, as a list of names, of each ``$ref`` into this document."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if isinstance(ref := node.get("$ref"), str) and ref.startswith("#/"):
                yield [name.replace("~1", "/").replace("~0", "~") for name in ref[2:].split("/")]
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _reference_steps(schema: Any, names: list[str]) -> Iterator[tuple[Any, str | int]]:
    """Yield (container, key) for each step of a reference, as far as the path exists."""
    for name in names:
        step = int(name) if isinstance(schema, list) and _INDEX.fullmatch(name) else name
        below = value_at(schema, (step,))
        if below is None:
            return
        yield schema, step
        schema = below


def _reference_targets(schema: Any) -> list[tuple[str | int, ...]]:
    """List the paths of the subschemas that are targets of references."""
    paths = []
    for names in _references(schema):
        path = tuple(step for _, step in _reference_steps(schema, names))
        if len(path) == len(names) and _leads_to_schema(path):
            paths.append(path)
    return [*dict.fromkeys(paths)]


def _leads_to_schema(path: tuple[str | int, ...]) -> bool:
    """Whether a path can lead to a subschema, not to data or to a map of properties."""
    steps = iter(path)
    for step in steps:
        if step in ("enum", "const"):
            return False
        if step in (*_MAPS, *_LISTS) and next(steps, None) is None:
            return False
    return True


def _referenced_values(schema: Any) -> set[tuple[int, str | int]]:
    """Collect all values on the paths of references, each as (id of its container, key)."""
    return {
        (id(above), step)
        for names in _references(schema)
        for above, step in _reference_steps(schema, names)
    }
