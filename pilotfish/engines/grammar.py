"""Constrain answers to a grammar: which tokens may follow, and which text must.

In:  a `Grammar` and a vocabulary. Out: a `GrammarConstraint`, which forbids tokens row by row.

The parser is llguidance. It sees the bytes that each token adds to a text, as this package decodes
it; control tokens are never text. An end token may follow where the text is complete, and nothing
else where it can go on no further; where one text only may follow, only that text's own tokens may.
What a hostile grammar costs is bounded: by a trial in a process of its own, and a budget for masks.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pilotfish.engines.chat_formats.outline import Controls
from pilotfish.engines.compiling import compile_grammar, on_deep_stack
from pilotfish.engines.constraint import GrammarConstraint
from pilotfish.engines.engine_errors import GrammarError
from pilotfish.engines.grammar_trial import TOO_LONG, TRIAL
from pilotfish.speculation.logits_options import Grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from pilotfish.engines.tokenizer import Tokenizer

MOST_BYTES = 64 * 1024
_KEPT = 256  # verdicts of trials
_MOST_CPU_S = 1.0  # of a processor, to compile what has passed a trial
_CONTROL = b"\xff"  # for llguidance, what begins so is no text


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
        self._tried: OrderedDict[Grammar, str] = (
            OrderedDict()
        )  # verdicts: what is wrong; "": nothing

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
            compile_grammar(Grammar("json", '{"type": "object"}'), self._words).compute_bitmask()
        return self._words

    def refusal(self, grammar: Grammar) -> str:
        """Return what is wrong with a grammar that was tried before; "": nothing is known."""
        with self._lock:
            return self._tried.get(grammar, "")

    def constraint(self, grammar: Grammar, *, spared: bool = False) -> GrammarConstraint:
        """Make the constraint of one generation; `GrammarError` says what is wrong with it.

        `GrammarBusyError` says what is wrong with the machine. spared: with a spare parser, so that
        none has to be made where others wait for it.
        """
        with self._lock:
            words = self._read()
        self.attempt(grammar)
        _, size, ends = self._vocabulary
        parser = partial(compile_grammar, grammar, words, self._controls)
        made = GrammarConstraint(partial(on_deep_stack, parser), size, ends)
        if made.cpu_s > _MOST_CPU_S:  # more than in the trial
            self._note(grammar, TOO_LONG)
            error = GrammarError(TOO_LONG)
            error.costly = True
            raise error
        if spared:
            made.spare()
        return made

    def attempt(self, grammar: Grammar) -> None:
        """Try a grammar, unless it is one of the last that were; raises as `constraint` does."""
        with self._lock:
            wrong = self._tried.get(grammar)
        if wrong is None:
            if len(grammar.text.encode("utf-8", "replace")) > MOST_BYTES:
                raise GrammarError(f"The grammar is longer than {MOST_BYTES:,} bytes.")
            wrong = ""
            try:
                TRIAL.attempt(grammar)
            except GrammarError as error:
                if error.lasting:
                    self._note(grammar, str(error))
                raise
        self._note(grammar, wrong)
        if wrong:
            raise GrammarError(wrong)

    def _note(self, grammar: Grammar, wrong: str) -> None:
        """Keep the verdict of a trial, which must be the grammar's own doing."""
        with self._lock:
            self._tried.pop(grammar, None)
            self._tried[grammar] = wrong  # the newest is last
            if len(self._tried) > _KEPT:
                self._tried.popitem(last=False)
