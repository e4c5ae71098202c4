"""Compile grammars in a thread of its own, fairly among keys.

In:  compilations, one a generation. Out: the same, with their constraints or the error to refuse
     the generation with; a descriptor becomes readable when some are finished.

In the serving thread a costly grammar would stall all devices. Here it delays only other grammars:
the waiting key whose grammars have used least processor time goes first, and the thread has a lower
priority than the serving one (the parser is native code and does not hold the interpreter lock).
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

_OWNERS = 1024  # most keys with a record of their processor time
_LEAVING_S = 1.0
_TURN_S = 0.002
_NICENESS = 10  # added to that of the thread, and so of the process that tries grammars


@dataclass(eq=False, slots=True)
class Compilation:
    """A grammar to compile; ends with either ``count`` constraints or an error.

    done: called with the compilation, in the serving thread.
    """

    owner: bytes
    grammar: Grammar
    count: int
    done: Callable[["Compilation"], None]
    constraints: list[GrammarConstraint] = field(default_factory=list)
    error: PilotfishError | None = None


class GrammarCompiler(threading.Thread):
    """The compiling thread. It starts with the first grammar; `close` ends it."""

    def __init__(self, grammars: Grammars) -> None:
        super().__init__(name="grammars", daemon=True)
        self._grammars = grammars
        self._changed = threading.Condition()
        self._waiting: dict[bytes, deque[Compilation]] = {}  # by owner
        self._finished: deque[Compilation] = deque()
        # processor seconds by owner, the latest user last; an owner that returns after a pause
        # starts at ``_virtual_s``, the seconds of the owner served last
        self._used_s: OrderedDict[bytes, float] = OrderedDict()
        self._virtual_s = 0.0
        self._closed = False
        reading, writing = os.pipe()
        self._news, self._bell = os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0)
        for end in (reading, writing):
            os.set_blocking(end, False)

    @property
    def descriptor(self) -> int:
        """Descriptor that is readable when a compilation is finished."""
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
        """Forget a compilation. If it is running, ``done`` is still called."""
        with self._changed:
            queue = self._waiting.get(compilation.owner)
            if queue is not None:
                with suppress(ValueError):
                    queue.remove(compilation)
                if not queue:
                    del self._waiting[compilation.owner]

    def run_callbacks(self) -> bool:
        """Call ``done`` of finished compilations in the calling thread, for at most `_TURN_S`.

        Returns False: if some are left, the descriptor becomes readable again.
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
        """Compile until `close`."""
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
        """End the thread after its present grammar; forgets waiting compilations."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self.ident is not None:
            self.join(_LEAVING_S)
        if not self.is_alive():
            self._news.close()
            self._bell.close()

    def _next(self) -> Compilation | None:
        """Wait for the next compilation; None after `close`."""
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
        """Compile; returns the processor seconds, without those of the trial process."""
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
        except BaseException:  # the parser's panics are no `Exception`
            _log.exception("a grammar could not be compiled")
            compilation.error = InternalError("The edge failed at this grammar; see its log.")
        return spent_s

    def _charge(self, owner: bytes, spent_s: float) -> None:
        """Add to an owner's processor seconds."""
        with self._changed:
            self._used_s[owner] = self._used_s.pop(owner, self._virtual_s) + spent_s
