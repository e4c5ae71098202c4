"""One model for all lanes of a device, and the lock with which the lanes take turns."""

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from pilotfish.base.errors import UnsupportedError
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import Work, open_engine
from pilotfish.engines.language_model import Output
from pilotfish.engines.pass_times import pass_times

_WIDTHS = (1, 2, 4)

Result = TypeVar("Result")


class SharedModel:
    """One model with a slot for each drafter. Thread-safe.

    Passes run in order of request, one at a time, so a long prompt of one lane does not delay the
    others.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        provider: str,
        threads: int | None,
        context: int | None,
        lanes: int,
    ) -> None:
        self.engine = open_engine(
            artifact,
            slots=lanes,
            context=context,
            threads=threads,
            provider=provider,
            drafts=True,
        )
        self.pass_times = pass_times(self.engine, _WIDTHS)
        self._passes = FairLock()  # held during a pass, and while its output is in use
        self._free = list(range(lanes))
        self._lock = threading.Lock()  # protects `_free`

    def acquire_slot(self) -> int:
        """Empty and return the lowest free slot; `UnsupportedError` if all are taken."""
        with self._lock:
            if not self._free:
                raise UnsupportedError(
                    f"All {self.engine.model.slots} lanes of this device are in use: close a "
                    "device, or open the device with more lanes."
                )
            slot = min(self._free)
            self._free.remove(slot)
        self.clear(slot)
        return slot

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        with self._passes:
            self.engine.clear(slot)

    def run(
        self,
        work: Work,
        take: Callable[[Output], Result],
        before_pass: Callable[[], None] = lambda: None,
    ) -> Result:
        """Run a lane's work; return what ``take`` copies from its output.

        before_pass: see `Engine.run`. Raises the errors of `Engine.run`.
        """
        passes = 0

        def let_others_run() -> None:
            nonlocal passes
            before_pass()
            if passes:
                self._passes.give_way()
            passes += 1

        with self._passes:
            return take(self.engine.run([work], let_others_run)[0])

    def release_slot(self, slot: int) -> None:
        """Free a slot."""
        with self._lock:
            self._free.append(slot)


class FairLock:
    """A lock that is granted in the order of request, used with ``with``. Not re-entrant.

    A thread that releases an ordinary lock often gets it again at once. While it reads a long
    prompt, pass after pass, all other threads would wait.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._mutex:
            if not self._taken:
                self._taken = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        try:
            gate.acquire()
        except BaseException:  # Ctrl-C: other threads must not wait for this one
            with self._mutex:
                if gate in self._waiting:
                    self._waiting.remove(gate)
                else:
                    self._pass_on()
            raise

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            self._pass_on()

    def give_way(self) -> None:
        """Let the waiting threads have the lock first; the caller holds it before and after."""
        interrupt: BaseException | None = None
        self.__exit__()
        while True:  # the caller's ``with`` block is going to release the lock, so it must hold it
            try:
                self.__enter__()
                break
            except BaseException as error:  # Ctrl-C, perhaps several times
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _pass_on(self) -> None:
        if self._waiting:
            self._waiting.popleft().release()
        else:
            self._taken = False
