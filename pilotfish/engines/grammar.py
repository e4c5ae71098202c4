"""Constrain answers to a grammar: which tokens may follow, and which text must.

In:  a `Grammar` and a vocabulary. Out: a `Constraint`, which forbids tokens row by row.

The parser is llguidance. It sees the bytes that each token adds to a text, as this package decodes
it; control tokens are never text. An end token may follow where the text is complete, and nothing
else where it can go on no further; where one text only may follow, only that text's own tokens may.
What a hostile grammar costs is bounded: by a trial in a process of its own, and a budget for masks.
"""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pilotfish.engines.constraint import Constraint, short
from pilotfish.engines.errors import GrammarError
from pilotfish.engines.families.outline import KIND as TURN
from pilotfish.engines.families.outline import Controls, read_outline
from pilotfish.engines.families.outline import source as turn_source
from pilotfish.engines.trial import LIMIT_S, TOO_LONG, TRIAL, on_deep_stack, too_costly
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
_KEPT = 256  # verdicts of trials
# An automaton has a state for each remainder, of several divisors for each of their product: some
# 50 ms to compile at this one, 11 s at a hundred times as many, and nothing bounds it.
_DIVISORS = 10_000
NO_CONTROLS = Controls({})
_CONTROL = b"\xff"  # for llguidance, what begins so is no text
# In Lark: schemas and divisors, which are not bounded there; attributes that cannot be rolled back;
# %ignore, under which what is allowed depends on what was asked before; control tokens.
_REFUSED = re.compile(r"%(json|regex|ignore)|\b(max_tokens|stop|temperature)\s*=|<[\[|]|‹")


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
        data = text.encode()
        if b"".join(self.tokens[id] for id in ids) == data:
            return ids
        return self._spelled(data)

    def _spelled(self, data: bytes) -> list[int]:
        """Put together a text that the tokenizer would change (NFC, NFKC), as far as that can be.

        The longest token goes first.
        """
        ids: list[int] = []
        at = 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            end = next((end for end in ends if data[at:end] in self._by_bytes), None)
            if end is None:
                break
            ids.append(self._by_bytes[data[at:end]])
            at = end
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {data: id for id, data in enumerate(self.tokens) if data[:1] != _CONTROL}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes), default=0)


class Grammars:
    """Compiles grammars for one vocabulary. Thread-safe.

    Each generation has a parser of its own: what parsers share grows with what each of them has
    seen, and ends all of them at a limit. vocab_size: of the rows to constrain. ends: the tokens
    that end an answer.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, ends: Sequence[int]) -> None:
        self._vocabulary = tokenizer, vocab_size, list(ends)
        special = tokenizer.special_tokens
        self._controls = Controls({token.content: id for id, token in special.items()})
        self._lock = threading.Lock()
        self._words: LLTokenizer | None = None
        self._tried: OrderedDict[Grammar, str] = OrderedDict()  # and what is wrong with them

    def warm(self) -> None:
        """Read the vocabulary, which takes about a second; `constraint` does so if need be."""
        with self._lock:
            self._read()
        TRIAL.warm()

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
            compiled(Grammar("json", '{"type": "object"}'), self._words).compute_bitmask()
        return self._words

    def constraint(self, grammar: Grammar) -> Constraint:
        """Make the constraint of one generation; `GrammarError` says what is wrong with it."""
        with self._lock:
            words = self._read()
            self._try(grammar)
        _, size, ends = self._vocabulary
        begun_s = time.monotonic()
        parser = partial(compiled, grammar, words, self._controls)
        made = Constraint(partial(on_deep_stack, parser), size, ends)
        if time.monotonic() - begun_s > LIMIT_S:  # more than in the trial
            self._note(grammar, TOO_LONG)
            raise too_costly(TOO_LONG)
        return made

    def _try(self, grammar: Grammar) -> None:
        """Try a grammar, unless it is one of the last that were."""
        wrong = self._tried.pop(grammar, None)
        if wrong is None:
            if len(grammar.text.encode("utf-8", "replace")) > MOST_BYTES:
                raise GrammarError(f"The grammar is longer than {MOST_BYTES:,} bytes.")
            wrong = ""
            try:
                TRIAL.attempt(grammar)
            except GrammarError as error:
                self._note(grammar, str(error))
                raise
        self._note(grammar, wrong)
        if wrong:
            raise GrammarError(wrong)

    def _note(self, grammar: Grammar, wrong: str) -> None:
        self._tried[grammar] = wrong  # the newest is last
        if len(self._tried) > _KEPT:
            self._tried.popitem(last=False)


def compiled(
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


def _source(grammar: Grammar) -> str:
    """Write a grammar as llguidance takes it."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(grammar.text, defaults=_JSON)
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
