"""What a JSON schema asserts, keyword by keyword, and which of it llguidance 1.9 can enforce.

In:  a schema as JSON. Out: the same without what is no assertion; its places (a keyword in a
     subschema); and a schema without some of its places, which permits no less.

Names of properties, and what stands in ``enum``, ``const`` and ``default``, are data and no
keywords. Nothing here recurses: a schema may be nested as deeply as JSON can be read.
"""

import json
import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

Node = dict[str, Any]

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONES = (
    *("items", "additionalItems", "contains", "unevaluatedItems"),
    *("additionalProperties", "propertyNames", "unevaluatedProperties"),
    *("not", "if", "then", "else"),
)
_IDENTITY = ("$schema", "$id", "id", "$anchor", "$defs", "definitions", "x-guidance")
_ENFORCED = (
    # A schema that lacks one of the first may be refused for one of the last. A reference comes
    # last of all: what it points at must be there.
    *("type", "properties", "patternProperties", "required", "prefixItems", "items"),
    *("additionalItems", "additionalProperties", "enum", "const", "allOf", "anyOf", "oneOf"),
    *("minItems", "maxItems", "minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minProperties", "maxProperties", "$ref"),
)
# Of all drafts; what is in none of these is an annotation.
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
_READ = frozenset((*_IDENTITY, *_ENFORCED, *LACKING))
# Values with which a keyword that llguidance lacks says nothing.
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
_MOST_COPIED = 4096  # letters of a schema that becomes that of several properties
# What a keyword says of the rest depends on what this one names.
_REST = {
    "properties": ("additionalProperties",),
    "patternProperties": ("additionalProperties",),
    "prefixItems": ("items",),
    "items": ("additionalItems",),
}


class KeywordPlace(NamedTuple):
    """A keyword of a subschema, "" for all of them. path: to the subschema, from the root."""

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
    """Write a schema without what asserts nothing; the same texts fit it.

    Annotations go, and so does an unknown ``format``, which is one; what is said in a way that
    llguidance lacks is said in another, where there is one. Raises `ValueError`, `RecursionError`.
    """
    schema = json.loads(text)
    pointed = _pointed(schema)
    for _, node in reversed([*_nodes(schema)]):
        for keyword in [*node]:
            if not (keyword in _READ or (id(node), keyword) in pointed):
                del node[keyword]
        if isinstance(named := node.get("format"), str) and named not in FORMATS:
            del node["format"]
        if not any((id(node), keyword) in pointed for keyword in node):
            _without_idle(node)
            _as_names(node)
    return compact(schema)


def _without_idle(node: Node) -> None:
    """Remove keywords that llguidance lacks, and that say nothing as they are.

    Counts become whole numbers, which 2.0 is as well.
    """
    for keyword, values in _IDLE.items():
        if keyword in node and node[keyword] in values:
            del node[keyword]
    for keyword in _COUNTS.intersection(node):
        if isinstance(count := node[keyword], float) and count.is_integer():
            node[keyword] = int(count)
    if "not" in node and node["not"] in (True, {}):
        node.clear()
        node["enum"] = []  # nothing fits, as nothing fits zod's z.never()


def _as_names(node: Node) -> None:
    """Say which names properties may have by the properties themselves, where that is the same."""
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
    """Whether these are texts, of which each may have its own copy of a schema."""
    texts = all(isinstance(value, str) for value in values)
    return texts and len(values) * len(compact(each)) <= _MOST_COPIED


def compact(schema: Any) -> str:
    """Write JSON without spaces."""
    return json.dumps(schema, separators=(",", ":"))


def keyword_places(schema: Any) -> list[KeywordPlace]:
    """List the places of a schema, so that what stands first needs nothing that follows it."""
    listed = [
        KeywordPlace(path, keyword)
        for path, node in _nodes(schema)
        for keyword in sorted(node, key=lambda one: _RANK.get(one, 0))
        if keyword not in LACKING
    ]
    return sorted(listed, key=lambda place: place.keyword == "$ref")


def unsupported_keywords(schema: Any) -> list[KeywordPlace]:
    """List the places of keywords that llguidance lacks."""
    return [
        KeywordPlace(path, keyword)
        for path, node in _nodes(schema)
        for keyword in node
        if keyword in LACKING
    ]


def without_keywords(schema: Any, left_out: Collection[KeywordPlace]) -> Any:
    """Copy a schema without these places; all that fits it fits the copy.

    What applies to the rest of an object or of a list goes with what says which rest that is.
    """
    copy = json.loads(json.dumps(schema))
    for place in left_out:
        node = value_at(copy, place.path)
        if not isinstance(node, dict):
            continue  # it was within another
        for keyword in (place.keyword, *_REST.get(place.keyword, ())):
            node.pop(keyword, None)
    return copy


def normalize_types(schema: Any) -> tuple[Any, list[KeywordPlace]]:
    """Copy a schema that is well-formed, and has ``anyOf`` for each ``oneOf``.

    Where no schema stands in the place of one, anything fits. Returns the copy, and these places.
    """
    copy = json.loads(json.dumps(schema))
    changed = []
    for path, node in _nodes(copy):
        for way, below in [*_below(node)]:
            if not isinstance(below, dict | bool):
                value_at(node, way[:-1])[way[-1]] = True
                changed.append(KeywordPlace((*path, *way[:-1]), str(way[-1])))
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
    """Return the value at a path; None if there is none."""
    for name in path:
        if isinstance(schema, dict):
            schema = schema.get(str(name))
        elif isinstance(schema, list) and isinstance(name, int) and name < len(schema):
            schema = schema[name]
        else:
            return None
    return schema


def _nodes(schema: Any) -> Iterator[tuple[tuple[str | int, ...], Node]]:
    """Yield the subschemas that are objects, each before those within it, with their paths."""
    seen: set[int] = set()
    elsewhere = [(path, value_at(schema, path)) for path in _targets(schema)]
    waiting: list[tuple[tuple[str | int, ...], Any]] = [*elsewhere, ((), schema)]
    while waiting:
        path, node = waiting.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield path, node
        waiting += reversed([((*path, *more), below) for more, below in _below(node)])


def _below(node: Node) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield what stands where a subschema of this one does, each with the way to it."""
    for keyword, value in node.items():
        if keyword in _MAPS and isinstance(value, dict):
            for name, below in value.items():
                yield (keyword, name), below
        elif keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            for index, below in enumerate(value if isinstance(value, list) else ()):
                yield (keyword, index), below
        elif keyword in _ONES:
            yield (keyword,), value


def _references(schema: Any) -> Iterator[list[str]]:
    """Yield the names of each reference into the document."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if isinstance(ref := one.get("$ref"), str) and ref.startswith("#/"):
                yield [name.replace("~1", "/").replace("~0", "~") for name in ref[2:].split("/")]
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _way(schema: Any, names: list[str]) -> Iterator[tuple[Any, str | int]]:
    """Yield the steps of a reference, as far as they exist."""
    for name in names:
        step = int(name) if isinstance(schema, list) and _INDEX.fullmatch(name) else name
        below = value_at(schema, (step,))
        if below is None:
            return
        yield schema, step
        schema = below


def _targets(schema: Any) -> list[tuple[str | int, ...]]:
    """List the paths of subschemas that references name."""
    paths = []
    for names in _references(schema):
        path = tuple(step for _, step in _way(schema, names))
        if len(path) == len(names) and _leads_to_schema(path):
            paths.append(path)
    return [*dict.fromkeys(paths)]


def _leads_to_schema(path: tuple[str | int, ...]) -> bool:
    """Whether a subschema may stand at the end of a path, and no data or names of properties."""
    steps = iter(path)
    for step in steps:
        if step in ("enum", "const"):
            return False
        if step in (*_MAPS, *_LISTS) and next(steps, None) is None:
            return False
    return True


def _pointed(schema: Any) -> set[tuple[int, str | int]]:
    """Collect the values that references lead through, each by its holder and its name there."""
    return {
        (id(above), step) for names in _references(schema) for above, step in _way(schema, names)
    }
