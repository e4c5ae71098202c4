"""Compile a grammar with llguidance, after a look at what would explode there.

In:  a `Grammar` and a vocabulary as llguidance reads it. Out: a matcher, or a `GrammarError`.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import TYPE_CHECKING, TypeVar

from pilotfish.engines.chat_formats.outline import KIND as TURN
from pilotfish.engines.chat_formats.outline import Controls, read_outline
from pilotfish.engines.chat_formats.outline import llguidance_source as turn_source
from pilotfish.engines.constraint import one_printable_line
from pilotfish.engines.engine_errors import GrammarBusyError, GrammarError
from pilotfish.engines.schemas import assertions
from pilotfish.speculation.logits_options import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

# JSON in one line, as models write it; a space that may be anywhere would leave nothing forced, and
# small models never end some
_JSON: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
# An automaton has a state for each remainder, of several divisors for each of their product: some
# 50 ms to compile at this one, 11 s at a hundred times as many, and nothing bounds it.
_DIVISORS = 10_000
NO_CONTROLS = Controls({})
# In Lark: schemas and divisors, which are not bounded there; attributes that cannot be rolled back;
# %ignore, under which what is allowed depends on what was asked before; control tokens.
_REFUSED = re.compile(r"%(json|regex|ignore)|\b(max_tokens|stop|temperature)\s*=|<[\[|]|‹")
# Rules of 64 KiB refer to each other some 10,000 deep, and take 4 KiB of stack at each step.
_STACK = 256 * 1024 * 1024
_STACK_SIZE = threading.Lock()
T = TypeVar("T")


def compile_grammar(
    grammar: Grammar, words: "LLTokenizer", controls: Controls = NO_CONTROLS
) -> "LLMatcher":
    """Compile a grammar over a vocabulary; `GrammarError` says what is wrong with it.

    controls: its control tokens.
    """
    from llguidance import LLMatcher, LLParserLimits

    try:
        if grammar.kind == TURN:
            outline = read_outline(grammar.text)
            _expect_small_divisors(outline.schemas())
            source = turn_source(outline, controls, _source)
        else:
            _expect_small_divisors([grammar.text] if grammar.kind == "json" else ())
            source = _source(grammar)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"The schema is no JSON: {one_printable_line(error)}.") from error
    # An enum of 500 words takes 100,000 of the first; the others are a quarter of the usual.
    limits = LLParserLimits(
        initial_lexer_fuel=400_000,
        step_lexer_fuel=50_000,
        step_max_items=12_500,
        max_lexer_states=50_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )
    matcher = LLMatcher(words, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(f"The grammar cannot be used: {one_printable_line(matcher.get_error())}")
    return matcher


def _source(grammar: Grammar) -> str:
    """Write a grammar as llguidance takes it."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(assertions(grammar.text), defaults=_JSON)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            if (found := _REFUSED.search(grammar.text)) is not None:
                raise GrammarError(f"A Lark grammar cannot have {found[0]} here.")
            return LLMatcher.grammar_from_lark(grammar.text)
    raise GrammarError(f"There is no kind of grammar {grammar.kind!r}.")


def _divisor(told: object) -> int:
    """The whole number that an automaton counts by for this ``multipleOf``, 1 at least."""
    if not isinstance(told, int | float) or isinstance(told, bool):
        return 1  # a property of this name
    if not 0 < told <= _DIVISORS:
        return _DIVISORS + 1
    digits, exponent = Decimal(str(told)).normalize().as_tuple()[1:]
    found: int = int("".join(map(str, digits))) * 10 ** max(0, int(exponent))
    return max(1, found)


def _expect_small_divisors(schemas: Iterable[str]) -> None:
    """Raise `GrammarError` where the schemas' ``multipleOf`` multiply to more than `_DIVISORS`."""
    product, waiting = 1, [json.loads(schema) for schema in schemas]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            product *= _divisor(one.get("multipleOf", 1))
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        if product > _DIVISORS:
            raise GrammarError(f"The schema's multipleOf multiply to more than {_DIVISORS:,}.")


def on_deep_stack(work: Callable[[], T]) -> tuple[T, float]:
    """Do something that may recurse deeply; returns its result and its seconds of a processor.

    Raises its error, or `GrammarBusyError` where there is no memory for such a stack.
    """
    found: list[T] = []
    failed: list[BaseException] = []
    spent_s = 0.0

    def run() -> None:
        nonlocal spent_s
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)
        spent_s = time.thread_time()

    with _STACK_SIZE:  # it is the process's: another thread that starts now would have it, too
        usual = threading.stack_size(_STACK)
        try:
            thread = threading.Thread(target=run, name="grammar", daemon=True)
            thread.start()
        except RuntimeError as error:
            raise GrammarBusyError(
                "This machine has no memory or no threads left to compile a grammar: try again "
                "later."
            ) from error
        finally:
            threading.stack_size(usual)
    thread.join()
    if failed:
        raise failed[0]
    return found[0], spent_s
