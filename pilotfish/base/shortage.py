"""Tell the errors of a machine that has no room left from those of a program."""

from pilotfish.base.descriptors import EXHAUSTED

_NO_THREAD = "can't start new thread"  # CPython says no more of it


def shortage(error: BaseException) -> str | None:
    """Say what the machine lacks, where that is why something failed; None: it is not."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, RuntimeError) and str(error).startswith(_NO_THREAD):
        return "threads or memory"
    if isinstance(error, OSError) and error.errno in EXHAUSTED:
        return "open files or memory"
    return None
