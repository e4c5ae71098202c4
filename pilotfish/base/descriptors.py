"""Fit the number of connections into the system's limit of open files."""

import errno
import os
import resource
from contextlib import suppress

# Errors of `accept` or `open` if the machine or the process has no room left.
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN})
_MIN_RESERVED = 48  # descriptors reserved for other files under a small limit


def raise_limit(wanted: int) -> int | None:
    """Raise the soft limit towards ``wanted``, within the hard one.

    Return the limit in force; None: no limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < wanted:  # below 0: unlimited
        most = wanted if hard < 0 else min(wanted, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return None if soft < 0 else soft


def connection_room(connections: int, reserved: int) -> int:
    """Return how many of these connections fit beside ``reserved`` open files.

    A limit that is too small for both is divided; at most three quarters go to the reserved files.
    """
    limit = raise_limit(connections + reserved)
    if limit is None or limit >= connections + reserved:
        return connections
    return max(2, min(connections, limit - min(reserved, max(_MIN_RESERVED, limit * 3 // 4))))


def open_files() -> int:
    """Count the open descriptors of this process."""
    return len(os.listdir("/proc/self/fd")) - 1  # minus the listing's own
