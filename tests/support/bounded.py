"""Bounds on the memory and processor time that the code in a `with` block takes."""

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


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
