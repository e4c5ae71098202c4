"""Compile grammars over a model's vocabulary, to constrain answers.

In:  a `Grammar` and a vocabulary. Out: a `GrammarConstraint`, which forbids tokens row by row.

The parser is llguidance. It sees each token as the bytes that the token adds to a text; control
tokens are never text. An end token is allowed where the text may be complete; only an end token is
allowed where the text cannot continue. Where only one text may follow, only the tokens of its usual
encoding are allowed. Two bounds limit the cost of a hostile grammar: a trial in a separate process,
and a CPU budget for masks.
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

MOST_GRAMMAR_BYTES = 64 * 1024
_MOST_VERDICTS = 256  # maximum number of trial results that are remembered
_MOST_CPU_S = 1.0  # maximum CPU seconds for compiling a grammar that passed its trial
_CONTROL_PREFIX = b"\xff"  # marks a token that llguidance must not treat as text


class _TokenList:
    """The vocabulary with the interface that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: "Tokenizer", size: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = ends[0]
        self.special_token_ids = [id for id in range(size) if tokenizer.is_special(id)]
        control = {*self.special_token_ids, *ends}
        self.tokens = [
            _CONTROL_PREFIX + tokenizer.piece(id).encode()
            if id in control
            else tokenizer.token_bytes(id)
            for id in range(size)
        ]

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode_rest(text).ids
        data = text.encode()
        if b"".join(self.tokens[id] for id in ids) == data:
            return ids
        return self._greedy_spelling(data)

    def _greedy_spelling(self, data: bytes) -> list[int]:
        """Encode bytes as far as possible; for a text that the tokenizer would change (NFC, NFKC).

        The longest matching token is taken at each place.
        """
        ids: list[int] = []
        index = 0
        while index < len(data):
            ends = range(min(len(data), index + self._longest), index, -1)
            end = next((end for end in ends if data[index:end] in self._by_bytes), None)
            if end is None:
                break
            ids.append(self._by_bytes[data[index:end]])
            index = end
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {data: id for id, data in enumerate(self.tokens) if data[:1] != _CONTROL_PREFIX}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes), default=0)


class Grammars:
    """The compiler of grammars for one vocabulary. Thread-safe.

    Each generation gets a separate parser. Parsers that share state fail together: the state grows
    as each is used, up to a limit. vocab_size: width of the rows to constrain. ends: end tokens.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, ends: Sequence[int]) -> None:
        self._vocabulary = tokenizer, vocab_size, list(ends)
        special = tokenizer.special_tokens
        self._controls = Controls({token.content: id for id, token in special.items()})
        self._lock = threading.Lock()
        self._token_list: LLTokenizer | None = None
        self._verdicts: OrderedDict[Grammar, str] = (
            OrderedDict()
        )  # error message of each tried grammar; "" for a valid one

    def warm(self) -> None:
        """Load the vocabulary now (about 1 s), so that the first `constraint` need not do it."""
        with self._lock:
            self._load()
        TRIAL.start()

    def _load(self) -> "LLTokenizer":
        if self._token_list is None:
            tokenizer, size, ends = self._vocabulary
            if not ends:
                raise GrammarError("A model without an end token cannot end a constrained answer.")
            try:
                from llguidance import LLTokenizer
            except ImportError as error:
                raise GrammarError(
                    "The package llguidance is missing on this end: run pip install llguidance."
                ) from error

            token_list: Any = _TokenList(tokenizer, size, ends)
            self._token_list = LLTokenizer(token_list, n_vocab=size, eos_token=ends)
            # Compute a mask now: the first mask takes as long as loading the vocabulary.
            compile_grammar(
                Grammar("json", '{"type": "object"}'), self._token_list
            ).compute_bitmask()
        return self._token_list

    def refusal(self, grammar: Grammar) -> str:
        """Return the error that an earlier trial of this grammar gave; "" if none is known."""
        with self._lock:
            return self._verdicts.get(grammar, "")

    def constraint(self, grammar: Grammar, *, with_spare: bool = False) -> GrammarConstraint:
        """Make the constraint of one generation.

        with_spare: make a spare parser now, so that no other generation waits for one later. Raises
        `GrammarError` if the grammar is at fault, `GrammarBusyError` if the machine is.
        """
        with self._lock:
            token_list = self._load()
        self.attempt(grammar)
        _, size, ends = self._vocabulary
        parser = partial(compile_grammar, grammar, token_list, self._controls)
        constraint = GrammarConstraint(partial(on_deep_stack, parser), size, ends)
        if constraint.cpu_s > _MOST_CPU_S:  # it took longer than in the trial
            self._record(grammar, TOO_LONG)
            error = GrammarError(TOO_LONG)
            error.costly = True
            raise error
        if with_spare:
            constraint.add_spare()
        return constraint

    def attempt(self, grammar: Grammar) -> None:
        """Try a grammar unless its result is known; raise the same errors as `constraint`."""
        with self._lock:
            verdict = self._verdicts.get(grammar)
        if verdict is None:
            if len(grammar.text.encode("utf-8", "replace")) > MOST_GRAMMAR_BYTES:
                raise GrammarError(f"The grammar is longer than {MOST_GRAMMAR_BYTES:,} bytes.")
            verdict = ""
            try:
                TRIAL.attempt(grammar)
            except GrammarError as error:
                if error.lasting:
                    self._record(grammar, str(error))
                raise
        self._record(grammar, verdict)
        if verdict:
            raise GrammarError(verdict)

    def _record(self, grammar: Grammar, verdict: str) -> None:
        """Remember the result of a trial; do not call this if the machine was at fault."""
        with self._lock:
            self._verdicts.pop(grammar, None)
            self._verdicts[grammar] = verdict  # the newest is last
            if len(self._verdicts) > _MOST_VERDICTS:
                self._verdicts.popitem(last=False)
