"""Receive messages in a thread while the serving thread makes a target pass or verifies its jobs.

The serving thread makes the target's passes itself: handing windows to another thread, and verdicts
back, would cost every round two wake-ups. During a pass this thread serves the sockets, so that
pings, handshakes, refusals and the next windows do not wait for the pass.

Law: sockets and sessions belong to the holder of ``turn`` or, outside of `begin` and `end`, to the
serving thread. This thread waits on bare descriptors, which needs neither. Outside of passes it
watches none of them, so a pass without messages does not wake it.
"""

import select
import threading
from collections.abc import Callable, Mapping


class BackgroundReceiver(threading.Thread):
    """Calls the handler of each readable descriptor between `begin` and `end`.

    A handler is called under the lock ``turn``. It serves messages, and returns True if some are
    left, since a ZeroMQ descriptor signals new messages only.
    """

    def __init__(self, handlers: Mapping[int, Callable[[], bool]]) -> None:
        super().__init__(name="receiver", daemon=True)
        self.turn = threading.Lock()
        self._handlers = handlers
        self._active = False
        self._ready = select.epoll()  # watches the handlers' descriptors
        for descriptor in handlers:
            self._ready.register(descriptor, select.EPOLLIN)
        self._armed = select.epoll()  # watches ``_ready`` during passes
        self._armed.register(self._ready, 0)

    def begin(self) -> None:
        """Let this thread serve from now on; call it when all messages are served."""
        self._active = True
        self._armed.modify(self._ready, select.EPOLLIN)

    def end(self) -> None:
        """Stop this thread from serving; waits for at most one turn."""
        self._active = False  # first: else the thread could take the lock again and again
        self._armed.modify(self._ready, 0)
        with self.turn:
            pass

    def run(self) -> None:
        """Wait for descriptors and call their duties."""
        left: set[int] = set()
        while True:
            self._armed.poll(0 if left else None)
            with self.turn:
                if self._active:
                    ready = {descriptor for descriptor, _ in self._ready.poll(0)}
                    left = {each for each in ready | left if self._handlers[each]()}
                else:
                    left = set()
