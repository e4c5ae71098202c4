"""Fit the number of connections into the system's limit of open files."""

import errno
import os
import resource
from contextlib import suppress

# Error numbers of `accept` and `open` that mean: no descriptor or no memory is left.
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN})
_MIN_RESERVED = 48  # minimum number of descriptors for files other than connections


def raise_limit(wanted: int) -> int | None:
    """Raise the soft limit of open files to ``wanted``, or to the hard limit if that is lower.

    Return the limit in force; None: no limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < wanted:  # a negative limit: unlimited
        most = wanted if hard < 0 else min(wanted, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return None if soft < 0 else soft


def connection_room(connections: int, reserved: int) -> int:
    """Return how many of ``connections`` can be open together with ``reserved`` other files.

    If the limit is too small for both, the other files get at most three quarters of it, and the
    connections get the rest.
    """
    limit = raise_limit(connections + reserved)
    if limit is None or limit >= connections + reserved:
        return connections
    return max(2, min(connections, limit - min(reserved, max(_MIN_RESERVED, limit * 3 // 4))))


def open_files() -> int:
    """Count the open descriptors of this process."""
    return len(os.listdir("/proc/self/fd")) - 1  # minus the descriptor of the listing itself
