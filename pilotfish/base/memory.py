"""Read the size of this process's memory."""

import os
from contextlib import suppress

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Return the size of this process's resident memory; 0: unknown."""
    with suppress(OSError, IndexError, ValueError):
        # four times as fast as `Path.read_text`
        descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int(os.read(descriptor, 64).split()[1]) * _PAGE_BYTES
        finally:
            os.close(descriptor)
    return 0
