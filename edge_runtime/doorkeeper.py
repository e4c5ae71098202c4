"""Answers at the edge's door while the serving thread is in a target pass, or rules on one.

The serving thread makes the target's passes itself: to hand a window to another thread, and the
verdict back, would cost every round two wake-ups. So that pings, handshakes, refusals and the next
windows need not wait for the end of a pass, the doorkeeper takes over meanwhile.

Law: sockets and sessions belong to whoever holds ``turn`` or, outside of `begin` and `end`, to the
serving thread. The doorkeeper waits on bare descriptors, which touches neither; outside of passes
it is asleep.
"""

import os
import select
import threading
from collections.abc import Callable, Mapping


class Doorkeeper(threading.Thread):
    """Between `begin` and `end` does the duty of each descriptor that becomes readable.

    A duty is done with ``turn`` held: it answers all that has arrived, and returns True if it left
    something after all. (A ZeroMQ descriptor tells of what is new, not of what was left.)
    """

    def __init__(self, duties: Mapping[int, Callable[[], bool]]) -> None:
        super().__init__(name="doorkeeper", daemon=True)
        self.turn = threading.Lock()
        self._duties = duties
        self._on_duty = False
        self._asleep = threading.Lock()  # taken once more, it waits for `begin`
        self._asleep.acquire()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # calls it from the door
        self._door = select.poll()
        for descriptor in (*duties, self._bell):
            self._door.register(descriptor, select.POLLIN)

    def begin(self) -> None:
        """From now on the doorkeeper answers; call it when all that arrived has been answered."""
        self._on_duty = True
        if self._asleep.locked():
            self._asleep.release()

    def end(self) -> None:
        """From now on it does not; waits for the turn that it is in, if it is, and for no other."""
        self._on_duty = False  # first: else the doorkeeper could take the lock again and again
        with self.turn:
            os.eventfd_write(self._bell, 1)

    def run(self) -> None:
        """The thread."""
        while True:
            self._asleep.acquire()
            left: set[int] = set()
            while self._on_duty:
                ready = {descriptor for descriptor, _ in self._door.poll(0 if left else None)}
                if self._bell in ready:
                    os.eventfd_read(self._bell)
                with self.turn:
                    if self._on_duty:
                        open_duties = (ready | left) & self._duties.keys()
                        left = {each for each in open_duties if self._duties[each]()}
