"""A lock that is granted in the order of request.

An ordinary lock may go back to the thread that has just released it, so that a thread which reads a
long prompt, pass after pass, would keep all others waiting.
"""

import threading
from collections import deque


class FairLock:
    """A fair lock, used with ``with``. Not re-entrant."""

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
        except BaseException:  # Ctrl-C: this thread must not be waited for
            with self._mutex:
                if gate in self._waiting:
                    self._waiting.remove(gate)
                else:
                    self._pass_on()
            raise

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            self._pass_on()

    def _pass_on(self) -> None:
        if self._waiting:
            self._waiting.popleft().release()
        else:
            self._taken = False
