"""Compile grammars in a separate thread, with fair shares for all keys.

In:  compilation jobs, one per generation. Out: the same jobs, each with its constraints, or with
     the error with which the generation is refused. A file descriptor becomes readable when a job
     is done.

In the serving thread a costly grammar would stall all devices; in this thread it delays only other
grammars. Of the keys with waiting grammars, the key that has used the least processor time goes
first. The thread has a lower priority than the serving thread. (The parser is native code and
releases the interpreter lock.)
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

_OWNERS = 1024  # upper limit of keys with a record of their processor time
_LEAVING_S = 1.0  # time limit (s) of the thread's end
_TURN_S = 0.002  # time limit (s) of callbacks in one turn of the serving loop
_NICENESS = 10  # niceness added to the thread; the process that tries grammars inherits it


@dataclass(eq=False, slots=True)
class Compilation:
    """Grammar to compile; the result is either ``count`` constraints or an error.

    done: function that is called with the finished compilation, in the serving thread.
    """

    owner: bytes
    grammar: Grammar
    count: int
    done: Callable[["Compilation"], None]
    constraints: list[GrammarConstraint] = field(default_factory=list)
    error: PilotfishError | None = None


class GrammarCompiler(threading.Thread):
    """Thread that compiles grammars; it starts with the first grammar, and `close` ends it."""

    def __init__(self, grammars: Grammars) -> None:
        super().__init__(name="grammars", daemon=True)
        self._grammars = grammars
        self._changed = threading.Condition()
        self._waiting: dict[bytes, deque[Compilation]] = {}  # owner → waiting compilations
        self._finished: deque[Compilation] = deque()
        # owner → used processor seconds, the latest owner last. An owner that returns after a pause
        # starts at ``_virtual_s``, the seconds of the owner that was served last.
        self._used_s: OrderedDict[bytes, float] = OrderedDict()
        self._virtual_s = 0.0
        self._closed = False
        reading, writing = os.pipe()
        self._news, self._bell = os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0)
        for end in (reading, writing):
            os.set_blocking(end, False)

    @property
    def descriptor(self) -> int:
        """Descriptor that is readable while finished compilations wait for `run_callbacks`."""
        return self._news.fileno()

    def submit(self, compilation: Compilation) -> None:
        """Queue a compilation; raise `BusyError` if the thread cannot be started."""
        with self._changed:
            if self.ident is None:
                try:
                    self.start()
                except RuntimeError as error:
                    raise BusyError(
                        "This edge has no memory or threads left to compile a grammar: try again "
                        "later."
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
        """Remove a waiting compilation; a running compilation continues and calls ``done``."""
        with self._changed:
            queue = self._waiting.get(compilation.owner)
            if queue is not None:
                with suppress(ValueError):
                    queue.remove(compilation)
                if not queue:
                    del self._waiting[compilation.owner]

    def run_callbacks(self) -> bool:
        """Call ``done`` of finished compilations in the calling thread, for at most `_TURN_S`.

        Returns False in any case (no work is left without an event): if finished compilations
        remain, the descriptor becomes readable again.
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
        """Compile waiting grammars one after the other, until `close`."""
        with suppress(OSError, AttributeError):
            thread = threading.get_native_id()
            usual = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, min(usual + _NICENESS, 19))
        while (compilation := self._next()) is not None:
            tried_s = TRIAL.cpu_s
            spent_s = self._compile(compilation)
            self._charge(compilation.owner, spent_s + TRIAL.cpu_s - tried_s)
            self._finished.append(compilation)
            self._bell.write(b"!")  # may fail if the pipe is full: then the descriptor is readable

    def close(self) -> None:
        """End the thread after its present grammar; waiting compilations are forgotten."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self.ident is not None:
            self.join(_LEAVING_S)
        if not self.is_alive():
            self._news.close()
            self._bell.close()

    def _next(self) -> Compilation | None:
        """Wait for the next compilation and return it; return None after `close`."""
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
        """Compile; return the processor seconds of this process (without the trial process)."""
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
        except BaseException:  # a panic of the parser is not an `Exception`
            _log.exception("a grammar could not be compiled")
            compilation.error = InternalError(
                "The edge failed to compile this grammar; see the edge's log."
            )
        return spent_s

    def _charge(self, owner: bytes, spent_s: float) -> None:
        """Add ``spent_s`` to the owner's used processor seconds."""
        with self._changed:
            self._used_s[owner] = self._used_s.pop(owner, self._virtual_s) + spent_s
