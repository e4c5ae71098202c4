"""Receive messages in a thread while the serving thread makes a target pass or rules on one.

The serving thread makes the target's passes itself: to hand a window to another thread, and the
verdict back, would cost every round two wake-ups. So that pings, handshakes, refusals and the next
windows need not wait for the end of a pass, this thread serves the sockets meanwhile.

Law: sockets and sessions belong to the holder of ``turn`` or, outside of `begin` and `end`, to the
serving thread. This thread waits on bare descriptors, which touches neither. Outside of passes the
kernel is told to report none of them: a pass in which nothing arrives does not wake it at all.
"""

import select
import threading
from collections.abc import Callable, Mapping


class BackgroundReceiver(threading.Thread):
    """Between `begin` and `end` does the duty of each descriptor that becomes readable.

    A duty is done with ``turn`` held: it answers all that has arrived, and returns True if it left
    something after all. (A ZeroMQ descriptor tells of what is new, not of what was left.)
    """

    def __init__(self, duties: Mapping[int, Callable[[], bool]]) -> None:
        super().__init__(name="receiver", daemon=True)
        self.turn = threading.Lock()
        self._duties = duties
        self._active = False
        self._ready = select.epoll()  # the descriptors, which are one to the other epoll
        for descriptor in duties:
            self._ready.register(descriptor, select.EPOLLIN)
        self._armed = select.epoll()
        self._armed.register(self._ready, 0)

    def begin(self) -> None:
        """From now on this thread answers; call it when all that arrived has been answered."""
        self._active = True
        self._armed.modify(self._ready, select.EPOLLIN)

    def end(self) -> None:
        """From now on it does not; waits for the turn that it is in, if it is, and for no other."""
        self._active = False  # first: else it could take the lock again and again
        self._armed.modify(self._ready, 0)
        with self.turn:
            pass

    def run(self) -> None:
        """The thread."""
        left: set[int] = set()
        while True:
            self._armed.poll(0 if left else None)
            with self.turn:
                if self._active:
                    ready = {descriptor for descriptor, _ in self._ready.poll(0)}
                    left = {each for each in ready | left if self._duties[each]()}
                else:
                    left = set()
