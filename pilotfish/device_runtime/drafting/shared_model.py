"""One model for all lanes of a device, and the lock with which the lanes take turns."""

import threading
from collections import deque

from pilotfish.base.errors import UnsupportedError
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.language_model import open_model
from pilotfish.engines.pass_times import pass_times

_WIDTHS = (1, 2, 4)


class SharedModel:
    """One model with a slot for each drafter. Thread-safe.

    Drafters hold `lock` for one pass at a time, in order of request: a pass returns views that the
    next pass overwrites, and a long prompt of one lane must not delay the others.
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
        self.decoder = open_model(
            artifact,
            slots=lanes,
            context=context,
            threads=threads,
            provider=provider,
            drafts=True,
        )
        self.pass_times = pass_times(self.decoder, _WIDTHS)
        self.lock = FairLock()
        self._free = list(range(lanes))
        self._lock = threading.Lock()

    def acquire_slot(self) -> int:
        """Empty and return the lowest free slot; `UnsupportedError` if all are taken."""
        with self._lock:
            if not self._free:
                raise UnsupportedError(
                    f"All {self.decoder.slots} lanes of this device are in use: close a device, "
                    "or open the device with more lanes."
                )
            slot = min(self._free)
            self._free.remove(slot)
        with self.lock:
            self.decoder.rollback(slot, 0)
        return slot

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

    def _pass_on(self) -> None:
        if self._waiting:
            self._waiting.popleft().release()
        else:
            self._taken = False
