"""Relax the schema of a tool's arguments, so that no request fails for keywords we cannot enforce.

In:  a JSON schema. Out: a schema that compiles, and the list of removed keywords. The new schema
accepts everything that the original accepts, because keywords are only removed.

A search finds the keywords without knowing the parser's reasons. It orders the schema's places
(keywords of subschemas) so that each depends only on earlier places. Then the shortest prefix of
this order that does not compile ends with a place at fault.
"""

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pilotfish.engines import schemas
from pilotfish.engines.chat_formats.outline import Outline
from pilotfish.engines.constraint import one_printable_line
from pilotfish.engines.engine_errors import GrammarBusyError, GrammarError
from pilotfish.engines.grammar import MOST_GRAMMAR_BYTES
from pilotfish.engines.grammar_trial import TRIAL
from pilotfish.engines.notices import NOTICES
from pilotfish.engines.schemas import KeywordPlace
from pilotfish.speculation.logits_options import Grammar

ANYTHING = '{"type":"object"}'
_MOST_REMEMBERED = 256  # number of schemas; an agent sends the same tools with each request
_MOST_TRIALS = 128  # maximum number of trials for one schema
_MOST_CPU_S = 1.0  # maximum CPU seconds of the trials for one schema
_MOST_TOTAL_CPU_S = 2.0  # maximum CPU seconds of the trials for all schemas of an answer
_MOST_NAMED = 3  # maximum number of places that a message names
_MOST_LISTED = 16  # maximum number of removed places that a result stores


class Relaxed(NamedTuple):
    """A schema that compiles.

    left_out: the first removed places. total: number of removed places.
    """

    text: str
    left_out: tuple[KeywordPlace, ...] = ()
    total: int = 0

    @classmethod
    def from_schema(cls, schema: Any, left_out: Sequence[KeywordPlace]) -> "Relaxed":
        """Make the result from a schema and all removed places."""
        return cls(schemas.compact(schema), tuple(left_out[:_MOST_LISTED]), len(left_out))

    @property
    def summary(self) -> str:
        """The removed places as text for people; "" if there are none."""
        if not self.left_out:
            return ""
        named = ", ".join(one_printable_line(place) for place in self.left_out[:_MOST_NAMED])
        more = self.total - _MOST_NAMED
        return f"{named} and {more} more" if more > 0 else named


def with_relaxed_tools(
    outline: Outline, strict: Collection[str], fits: Callable[[Outline], bool]
) -> Outline:
    """Relax the outline's tools that are not strict: first each tool alone, then all together.

    strict: names of strict tools. fits: returns whether an outline compiles and can be sent. If the
    relaxed tools do not fit together, multipleOf is removed first, then the whole schemas of the
    largest tools.
    """
    until_s = TRIAL.cpu_s + _MOST_TOTAL_CPU_S
    whole = {name: text if name in strict else relax_tool(name, text, until_s).text
             for name, text in outline.tools}  # fmt: skip

    def with_tools(tools: Mapping[str, str]) -> Outline:
        return msgspec.structs.replace(outline, tools=tuple(tools.items()))

    if fits(with_tools(whole)):
        return with_tools(whole)
    free = [name for name in whole if name not in strict]
    tools = whole | {name: _without_multiples(whole[name]) for name in free}
    if tools != whole and fits(with_tools(tools)):
        NOTICES.warn(
            "the tools together are too complex for one grammar: multipleOf is not "
            "enforced in any schema"
        )
        return with_tools(tools)
    by_size = sorted(free, key=lambda name: len(tools[name]), reverse=True)

    def relax_largest(most: int) -> Outline:
        return with_tools(tools | dict.fromkeys(by_size[:most], ANYTHING))

    failing, fitting = 0, len(by_size)
    if not fits(relax_largest(fitting)):
        return with_tools(whole)
    while fitting - failing > 1:
        middle = (failing + fitting) // 2
        if fits(relax_largest(middle)):
            fitting = middle
        else:
            failing = middle
    names = one_printable_line(", ".join(by_size[:fitting]))
    NOTICES.warn(
        f"the tools together are too complex for one grammar: the schemas of {names} are not "
        "enforced at all"
    )
    return relax_largest(fitting)


def _without_multiples(text: str) -> str:
    """Remove every ``multipleOf`` from a schema; the product of all their values is bounded."""
    schema = json.loads(text)
    places = [place for place in schemas.keyword_places(schema) if place.keyword == "multipleOf"]
    return schemas.compact(schemas.without_keywords(schema, places)) if places else text


def find_obstacle(outline: Outline) -> tuple[str, str] | None:
    """Find a schema of an outline that does not compile; return its name and its keywords at fault.

    The name is a tool's, or "" for the answer's schema. The result is None if all schemas compile,
    or if the budget for trials is spent.
    """
    content = outline.content
    parts = [*outline.tools]
    if content is not None and content.kind == "json":
        parts.insert(0, ("", content.text))
    until_s = TRIAL.cpu_s + _MOST_TOTAL_CPU_S
    try:
        for name, text in parts:
            summary = relax(text, until_s).summary
            if TRIAL.cpu_s > until_s:
                break
            if summary:
                return name, summary
    except (GrammarBusyError, ValueError):
        pass  # ignored, since the caller has a better error already
    return None


class _TooCostlyError(Exception):
    """The trials of a schema exceeded their budget."""


def relax_tool(name: str, text: str, until_s: float = math.inf) -> Relaxed:
    """Relax the schema of a tool's arguments; log the removed places once.

    text: the result of `schemas.assertions`. until_s: see `relax`. If this machine cannot try
    schemas now, only keywords known to be unsupported are removed.
    """
    try:
        result = relax(text, until_s)
    except GrammarBusyError:
        schema = json.loads(text)
        places = schemas.unsupported_keywords(schema)
        return Relaxed.from_schema(schemas.without_keywords(schema, places), places)
    if result.left_out:
        NOTICES.warn(f"tool {name!r}: these parts of its schema are not enforced: {result.summary}")
    return result


def relax(text: str, until_s: float = math.inf) -> Relaxed:
    """Remove from a schema the keywords that cannot be enforced.

    until_s: value of `TRIAL.cpu_s` (s) at which the trials stop. If it is reached, the result is a
    schema that accepts any object; this result is not remembered, because other schemas may have
    spent the time. Raises `GrammarBusyError` if the machine cannot try schemas.
    """
    unconstrained = Relaxed(ANYTHING, (KeywordPlace((), ""),), 1)
    if len(text) > MOST_GRAMMAR_BYTES:
        return unconstrained  # the schema is too long to be sent
    if (known := _KNOWN.get(text)) is not None:
        return known
    try:
        result = _Search(until_s).relax(text)
    except (_TooCostlyError, RecursionError):
        if TRIAL.cpu_s > until_s:
            return unconstrained
        result = unconstrained
    _KNOWN.remember(text, result)
    return result


class _KnownSchemas:
    """The results of the most recently relaxed schemas. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: OrderedDict[str, Relaxed] = OrderedDict()  # the newest is last

    def get(self, text: str) -> Relaxed | None:
        with self._lock:
            if (known := self._results.get(text)) is not None:
                self._results.move_to_end(text)
            return known

    def remember(self, text: str, result: Relaxed) -> None:
        with self._lock:
            self._results[text] = result
            self._results.move_to_end(text)
            if len(self._results) > _MOST_REMEMBERED:
                self._results.popitem(last=False)


_KNOWN = _KnownSchemas()


class _Search:
    """The search in one schema; it stops when `TRIAL.cpu_s` reaches ``until_s``."""

    def __init__(self, until_s: float) -> None:
        self._trials = 0
        self._until_s = min(until_s, TRIAL.cpu_s + _MOST_CPU_S)

    def relax(self, text: str) -> Relaxed:
        if self._compiles(text):
            return Relaxed(text)
        schema = json.loads(text)
        left_out = schemas.unsupported_keywords(schema)
        schema = schemas.without_keywords(schema, left_out)
        if not self._passes(schema):
            schema, changed = schemas.normalize_types(schema)
            left_out += changed
            places = schemas.keyword_places(schema)
            passing = 0  # number of leading places that are known to compile
            while not self._passes(schema):
                passing = self._first_fault(schema, places, passing)
                wrong = _same_values(schema, places, passing)
                schema = schemas.without_keywords(schema, wrong)
                left_out += wrong
                removed = set(wrong)
                passing -= sum(place in removed for place in places[:passing])
                places = [place for place in places if place not in removed]
        return Relaxed.from_schema(schema, left_out)

    def _first_fault(self, schema: Any, places: list[KeywordPlace], passing: int) -> int:
        """Return the index of the first place with which the schema no longer compiles."""
        failing = len(places)
        while failing - passing > 1:
            middle = (passing + failing) // 2
            if self._passes(schemas.without_keywords(schema, places[middle:])):
                passing = middle
            else:
                failing = middle
        if failing == passing:  # no place is left that could be removed
            raise _TooCostlyError
        return passing

    def _passes(self, schema: Any) -> bool:
        return self._compiles(schemas.compact(schema))

    def _compiles(self, text: str) -> bool:
        self._trials += 1
        if self._trials > _MOST_TRIALS or TRIAL.cpu_s > self._until_s:
            raise _TooCostlyError
        try:
            TRIAL.attempt(Grammar("json", text))
        except GrammarBusyError:
            raise
        except GrammarError:
            return False
        return True


def _same_values(schema: Any, places: list[KeywordPlace], index: int) -> list[KeywordPlace]:
    """List the place at fault, and all other places with the same keyword and the same value."""

    def value_of(place: KeywordPlace) -> Any:
        return schemas.value_at(schema, (*place.path, place.keyword))

    fault = places[index]
    value = value_of(fault)
    if isinstance(value, dict | list | bool) or fault.keyword == "$ref":
        return [fault]
    return [
        place for place in places if place.keyword == fault.keyword and value_of(place) == value
    ]
