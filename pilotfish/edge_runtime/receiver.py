"""Receive messages in a second thread while the serving thread runs a target pass.

The serving thread itself runs the passes: if it passed windows to another thread, and got verdicts
back, every round would cost two wake-ups. During a pass the receiver thread serves the sockets, so
that pings, handshakes, refusals and the next windows do not wait for the pass.

Law: between `begin` and `end` only the thread that has the lock ``turn`` may use sockets and
sessions; at other times, only the serving thread. The receiver thread waits for bare descriptors,
for which it needs no lock. It watches them only during passes, so a round without messages during
its pass does not wake the receiver thread.
"""

import select
import threading
from collections.abc import Callable, Mapping


class BackgroundReceiver(threading.Thread):
    """Thread that calls the handlers of readable descriptors between `begin` and `end`.

    A handler is called under the lock ``turn``. It serves messages, and returns True if messages
    are left; the thread then calls it again, since a ZeroMQ descriptor only signals new messages.
    """

    def __init__(self, handlers: Mapping[int, Callable[[], bool]]) -> None:
        super().__init__(name="receiver", daemon=True)
        self.turn = threading.Lock()
        self._handlers = handlers
        self._active = False
        self._ready = select.epoll()  # set of the handlers' descriptors
        for descriptor in handlers:
            self._ready.register(descriptor, select.EPOLLIN)
        self._armed = select.epoll()  # watches ``_ready``, only during passes
        self._armed.register(self._ready, 0)

    def begin(self) -> None:
        """Let this thread serve from now on; call `begin` only when all messages are served."""
        self._active = True
        self._armed.modify(self._ready, select.EPOLLIN)

    def end(self) -> None:
        """Stop this thread from serving; wait until its present turn ends."""
        self._active = False  # before the lock, or the thread could take the lock again and again
        self._armed.modify(self._ready, 0)
        with self.turn:
            pass

    def run(self) -> None:
        """Wait for readable descriptors and call their handlers, forever."""
        left: set[int] = set()
        while True:
            self._armed.poll(0 if left else None)
            with self.turn:
                if self._active:
                    ready = {descriptor for descriptor, _ in self._ready.poll(0)}
                    left = {each for each in ready | left if self._handlers[each]()}
                else:
                    left = set()
