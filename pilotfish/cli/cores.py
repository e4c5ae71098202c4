"""Divide a machine's cores between edge and device: neither should wait for the other's threads."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager


def halves() -> tuple[set[int], set[int]]:
    """Return two halves of this process's cores, (the edge's, the device's).

    A single core is in both.
    """
    cores = sorted(os.sched_getaffinity(0))
    middle = len(cores) // 2
    return set(cores[:middle] or cores), set(cores[middle:])


@contextmanager
def kept_to(cores: Collection[int]) -> Iterator[None]:
    """In the ``with`` block, run this thread and threads that it starts on these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
