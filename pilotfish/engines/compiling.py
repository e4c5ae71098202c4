"""Compile a grammar with llguidance; before that, refuse schemas that need a huge automaton.

In:  a `Grammar` and llguidance's view of a vocabulary. Out: a matcher, or a `GrammarError`.
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

# Format of JSON answers: one line, as models write it. If spaces were optional, no text would be
# forced, and small models could write spaces without end.
_JSON: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
# Maximum product of all ``multipleOf`` values in a schema. Each ``multipleOf`` needs an automaton
# state per remainder, and the numbers of states multiply. Compilation takes about 50 ms at this
# bound, and 11 s at a hundred times this bound. llguidance itself has no bound.
_MOST_DIVISORS = 10_000
NO_CONTROLS = Controls({})
# Lark constructs that are refused: JSON schemas and regexes (%json, %regex), because they would
# bypass the bounds; attributes that the parser cannot roll back; %ignore, because its masks depend
# on earlier queries; control tokens.
_REFUSED = re.compile(r"%(json|regex|ignore)|\b(max_tokens|stop|temperature)\s*=|<[\[|]|‹")
# Stack of the compiling thread: a grammar of 64 KiB can nest some 10,000 levels deep, and a level
# takes some 4 KiB.
_STACK_BYTES = 256 * 1024 * 1024
_STACK_SIZE_LOCK = threading.Lock()
T = TypeVar("T")


def compile_grammar(
    grammar: Grammar, tokenizer: "LLTokenizer", controls: Controls = NO_CONTROLS
) -> "LLMatcher":
    """Compile a grammar over a vocabulary; raise `GrammarError` if the grammar is at fault.

    controls: control tokens of the vocabulary.
    """
    from llguidance import LLMatcher, LLParserLimits

    try:
        if grammar.kind == TURN:
            outline = read_outline(grammar.text)
            _check_divisors(outline.schemas())
            source = turn_source(outline, controls, _plain_source)
        else:
            _check_divisors([grammar.text] if grammar.kind == "json" else ())
            source = _plain_source(grammar)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"The schema is not valid JSON: {one_printable_line(error)}.") from error
    # An enum of 500 words takes 100,000 units of initial_lexer_fuel. The other limits are a quarter
    # of llguidance's defaults.
    limits = LLParserLimits(
        initial_lexer_fuel=400_000,
        step_lexer_fuel=50_000,
        step_max_items=12_500,
        max_lexer_states=50_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(f"The grammar cannot be used: {one_printable_line(matcher.get_error())}")
    return matcher


def _plain_source(grammar: Grammar) -> str:
    """Write the llguidance source of a JSON, regex or Lark grammar."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(assertions(grammar.text), defaults=_JSON)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            if (match := _REFUSED.search(grammar.text)) is not None:
                raise GrammarError(f"A Lark grammar must not contain {match[0]}.")
            return LLMatcher.grammar_from_lark(grammar.text)
    raise GrammarError(f"The kind of grammar {grammar.kind!r} is not known.")


def _divisor(value: object) -> int:
    """Return the factor by which this ``multipleOf`` multiplies the automaton's states.

    The factor is at least 1.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 1  # multipleOf is, in this place, a property's name
    if not 0 < value <= _MOST_DIVISORS:
        return _MOST_DIVISORS + 1
    digits, exponent = Decimal(str(value)).normalize().as_tuple()[1:]
    divisor: int = int("".join(map(str, digits))) * 10 ** max(0, int(exponent))
    return max(1, divisor)


def _check_divisors(schemas: Iterable[str]) -> None:
    """Raise `GrammarError` if the product of all ``multipleOf`` exceeds `_MOST_DIVISORS`."""
    product, waiting = 1, [json.loads(schema) for schema in schemas]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            product *= _divisor(node.get("multipleOf", 1))
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
        if product > _MOST_DIVISORS:
            raise GrammarError(
                f"The product of all multipleOf values in the schema exceeds {_MOST_DIVISORS:,}."
            )


def on_deep_stack(work: Callable[[], T]) -> tuple[T, float]:
    """Call `work` on a thread with a large stack; return the result and the thread's CPU seconds.

    Raise any error of `work`, or `GrammarBusyError` if the thread cannot start.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    spent_s = 0.0

    def run() -> None:
        nonlocal spent_s
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        spent_s = time.thread_time()

    # stack_size is global: another thread that starts now would also get the large stack.
    with _STACK_SIZE_LOCK:
        usual = threading.stack_size(_STACK_BYTES)
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
    if errors:
        raise errors[0]
    return results[0], spent_s
