"""Relax the schema of a tool's arguments, so that what cannot be enforced refuses no request.

In:  a JSON schema. Out: one that compiles, and what was left out of it. It permits no less: a
     keyword is left out where it stands, and all else stays.

What cannot be enforced is found by trial, without knowing the parser's reasons: of the places of a
schema, in an order in which each needs only earlier ones, the shortest beginning that does not
compile ends with the place at fault.
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
from pilotfish.engines.grammar import MOST_BYTES
from pilotfish.engines.grammar_trial import TRIAL
from pilotfish.engines.notices import NOTICES
from pilotfish.engines.schemas import KeywordPlace
from pilotfish.speculation.logits_options import Grammar

ANYTHING = '{"type":"object"}'
_KEPT = 256  # schemas; an agent sends the same ones with each request
_MOST_TRIALS = 128
_MOST_CPU_S = 1.0  # of a processor, for the trials of one schema
_MOST_TOGETHER_S = 2.0  # for those of all schemas of an answer
_NAMED = 3  # places in a message
_LISTED = 16  # places that are kept


class Relaxed(NamedTuple):
    """A schema that compiles. left_out: the first places that it lacks; total: how many."""

    text: str
    left_out: tuple[KeywordPlace, ...] = ()
    total: int = 0

    @classmethod
    def from_schema(cls, schema: Any, left_out: Sequence[KeywordPlace]) -> "Relaxed":
        """Write a schema, and note what was left out of it."""
        return cls(schemas.compact(schema), tuple(left_out[:_LISTED]), len(left_out))

    @property
    def summary(self) -> str:
        """What was left out, in words."""
        if not self.left_out:
            return ""
        named = ", ".join(one_printable_line(place) for place in self.left_out[:_NAMED])
        more = self.total - _NAMED
        return f"{named} and {more} more" if more > 0 else named


def with_relaxed_tools(
    outline: Outline, strict: Collection[str], fits: Callable[[Outline], bool]
) -> Outline:
    """Relax the tools of an outline that are not strict, each, and all of them until it fits.

    strict: their names. fits: whether an outline can be sent, and compiles. What several tools
    cannot have together goes first, then all of the largest schemas.
    """
    until_s = TRIAL.cpu_s + _MOST_TOGETHER_S
    whole = {name: text if name in strict else relax_tool(name, text, until_s).text
             for name, text in outline.tools}  # fmt: skip

    def offering(tools: Mapping[str, str]) -> Outline:
        return msgspec.structs.replace(outline, tools=tuple(tools.items()))

    if fits(offering(whole)):
        return offering(whole)
    free = [name for name in whole if name not in strict]
    tools = whole | {name: _without_multiples(whole[name]) for name in free}
    if tools != whole and fits(offering(tools)):
        NOTICES.warn("the tools are too much for one grammar: no multipleOf is enforced")
        return offering(tools)
    by_size = sorted(free, key=lambda name: len(tools[name]), reverse=True)

    def loosened(most: int) -> Outline:
        return offering(tools | dict.fromkeys(by_size[:most], ANYTHING))

    failing, fitting = 0, len(by_size)
    if not fits(loosened(fitting)):
        return offering(whole)
    while fitting - failing > 1:
        middle = (failing + fitting) // 2
        if fits(loosened(middle)):
            fitting = middle
        else:
            failing = middle
    names = one_printable_line(", ".join(by_size[:fitting]))
    NOTICES.warn(
        f"the tools are too much for one grammar: nothing is enforced of the schemas of {names}"
    )
    return loosened(fitting)


def _without_multiples(text: str) -> str:
    """Leave ``multipleOf`` out of a schema: what all of them multiply to is bounded."""
    schema = json.loads(text)
    places = [place for place in schemas.keyword_places(schema) if place.keyword == "multipleOf"]
    return schemas.compact(schemas.without_keywords(schema, places)) if places else text


def find_obstacle(outline: Outline) -> tuple[str, str] | None:
    """Return what in an outline's schemas does not compile: whose schema, and which keywords.

    Whose: a tool's name, or "" for the form of the answer. None: all of them do, or no more can be
    tried now.
    """
    content = outline.content
    parts = [*outline.tools]
    if content is not None and content.kind == "json":
        parts.insert(0, ("", content.text))
    until_s = TRIAL.cpu_s + _MOST_TOGETHER_S
    try:
        for name, text in parts:
            summary = relax(text, until_s).summary
            if TRIAL.cpu_s > until_s:
                break
            if summary:
                return name, summary
    except (GrammarBusyError, ValueError):
        pass  # the error that has come says what there is to say
    return None


class _TooCostlyError(Exception):
    """The trials of a schema have taken what they may."""


def relax_tool(name: str, text: str, until_s: float = math.inf) -> Relaxed:
    """Relax the schema of a tool's arguments; what was left out is logged once.

    text: the schema's `assertions`. until_s: see `relax`. Where this machine cannot try schemas
    now, only what is known to be lacking is left out.
    """
    try:
        result = relax(text, until_s)
    except GrammarBusyError:
        schema = json.loads(text)
        places = schemas.unsupported_keywords(schema)
        return Relaxed.from_schema(schemas.without_keywords(schema, places), places)
    if result.left_out:
        NOTICES.warn(f"tool {name!r}: not enforced of its schema: {result.summary}")
    return result


def relax(text: str, until_s: float = math.inf) -> Relaxed:
    """Leave out of a schema what cannot be enforced; `GrammarBusyError` if nothing can be tried.

    until_s: of `TRIAL.cpu_s`. All is left out of a schema whose trials would go beyond it; what
    other schemas have taken is not held against this one the next time.
    """
    nothing = Relaxed(ANYTHING, (KeywordPlace((), ""),), 1)
    if len(text) > MOST_BYTES:
        return nothing  # it could not be sent
    if (known := _KNOWN.get(text)) is not None:
        return known
    try:
        result = _Search(until_s).result(text)
    except (_TooCostlyError, RecursionError):
        if TRIAL.cpu_s > until_s:
            return nothing
        result = nothing
    _KNOWN.keep(text, result)
    return result


class _KnownSchemas:
    """The last schemas that were relaxed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: OrderedDict[str, Relaxed] = OrderedDict()  # the newest is last

    def get(self, text: str) -> Relaxed | None:
        with self._lock:
            if (known := self._results.get(text)) is not None:
                self._results.move_to_end(text)
            return known

    def keep(self, text: str, result: Relaxed) -> None:
        with self._lock:
            self._results[text] = result
            self._results.move_to_end(text)
            if len(self._results) > _KEPT:
                self._results.popitem(last=False)


_KNOWN = _KnownSchemas()


class _Search:
    """The trials of one schema, while `TRIAL.cpu_s` is no more than ``until_s``."""

    def __init__(self, until_s: float) -> None:
        self._trials = 0
        self._until_s = min(until_s, TRIAL.cpu_s + _MOST_CPU_S)

    def result(self, text: str) -> Relaxed:
        if self._compiles(text):
            return Relaxed(text)
        schema = json.loads(text)
        left_out = schemas.unsupported_keywords(schema)
        schema = schemas.without_keywords(schema, left_out)
        if not self._passes(schema):
            schema, changed = schemas.normalize_types(schema)
            left_out += changed
            places = schemas.keyword_places(schema)
            passing = 0  # so many of the first are known to compile
            while not self._passes(schema):
                passing = self._fault(schema, places, passing)
                wrong = _alike(schema, places, passing)
                schema = schemas.without_keywords(schema, wrong)
                left_out += wrong
                gone = set(wrong)
                passing -= sum(place in gone for place in places[:passing])
                places = [place for place in places if place not in gone]
        return Relaxed.from_schema(schema, left_out)

    def _fault(self, schema: Any, places: list[KeywordPlace], passing: int) -> int:
        """Return the index of the place with which a beginning of them compiles no more."""
        failing = len(places)
        while failing - passing > 1:
            middle = (passing + failing) // 2
            if self._passes(schemas.without_keywords(schema, places[middle:])):
                passing = middle
            else:
                failing = middle
        if failing == passing:  # nothing is left to leave out
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


def _alike(schema: Any, places: list[KeywordPlace], at: int) -> list[KeywordPlace]:
    """List the place at fault, and those that say just the same elsewhere."""

    def said(place: KeywordPlace) -> Any:
        return schemas.value_at(schema, (*place.path, place.keyword))

    fault = places[at]
    value = said(fault)
    if isinstance(value, dict | list | bool) or fault.keyword == "$ref":
        return [fault]
    return [one for one in places if one.keyword == fault.keyword and said(one) == value]
