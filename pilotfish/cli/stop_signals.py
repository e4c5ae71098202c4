"""End a command by SIGINT, SIGTERM or SIGHUP in steps, which a thread of its own takes.

A handler runs in the main thread, between any two instructions. If it took a lock, it could wait
for the main thread itself; an exception of it could be lost in a callback; and it waits while the
main thread is in a library, such as one that loads a model. So these handlers do nothing. Python
writes the number of each signal to a socket, which the thread reads.
"""

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from pilotfish.base.errors import SIGINT_CODE

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AT_ONCE = "pilotfish: the command did not stop in time, and was ended."


class Step(NamedTuple):
    """What a signal does. After ``within_s`` seconds, or at the next signal, the next step comes.

    act: called in another thread than the main thread; it must not wait.
    """

    act: Callable[[], None]
    within_s: float


@contextmanager
def stopping_by(*steps: Step, lost: Callable[[], str] = lambda: "") -> Iterator[list[int]]:
    """Take these steps after one of these signals within the block; yield the signals so far.

    If the block has not ended after the last step's time, or at one more signal, the process ends:
    with 74 if something is lost by that, with `SIGINT_CODE` if its first signal was SIGINT, else
    with 0. lost: called then, in another thread; returns a sentence that tells what is lost. Only
    for the main thread.
    """
    received: list[int] = []
    read, write = socket.socketpair()
    write.setblocking(False)
    thread = threading.Thread(target=_follow, args=(read, steps, received, lost), daemon=True)
    before_fd = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    numbers = [number for number in _STOPS if number != signal.SIGHUP or not _is_ignored(number)]
    before = {number: signal.signal(number, lambda number, frame: None) for number in numbers}
    thread.start()
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        write.close()  # ends the thread
        thread.join()
        read.close()


def _is_ignored(number: int) -> bool:
    """Return whether a signal was ignored when the command began, as SIGHUP is under nohup."""
    return signal.getsignal(number) == signal.SIG_IGN


def _follow(
    read: socket.socket, steps: tuple[Step, ...], received: list[int], lost: Callable[[], str]
) -> None:
    """Take the steps until the other end of the socket closes."""
    waiting = list(steps)
    until_s: float | None = None
    while True:
        read.settimeout(None if until_s is None else max(1e-3, until_s - time.monotonic()))
        with suppress(TimeoutError):
            data = read.recv(64)
            if not data:
                return
            numbers = [number for number in data if number in _STOPS]
            if not numbers:  # another signal that has a handler
                continue
            received += numbers
        if not waiting:
            _end(received[0], lost())
        step = waiting.pop(0)
        step.act()
        until_s = time.monotonic() + step.within_s


def _end(number: int, lost: str) -> None:
    """End the process; a terminal or pipe that takes no text does not hinder this."""
    with suppress(OSError, ValueError):
        descriptor = sys.stderr.fileno()
        if select.select([], [descriptor], [], 0.0)[1]:
            os.write(descriptor, f"{_AT_ONCE}{f' {lost}' if lost else ''}\n".encode())
    if lost:
        os._exit(os.EX_IOERR)
    os._exit(SIGINT_CODE if number == signal.SIGINT else 0)
