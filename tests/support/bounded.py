"""Bounds on the memory and processor time that the code in a `with` block takes."""

import resource
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def bounded(peak_bytes: int, cpu_s: float | None = None) -> Iterator[None]:
    """Assert that the block allocates less than `peak_bytes`, in less than `cpu_s` seconds."""
    tracemalloc.start()
    begun = time.process_time()
    try:
        yield
        spent_s, peak = time.process_time() - begun, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < peak_bytes
    assert cpu_s is None or spent_s < cpu_s


class TooLargeError(Exception):
    """The block in `limited` wanted more memory."""


@contextmanager
def limited(most_bytes: int) -> Iterator[None]:
    """Refuse this process more address space than `most_bytes` beyond what it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + most_bytes, before[1]))
    try:
        yield
    except MemoryError as error:
        raise TooLargeError from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
