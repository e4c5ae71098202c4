"""Constrain answers to a grammar: which tokens may follow, and which text must.

In:  a `Grammar` and a vocabulary. Out: a `Constraint`, which forbids tokens row by row.

The parser is llguidance. It sees the bytes that each token adds to a text, as this package decodes
it; control tokens are never text. An end token may follow where the text is complete, and nothing
else where it can go on no further; where one text only may follow, only that text's own tokens may.
Limits bound what a hostile grammar costs: some 0.1 s to compile, some milliseconds a row.
"""

import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.errors import GrammarError
from pilotfish.speculation.distributions import Floats
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
_KEPT = 64  # compiled grammars
# An automaton has a state for each remainder, of several divisors for each of their product: some
# 50 ms to compile at this one, 11 s at a hundred times as many, and nothing bounds it.
_DIVISORS = 10_000
_MESSAGE = 300  # characters of the library's own words
_CONTROL = b"\xff"  # for llguidance, what begins so is no text
_EMBEDDED = re.compile("%(json|regex)")
_DEAD_END = "No token of this vocabulary continues what the grammar allows."


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
        return self._tokenizer.encode(text)


class Grammars:
    """Compiles grammars for one vocabulary, and keeps the last ones. Thread-safe.

    vocab_size: of the rows to constrain. ends: the tokens that end an answer.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, ends: Sequence[int]) -> None:
        self._vocabulary = tokenizer, vocab_size, list(ends)
        self._lock = threading.Lock()
        self._words: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def warm(self) -> None:
        """Read the vocabulary, which takes about a second; `constraint` does so if need be."""
        with self._lock:
            self._read()

    def _read(self) -> "LLTokenizer":
        if self._words is None:
            tokenizer, size, ends = self._vocabulary
            if not ends:
                raise GrammarError("A model without an end token cannot end a constrained answer.")
            from llguidance import LLTokenizer

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
                matcher = self._compile(grammar, words)
            self._compiled[grammar] = matcher  # the newest is last
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            _, size, ends = self._vocabulary
            return Constraint(matcher.deep_copy(), size, ends)

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
                    if _EMBEDDED.search(grammar.text):
                        raise GrammarError("A Lark grammar cannot hold %json or %regex.")
                    source = LLMatcher.grammar_from_lark(grammar.text)
                case _:
                    raise GrammarError(f"There is no kind of grammar {grammar.kind!r}.")
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"The schema is no JSON: {_short(error)}.") from error
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
            raise GrammarError(f"The grammar cannot be used: {_short(matcher.get_error())}")
        return matcher


class Constraint:
    """Forbids what a grammar does not allow, in one generation. One thread at a time."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = frozenset(ends)
        # what the matcher has read
        self._answer = np.empty(0, np.uint32)
        self._path: list[int] = []

    def forbid(
        self, logits: Floats, answer: NDArray[np.uint32], paths: Sequence[Sequence[int]]
    ) -> None:
        """Set to −∞, in place, what must not follow.

        logits: [n, V]. answer: u32 [m], which all rows continue; paths: of each row, the tokens
        behind it. A row that the grammar cannot reach stays as it is: the row before its first
        forbidden token rejects that. Raises `GrammarError` where the parser gives up, or the answer
        itself is not of the grammar.
        """
        if self._read_answer(answer):
            for row, path in zip(logits, paths, strict=True):
                if self._read_path(path):
                    np.copyto(row, -np.inf, where=~self._allowed())

    def forced(self, answer: NDArray[np.uint32], path: Sequence[int]) -> list[int]:
        """Return the tokens of the only text that may follow, the next one first.

        Of these the last ones are missing if what comes behind them may make them longer.
        """
        if not (self._read_answer(answer) and self._read_path(path)):
            return []
        return [token for token in self._matcher.compute_ff_tokens() if token not in self._ends]

    def _read_answer(self, answer: NDArray[np.uint32]) -> bool:
        """Bring the matcher behind the answer, u32 [m]; False behind its end token."""
        if len(answer) and int(answer[-1]) in self._ends:
            return False
        if not np.array_equal(answer, self._answer):
            self._read_path(())
            held = min(len(answer), len(self._answer))
            differ = np.flatnonzero(answer[:held] != self._answer[:held])
            common = int(differ[0]) if len(differ) else held
            self._matcher.rollback(len(self._answer) - common)
            rest = answer[common:].tolist()
            read = self._matcher.try_consume_tokens(rest)
            self._answer = answer[: common + read].copy()
            self._check()
            if read < len(rest):
                raise GrammarError("What the answer says so far is not of the grammar.")
        return True

    def _read_path(self, path: Sequence[int]) -> bool:
        """Bring it behind the answer and these tokens; False if the grammar does not allow them."""
        pairs = enumerate(zip(self._path, path, strict=False))
        shorter = min(len(self._path), len(path))
        common = next((at for at, (held, token) in pairs if held != token), shorter)
        if common < len(self._path):
            self._matcher.rollback(len(self._path) - common)
        rest = list(path[common:])
        end = next((at for at, token in enumerate(rest) if token in self._ends), len(rest))
        read = self._matcher.try_consume_tokens(rest[:end]) if end else 0
        self._path = list(path[: common + read])
        self._check()
        return read == len(rest)

    def _allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may follow, [V]; `GrammarError` if none may."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        found = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not found.any():
            raise GrammarError(_DEAD_END)
        return found

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        why = self._matcher.get_error()
        dead_end = why.startswith("NoExtension")
        raise GrammarError(_DEAD_END if dead_end else f"The grammar is too complex: {_short(why)}")


def _expect_small_divisors(schema: str) -> None:
    """Raise `GrammarError` where the schema's ``multipleOf`` multiply to more than `_DIVISORS`."""
    product, waiting = 1, [json.loads(schema)]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            divisor = one.get("multipleOf")
            if isinstance(divisor, int | float) and math.isfinite(divisor):
                told = Decimal(str(divisor)).normalize().as_tuple()
                exponent = min(9, max(0, int(told.exponent)))
                product *= int("".join(map(str, told.digits))) * 10**exponent
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        if product > _DIVISORS:
            raise GrammarError(f"The schema's multipleOf multiply to more than {_DIVISORS:,}.")


def _short(said: object) -> str:
    """The library's words in one line."""
    return " ".join(str(said).split())[:_MESSAGE]
