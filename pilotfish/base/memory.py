"""Read sizes of memory: of this process, and of a machine."""

import os
import re
from contextlib import suppress
from pathlib import Path

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


def reported_bytes(root: Path = Path("/"), key: str = "MemTotal") -> int | None:
    """Return a size that the kernel reports in /proc/meminfo; None: unknown.

    root: the folder that holds /proc. key: by default the memory that the kernel manages.
    """
    text = ""
    with suppress(OSError):
        text = (root / "proc/meminfo").read_text("ascii", "replace")
    match = re.search(rf"^{key}:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None
