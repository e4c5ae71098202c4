"""Try and compile the grammars of generations in a thread of its own, key by key.

In:  compilations, each of one generation. Out: the same ones with their constraints, or with the
     error to refuse the generation with; a descriptor tells when there are some.

The serving thread would stall all devices by this. Here a costly grammar delays only the next ones:
of all keys that wait, the one whose grammars have taken least of the processor goes first, and the
thread yields to the serving one wherever both want the processor (the parser is no Python: it does
not hold the interpreter while it compiles).
"""

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from pilotfish.base.errors import BadGrammarError, BusyError, InternalError, PilotfishError
from pilotfish.engines.constraint import GrammarConstraint
from pilotfish.engines.engine_errors import GrammarBusyError, GrammarError
from pilotfish.engines.grammar import Grammars
from pilotfish.engines.grammar_trial import TRIAL
from pilotfish.speculation.logits_options import Grammar

_log = logging.getLogger("pilotfish.edge")

_OWNERS = 1024  # most keys whose use of the processor is known
_LEAVING_S = 1.0
_TURN_S = 0.002
_NICENESS = 10  # more, of the thread, and of the process in which it tries grammars


@dataclass(eq=False, slots=True)
class Compilation:
    """A grammar to compile. count: constraints that are wanted of it. done: called in the
    serving thread, with the compilation itself.

    Either all constraints are there in the end, or an error.
    """

    owner: bytes
    grammar: Grammar
    count: int
    done: Callable[["Compilation"], None]
    constraints: list[GrammarConstraint] = field(default_factory=list)
    error: PilotfishError | None = None


class GrammarCompiler(threading.Thread):
    """The thread, which starts with the first grammar. `close` ends it."""

    def __init__(self, grammars: Grammars) -> None:
        super().__init__(name="grammars", daemon=True)
        self._grammars = grammars
        self._changed = threading.Condition()
        self._waiting: dict[bytes, deque[Compilation]] = {}  # by owner
        self._finished: deque[Compilation] = deque()
        # by owner, the latest user last; one that comes after a silence begins at ``_virtual_s``,
        # what the owner had used whose turn it was last
        self._used_s: OrderedDict[bytes, float] = OrderedDict()
        self._virtual_s = 0.0
        self._closed = False
        reading, writing = os.pipe()
        self._news, self._bell = os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0)
        for end in (reading, writing):
            os.set_blocking(end, False)

    @property
    def descriptor(self) -> int:
        """Is readable when something is finished."""
        return self._news.fileno()

    def submit(self, compilation: Compilation) -> None:
        """Queue a compilation; `BusyError` where no thread can be started."""
        with self._changed:
            if self.ident is None:
                try:
                    self.start()
                except RuntimeError as error:
                    raise BusyError(
                        "This edge has no memory or no threads left to compile a grammar: try "
                        "again later."
                    ) from error
            owner = compilation.owner
            if owner not in self._waiting:
                self._waiting[owner] = deque()
                self._used_s[owner] = max(self._used_s.pop(owner, 0.0), self._virtual_s)
                if len(self._used_s) > _OWNERS:
                    self._used_s.popitem(last=False)
            self._waiting[owner].append(compilation)
            self._changed.notify()

    def cancel(self, compilation: Compilation) -> None:
        """Forget a compilation, unless it is under way; its end may still be told."""
        with self._changed:
            queue = self._waiting.get(compilation.owner)
            if queue is not None:
                with suppress(ValueError):
                    queue.remove(compilation)
                if not queue:
                    del self._waiting[compilation.owner]

    def run_callbacks(self) -> bool:
        """Call ``done`` of what is finished, in the calling thread, for one turn of its loop.

        False: what is left rings again.
        """
        self._news.read(4096)
        until_s = time.monotonic() + _TURN_S
        while self._finished:
            compilation = self._finished.popleft()
            compilation.done(compilation)
            if self._finished and time.monotonic() >= until_s:
                self._bell.write(b"!")
                break
        return False

    def run(self) -> None:
        """Compile, until `close`."""
        with suppress(OSError, AttributeError):
            thread = threading.get_native_id()
            usual = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, min(usual + _NICENESS, 19))
        while (compilation := self._next()) is not None:
            tried_s = TRIAL.cpu_s
            spent_s = self._compile(compilation)
            self._charge(compilation.owner, spent_s + TRIAL.cpu_s - tried_s)
            self._finished.append(compilation)
            self._bell.write(b"!")  # where the pipe is full, it is readable anyway

    def close(self) -> None:
        """End the thread, after the grammar that it is at; what waits is forgotten."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self.ident is not None:
            self.join(_LEAVING_S)
        if not self.is_alive():
            self._news.close()
            self._bell.close()

    def _next(self) -> Compilation | None:
        """Wait for the next compilation; None: there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            owner = min(self._waiting, key=lambda each: self._used_s.get(each, self._virtual_s))
            self._virtual_s = self._used_s.get(owner, self._virtual_s)
            queue = self._waiting[owner]
            compilation = queue.popleft()
            if not queue:
                del self._waiting[owner]
            return compilation

    def _compile(self, compilation: Compilation) -> float:
        """Compile; returns the processor's seconds that it took, without those of a trial."""
        spent_s = 0.0
        try:
            for _ in range(compilation.count):
                constraint = self._grammars.constraint(compilation.grammar, with_spare=True)
                spent_s += constraint.cpu_s
                compilation.constraints.append(constraint)
        except GrammarBusyError as error:
            compilation.error = BusyError(str(error))
        except GrammarError as error:
            compilation.error = BadGrammarError(str(error))
        except BaseException:  # the parser's own panics are no `Exception`
            _log.exception("a grammar could not be compiled")
            compilation.error = InternalError("The edge failed at this grammar; see its log.")
        return spent_s

    def _charge(self, owner: bytes, spent_s: float) -> None:
        """Note what an owner has used of the processor."""
        with self._changed:
            self._used_s[owner] = self._used_s.pop(owner, self._virtual_s) + spent_s
