"""What a grammar allows next: masks over the tokens, row by row, and forced text.

In:  a compiled grammar, the answer so far, and the paths of rows behind it. Out: rows with −∞ where
     nothing may follow.

A parser that gives up is of no further use, so another one takes its place: what a *draft* leads
into must harm no answer that goes another way. Time is bounded by a budget of the answer's own.
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

# CPU seconds that a constraint may take: once, and more for each row and token of the vocabulary
# (1 ms for 50,000); a row takes some 20 µs, and 1 ms per 2,000 bytes of text that the grammar
# forces.
_ONCE_S, _A_TOKEN_S = 0.1, 2e-8
_CHEAP_S = 0.005  # to make another parser while a row waits for its mask
DEAD_END = "No token of this vocabulary continues what the grammar allows."
_MESSAGE = 300  # characters of the library's own words


class _SpentError(GrammarError):
    """The budget is spent."""

    costly = True


class _DeadEndError(GrammarError):
    """Nothing may follow; the grammar and what its parsers share are as good as before."""


class GrammarConstraint:
    """Forbids what a grammar does not allow, in one generation. One thread at a time.

    parser: makes one at the grammar's beginning, which shares nothing with others, and tells the
    seconds of a processor that it took. cpu_s: these, of the first one.
    """

    def __init__(
        self,
        parser: "Callable[[], tuple[LLMatcher, float]]",
        vocab_size: int,
        ends: Sequence[int],
    ) -> None:
        self._parser = parser
        self._spared: list[LLMatcher] | None = None
        self._vocab_size = vocab_size
        self._ends = frozenset(ends)
        self._left_s = _ONCE_S
        self._fresh, self.cpu_s = parser()  # has read nothing
        self._restart()

    def spare(self) -> None:
        """Make a parser now that takes the place of one that gives up later.

        From then on none is made while masks are asked for, unless it is cheap.
        """
        self._spared = []
        if self.cpu_s > _CHEAP_S:
            matcher, spent_s = self._parser()
            self._spared.append(matcher)
            self.cpu_s += spent_s

    def _another(self) -> "LLMatcher":
        """Return a parser that has read nothing; raises if that costs too much here."""
        if self._spared:
            return self._spared.pop()
        if self._spared is not None and self.cpu_s > _CHEAP_S:
            raise _SpentError("The grammar is too complex: drafts lead its parser astray.")
        matcher, spent_s = self._parser()
        self._left_s -= spent_s
        return matcher

    def _restart(self) -> None:
        self._matcher = self._fresh.deep_copy()
        # what it has read
        self._answer = np.empty(0, np.uint32)
        self._path: list[int] = []
        self._forced: list[int] | None = None  # what must follow there, if known

    def forbid(
        self, logits: Floats, answer: NDArray[np.uint32], paths: Sequence[Sequence[int]]
    ) -> list[int]:
        """Set to −∞, in place, what must not follow; returns the rows that nothing may follow.

        logits: [n, V]. answer: u32 [m], which all rows continue; paths: of each row, the tokens
        behind it. A row that the grammar cannot reach stays as it is, for the row before its first
        forbidden token rejects that; so does one of the returned. Raises `GrammarError` where
        nothing may follow the answer itself, it is not of the grammar, or the budget is spent.
        """
        dead = []
        self._expect_left()
        if self._read_answer(answer):
            for at, (row, path) in enumerate(zip(logits, paths, strict=True)):
                try:
                    if self._read_path(path):
                        np.copyto(row, -np.inf, where=~self._allowed())
                except GrammarError as error:
                    self._come_back(answer, path, error)
                    dead.append(at)
        return dead

    def _come_back(
        self, answer: NDArray[np.uint32], path: Sequence[int], error: GrammarError
    ) -> None:
        """Begin anew where a draft has led astray; raises the error if it is the answer's own."""
        if not len(path) or isinstance(error, _SpentError):
            raise error
        if not isinstance(error, _DeadEndError):  # it may be at a limit of what copies share
            self._fresh = self._another()
        with self._charged():
            self._restart()
            self._read_answer(answer)

    def forced(self, answer: NDArray[np.uint32], path: Sequence[int]) -> list[int]:
        """Return the tokens of the only text that may follow, the next one first.

        Of these the last ones are missing if what comes behind them may make them longer.
        """
        self._expect_left()
        try:
            if not (self._read_answer(answer) and self._read_path(path)):
                return []
            if self._forced is None:
                with self._charged():
                    found = self._matcher.compute_ff_tokens()
                self._forced = [token for token in found if token not in self._ends]
        except GrammarError as error:
            self._come_back(answer, path, error)
            return []
        return self._forced

    def _read_answer(self, answer: NDArray[np.uint32]) -> bool:
        """Bring the matcher behind the answer, u32 [m]; False behind its end token."""
        if len(answer) and int(answer[-1]) in self._ends:
            return False
        if not np.array_equal(answer, self._answer):
            self._read_path(())
            held = min(len(answer), len(self._answer))
            differ = np.flatnonzero(answer[:held] != self._answer[:held])
            common = int(differ[0]) if len(differ) else held
            rest = answer[common:].tolist()
            read = self._consume(rest, back=len(self._answer) - common)
            self._answer = answer[: common + read].copy()
            if read < len(rest):
                raise GrammarError("What the answer says so far is not of the grammar.")
        return True

    def _read_path(self, path: Sequence[int]) -> bool:
        """Bring it behind the answer and these tokens; False if the grammar does not allow them."""
        pairs = enumerate(zip(self._path, path, strict=False))
        shorter = min(len(self._path), len(path))
        common = next((at for at, (held, token) in pairs if held != token), shorter)
        back = len(self._path) - common
        rest = list(path[common:])
        end = next((at for at, token in enumerate(rest) if token in self._ends), len(rest))
        read = self._consume(rest[:end], back)
        self._path = list(path[: common + read])
        return read == len(rest)

    def _consume(self, tokens: list[int], back: int) -> int:
        """Read on, after going ``back`` so many; returns how many tokens the grammar allows."""
        read = 0
        if back or tokens:
            with self._charged():
                if back:
                    self._matcher.rollback(back)
                read = self._matcher.try_consume_tokens(tokens) if tokens else 0
        self._check()
        if back or (read and self._forced is not None and tokens[:read] != self._forced[:read]):
            self._forced = None
        elif read and self._forced is not None:
            self._forced = self._forced[read:] or None
        return read

    def _allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may follow, [V]; `GrammarError` if none may."""
        with self._charged():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._left_s += _A_TOKEN_S * self._vocab_size
        self._check()
        found = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not found.any():
            raise _DeadEndError(DEAD_END)
        return found

    @contextmanager
    def _charged(self) -> Iterator[None]:
        """Take what the block costs from the budget."""
        begun_s = time.thread_time()
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as panic:  # of the parser, which is no Python
            raise GrammarError("The grammar's parser has failed.") from panic
        self._left_s -= time.thread_time() - begun_s
        self._expect_left()

    def _expect_left(self) -> None:
        if self._left_s < 0.0:
            raise _SpentError("The grammar costs too much: it forces too long a text, or the like.")

    def _check(self) -> None:
        if self._matcher.is_error():
            why = self._matcher.get_error()
            if why.startswith("NoExtension"):
                raise _DeadEndError(DEAD_END)
            raise GrammarError(f"The grammar is too complex: {one_printable_line(why)}")


def one_printable_line(text: object) -> str:
    """Make one printable line of the library's words, which may quote the grammar."""
    line = " ".join(str(text).split())[:_MESSAGE]
    return "".join(letter if letter.isprintable() else "?" for letter in line)
