"""How many connections a process can have within the system's limit of open files."""

import errno
import os
import resource
from contextlib import suppress

# What `accept` or `open` fails with where the machine or the process has no room left.
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN})
_MIN_RESERVED = 48  # of a small limit, that are kept for other needs


def raise_limit(wanted: int) -> int | None:
    """Raise the soft limit to ``wanted``, as far as the hard one allows.

    Returns the limit in force; None: there is none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < wanted:  # below 0: unlimited
        most = wanted if hard < 0 else min(wanted, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return None if soft < 0 else soft


def connection_room(connections: int, reserved: int) -> int:
    """Return how many of so many connections there can be beside ``own`` open files.

    A limit that is too small for both is shared: most of it is the process's own.
    """
    limit = raise_limit(connections + reserved)
    if limit is None or limit >= connections + reserved:
        return connections
    return max(2, min(connections, limit - min(reserved, max(_MIN_RESERVED, limit * 3 // 4))))


def open_files() -> int:
    """Count the descriptors that the process has open."""
    return len(os.listdir("/proc/self/fd")) - 1  # that of the listing itself
