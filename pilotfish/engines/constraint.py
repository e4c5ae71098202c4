"""Constrain tokens to a grammar: mask forbidden tokens in each row, and find forced text.

In:  a compiled grammar, the answer so far, and for each row of logits its path: the draft tokens
between the answer and that row. Out: the rows, with −∞ for forbidden tokens.

A parser that has failed cannot be used again. If a *draft* made the parser fail, a new parser
replaces it, because the answer may continue differently from the draft. A budget per answer bounds
the CPU time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.engine_errors import GrammarError
from pilotfish.speculation.distributions import Floats

if TYPE_CHECKING:
    from llguidance import LLMatcher

# CPU budget of a constraint (s): a base, plus _TOKEN_S per row and token of the vocabulary (1 ms
# per row for 50,000 tokens). A row takes about 20 µs, plus 1 ms per 2,000 bytes of forced text.
_BASE_S, _TOKEN_S = 0.1, 2e-8
_CHEAP_PARSER_S = 0.005  # maximum CPU time (s) of making a parser while a row waits for its mask
DEAD_END = "No token of this vocabulary continues what the grammar allows."
_MOST_MESSAGE = 300  # maximum characters of llguidance's error text in our messages


class _SpentError(GrammarError):
    """The constraint has spent its CPU budget."""

    costly = True


class _DeadEndError(GrammarError):
    """No token may follow here; the grammar and its parsers stay usable."""


class GrammarConstraint:
    """A filter of the tokens that a grammar forbids, for one generation. Not thread-safe.

    parser: a function that makes an independent parser at the grammar's start, and returns the
    parser and the CPU seconds spent. ends: end tokens. cpu_s: CPU seconds spent on the first parser
    and the spare.
    """

    def __init__(
        self,
        parser: "Callable[[], tuple[LLMatcher, float]]",
        vocab_size: int,
        ends: Sequence[int],
    ) -> None:
        self._parser = parser
        self._spares: list[LLMatcher] | None = None
        self._vocab_size = vocab_size
        self._ends = frozenset(ends)
        self._budget_s = _BASE_S
        self._fresh, self.cpu_s = parser()  # this parser never reads a token; it is copied
        self._restart()

    def add_spare(self) -> None:
        """Make a spare parser now, to replace one that fails later.

        After this call, a parser is made while a row waits for its mask only if making it is cheap.
        """
        self._spares = []
        if self.cpu_s > _CHEAP_PARSER_S:
            matcher, spent_s = self._parser()
            self._spares.append(matcher)
            self.cpu_s += spent_s

    def _new_parser(self) -> "LLMatcher":
        """Return a parser at the grammar's start; raise if making one would take too long now."""
        if self._spares:
            return self._spares.pop()
        if self._spares is not None and self.cpu_s > _CHEAP_PARSER_S:
            raise _SpentError(
                "The grammar is too complex: drafts make its parser fail, and a "
                "new parser takes too long to make."
            )
        matcher, spent_s = self._parser()
        self._budget_s -= spent_s
        return matcher

    def _restart(self) -> None:
        self._matcher = self._fresh.deep_copy()
        # Tokens that the parser has read: first the answer's tokens, then a path's tokens.
        self._answer = np.empty(0, np.uint32)
        self._path: list[int] = []
        self._forced: list[int] | None = None  # tokens forced after the path; None if unknown

    def forbid(
        self, logits: Floats, answer: NDArray[np.uint32], paths: Sequence[Sequence[int]]
    ) -> list[int]:
        """Set the logits of forbidden tokens to −∞, in place.

        Return the rows where no token is allowed.

        logits: [n, V]. answer: u32 [m], shared by all rows. paths: for each row, the draft tokens
        between the answer and the row. A row stays unchanged if the grammar forbids its path:
        verification rejects a token of the path anyway. The returned rows stay unchanged, too.
        Raises `GrammarError` if nothing may follow the answer itself, if the answer breaks the
        grammar, or if the budget is spent.
        """
        dead_rows = []
        self._check_budget()
        if self._read_answer(answer):
            for index, (row, path) in enumerate(zip(logits, paths, strict=True)):
                try:
                    if self._read_path(path):
                        np.copyto(row, -np.inf, where=~self._allowed_tokens())
                except GrammarError as error:
                    self._recover(answer, path, error)
                    dead_rows.append(index)
        return dead_rows

    def _recover(
        self, answer: NDArray[np.uint32], path: Sequence[int], error: GrammarError
    ) -> None:
        """Restart the parser if a draft made it fail; re-raise an error that the answer caused."""
        if not len(path) or isinstance(error, _SpentError):
            raise error
        # the parser may have reached a limit that all its copies share
        if not isinstance(error, _DeadEndError):
            self._fresh = self._new_parser()
        with self._charge_time():
            self._restart()
            self._read_answer(answer)

    def forced(self, answer: NDArray[np.uint32], path: Sequence[int]) -> list[int]:
        """Return the tokens of the text that the grammar forces after the path, in order.

        The last tokens are omitted if text after them could change them.
        """
        self._check_budget()
        try:
            if not (self._read_answer(answer) and self._read_path(path)):
                return []
            if self._forced is None:
                with self._charge_time():
                    tokens = self._matcher.compute_ff_tokens()
                self._forced = [token for token in tokens if token not in self._ends]
        except GrammarError as error:
            self._recover(answer, path, error)
            return []
        return self._forced

    def _read_answer(self, answer: NDArray[np.uint32]) -> bool:
        """Move the parser to the end of the answer, u32 [m].

        Return False if it has an end token.
        """
        if len(answer) and int(answer[-1]) in self._ends:
            return False
        if not np.array_equal(answer, self._answer):
            self._read_path(())
            shorter = min(len(answer), len(self._answer))
            differences = np.flatnonzero(answer[:shorter] != self._answer[:shorter])
            common = int(differences[0]) if len(differences) else shorter
            rest = answer[common:].tolist()
            read = self._consume(rest, back=len(self._answer) - common)
            self._answer = answer[: common + read].copy()
            if read < len(rest):
                raise GrammarError("The answer so far does not follow the grammar.")
        return True

    def _read_path(self, path: Sequence[int]) -> bool:
        """Move the parser to the end of the path; return False if the grammar forbids the path."""
        pairs = enumerate(zip(self._path, path, strict=False))
        shorter = min(len(self._path), len(path))
        common = next(
            (index for index, (read_token, token) in pairs if read_token != token), shorter
        )
        back = len(self._path) - common
        rest = list(path[common:])
        end = next((index for index, token in enumerate(rest) if token in self._ends), len(rest))
        read = self._consume(rest[:end], back)
        self._path = list(path[: common + read])
        return read == len(rest)

    def _consume(self, tokens: list[int], back: int) -> int:
        """Roll back ``back`` tokens, then read ``tokens``; return how many of them were allowed."""
        read = 0
        if back or tokens:
            with self._charge_time():
                if back:
                    self._matcher.rollback(back)
                read = self._matcher.try_consume_tokens(tokens) if tokens else 0
        self._check_parser()
        if back or (read and self._forced is not None and tokens[:read] != self._forced[:read]):
            self._forced = None
        elif read and self._forced is not None:
            self._forced = self._forced[read:] or None
        return read

    def _allowed_tokens(self) -> NDArray[np.bool_]:
        """Return a mask of the tokens that may follow, bool [V]; raise if none may."""
        with self._charge_time():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._budget_s += _TOKEN_S * self._vocab_size
        self._check_parser()
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not allowed.any():
            raise _DeadEndError(DEAD_END)
        return allowed

    @contextmanager
    def _charge_time(self) -> Iterator[None]:
        """Subtract the CPU time of the block from the budget."""
        begun_s = time.thread_time()
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as panic:  # a Rust panic of the parser
            raise GrammarError("The grammar's parser has failed.") from panic
        self._budget_s -= time.thread_time() - begun_s
        self._check_budget()

    def _check_budget(self) -> None:
        if self._budget_s < 0.0:
            raise _SpentError(
                "The grammar takes too much CPU time, for example because it "
                "forces a very long text."
            )

    def _check_parser(self) -> None:
        if self._matcher.is_error():
            message = self._matcher.get_error()
            if message.startswith("NoExtension"):
                raise _DeadEndError(DEAD_END)
            raise GrammarError(f"The grammar is too complex: {one_printable_line(message)}")


def one_printable_line(text: object) -> str:
    """Make one printable line of llguidance's message, which may quote the grammar."""
    line = " ".join(str(text).split())[:_MOST_MESSAGE]
    return "".join(letter if letter.isprintable() else "?" for letter in line)
