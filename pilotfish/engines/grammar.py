"""Constrain answers to a grammar: which tokens may follow, and which text must.

In:  a `Grammar` and a vocabulary. Out: a `Constraint`, which forbids tokens row by row.

The parser is llguidance. It sees the bytes that each token adds to a text, as this package decodes
it; control tokens are never text. An end token may follow where the text is complete, and nothing
else where it can go on no further; where one text only may follow, only that text's own tokens may.
Limits bound what a hostile grammar costs: 0.25 s to compile, and a budget for masks.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from pilotfish.engines.constraint import Constraint, short
from pilotfish.engines.errors import GrammarError
from pilotfish.speculation.shaping import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from pilotfish.engines.tokenizer import Tokenizer

# JSON in one line, as models write it; a space that may be anywhere would leave nothing forced, and
# small models never end some
_JSON: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
MOST_BYTES = 64 * 1024
_KEPT = 64  # compiled grammars
# An automaton has a state for each remainder, of several divisors for each of their product: some
# 50 ms to compile at this one, 11 s at a hundred times as many, and nothing bounds it.
_DIVISORS = 10_000
_CONTROL = b"\xff"  # for llguidance, what begins so is no text
# In Lark: schemas and divisors, which are not bounded there; attributes that cannot be rolled back;
# %ignore, under which what is allowed depends on what was asked before.
_REFUSED = re.compile(r"%(json|regex|ignore)|\b(max_tokens|stop|temperature)\s*=")
# Rules of 64 KiB refer to each other some 10,000 deep, and take 4 KiB of stack at each step.
_STACK = 256 * 1024 * 1024
_COMPILING_S = 0.25  # at most; a thread that takes longer is left alone


class _Words:
    """A vocabulary as llguidance reads it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: "Tokenizer", size: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = ends[0]
        self.special_token_ids = [id for id in range(size) if tokenizer.is_special(id)]
        control = {*self.special_token_ids, *ends}
        self.tokens = [
            _CONTROL + tokenizer.piece(id).encode() if id in control else tokenizer.token_bytes(id)
            for id in range(size)
        ]

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode_rest(text).ids
        return ids


class Grammars:
    """Compiles grammars for one vocabulary, and keeps the last ones. Thread-safe.

    vocab_size: of the rows to constrain. ends: the tokens that end an answer.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, ends: Sequence[int]) -> None:
        self._vocabulary = tokenizer, vocab_size, list(ends)
        self._lock = threading.Lock()
        self._words: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._compiling: threading.Thread | None = None  # what takes too long

    def warm(self) -> None:
        """Read the vocabulary, which takes about a second; `constraint` does so if need be."""
        with self._lock:
            self._read()

    def _read(self) -> "LLTokenizer":
        if self._words is None:
            tokenizer, size, ends = self._vocabulary
            if not ends:
                raise GrammarError("A model without an end token cannot end a constrained answer.")
            try:
                from llguidance import LLTokenizer
            except ImportError as error:
                raise GrammarError("This end lacks llguidance: pip install llguidance.") from error

            words: Any = _Words(tokenizer, size, ends)
            self._words = LLTokenizer(words, n_vocab=size, eos_token=ends)
            # the first mask of all takes as long as reading the vocabulary
            self._compile(Grammar("json", '{"type": "object"}'), self._words).compute_bitmask()
        return self._words

    def constraint(self, grammar: Grammar) -> "Constraint":
        """Make the constraint of one generation; `GrammarError` says what is wrong with it."""
        with self._lock:
            words = self._read()
            matcher = self._compiled.pop(grammar, None)
            if matcher is None:
                matcher = self._compiled_apart(grammar, words)
            self._compiled[grammar] = matcher  # the newest is last
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            _, size, ends = self._vocabulary
            return Constraint(matcher, size, ends)

    def _compiled_apart(self, grammar: Grammar, words: "LLTokenizer") -> "LLMatcher":
        """Compile with a stack that is deep enough, and for `_COMPILING_S` at most."""
        if len(grammar.text.encode("utf-8", "replace")) > MOST_BYTES:
            raise GrammarError(f"The grammar is longer than {MOST_BYTES:,} bytes.")
        if self._compiling is not None and self._compiling.is_alive():
            raise GrammarError("Another grammar is still being compiled; try again later.")
        found: list[LLMatcher | BaseException] = []

        def work() -> None:
            try:
                found.append(self._compile(grammar, words))
            except BaseException as error:
                found.append(error)

        usual = threading.stack_size(_STACK)
        try:
            self._compiling = threading.Thread(target=work, name="grammar", daemon=True)
            self._compiling.start()
        finally:
            threading.stack_size(usual)
        self._compiling.join(_COMPILING_S)
        if not found:
            raise GrammarError("The grammar takes too long to compile.")
        self._compiling = None
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    @staticmethod
    def _compile(grammar: Grammar, words: "LLTokenizer") -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        try:
            match grammar.kind:
                case "json":
                    _expect_small_divisors(grammar.text)
                    source = LLMatcher.grammar_from_json_schema(grammar.text, defaults=_JSON)
                case "regex":
                    source = LLMatcher.grammar_from_regex(grammar.text)
                case "lark":
                    if (found := _REFUSED.search(grammar.text)) is not None:
                        raise GrammarError(f"A Lark grammar cannot have {found[0]} here.")
                    source = LLMatcher.grammar_from_lark(grammar.text)
                case _:
                    raise GrammarError(f"There is no kind of grammar {grammar.kind!r}.")
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"The schema is no JSON: {short(error)}.") from error
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
            raise GrammarError(f"The grammar cannot be used: {short(matcher.get_error())}")
        return matcher


def _divisor(told: object) -> int:
    """The whole number that an automaton counts by for this ``multipleOf``, 1 at least."""
    if not isinstance(told, int | float):
        return 1  # a property of this name
    if not 0 < told <= _DIVISORS:
        return _DIVISORS + 1
    digits, exponent = Decimal(str(told)).normalize().as_tuple()[1:]
    found: int = int("".join(map(str, digits))) * 10 ** max(0, int(exponent))
    return max(1, found)


def _expect_small_divisors(schema: str) -> None:
    """Raise `GrammarError` where the schema's ``multipleOf`` multiply to more than `_DIVISORS`."""
    product, waiting = 1, [json.loads(schema)]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            product *= _divisor(one.get("multipleOf", 1))
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        if product > _DIVISORS:
            raise GrammarError(f"The schema's multipleOf multiply to more than {_DIVISORS:,}.")
